"""Checks the report that completes a session whose agent runs elsewhere, and converts the report to a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidField
from outrider.evaluators.verdict import check_indexes, read_verdict
from outrider.spec import REPORTED, ReportSpec, TaskSpec
from outrider.tokens.samples import model_calls, policy_of
from outrider.trajectory import Turn, Verdict


def verdict_of(report: ReportSpec) -> Verdict:
    """Convert a report to a verdict. The report must have a reward."""
    assert report.reward is not None
    return Verdict(
        reward=report.reward, metrics=report.metrics, reason=report.reason, turns=report.turns, rows=report.rows
    )


def check_report(report: ReportSpec, task: TaskSpec, turns: Sequence[Turn]) -> None:
    """Raise InvalidField if a report does not fit the session's task and `turns`."""
    if report.error is not None:
        return
    if task.evaluator.kind != REPORTED:
        if report.reward is not None:
            raise InvalidField(
                f"the evaluator of the task, {task.evaluator.kind!r}, decides the reward",
                field="reward",
                hint="leave reward out; an answer for the evaluator is in `answer`",
            )
        return
    if report.reward is None:
        raise InvalidField("the reward is missing: the evaluator of the task is 'reported'", field="reward")
    try:
        check_indexes(read_verdict(verdict_of(report)), model_calls(turns, policy_of(task.branches)))
    except ValueError as error:
        raise InvalidField(f"the verdict does not fit the session: {error}", field="reward") from error
