"""Applies a task's filters to a graded session. A filter matches one kind of run, such as runs that were cut off, and
restricts what training does with the session.

Invariant: a filter never raises the session's reward. The action `zero` also removes the rewards of single turns and
rows, even negative ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import msgspec

from outrider.evaluators.verdict import MAX_REASON
from outrider.lifecycle import StopReason
from outrider.spec import Filter, FilterKind
from outrider.trajectory import BranchPolicy, FinishReason, Turn, Verdict

CUT_OFF = frozenset(
    {StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW, StopReason.AGENT_TIMEOUT}
)
REPEATS = 4
"""The filter `repeated_calls` matches a run that has at least this number of equal tool calls in a row. The filter's
`limit` replaces this number."""


class EndedAgentRun(msgspec.Struct, frozen=True):
    """The input of filters: why the agent's run ended, its turns, and its patch if `evaluator.carry` is a diff."""

    reason: StopReason
    turns: Sequence[Turn]
    patch: bytes | None


def filtered(run: EndedAgentRun, verdict: Verdict, filters: Sequence[Filter]) -> tuple[Verdict, BranchPolicy]:
    """Apply the filters to a run. Returns the changed verdict, and an upper bound for what training may do with the
    session's rows: TRAIN, MASK or DROP. Matching filters are named in the verdict's reason and metrics
    (`filter_NAME`)."""
    matching = [each for each in filters if MATCHES[each.when](run, each)]
    if not matching:
        return verdict, BranchPolicy.TRAIN
    wanted = {each.then for each in matching}
    names = dict.fromkeys(each.when for each in matching)
    reason = f"filtered: {', '.join(names)}" + (f"; {verdict.reason}" if verdict.reason else "")
    verdict = msgspec.structs.replace(
        verdict, reason=reason[:MAX_REASON], metrics={**verdict.metrics, **{f"filter_{name}": 1.0 for name in names}}
    )
    if "zero" in wanted:
        verdict = msgspec.structs.replace(verdict, reward=min(0.0, verdict.reward), turns={}, rows={})
    if "drop" in wanted:
        return verdict, BranchPolicy.DROP
    return verdict, BranchPolicy.MASK if "mask" in wanted else BranchPolicy.TRAIN


def _cut_off(run: EndedAgentRun, each: Filter) -> bool:
    return run.reason in CUT_OFF or (bool(run.turns) and run.turns[-1].finish is FinishReason.LENGTH)


def _repeated(run: EndedAgentRun, each: Filter) -> bool:
    calls = ((call.name, call.arguments) for turn in run.turns if turn.reply for call in turn.reply.tool_calls)
    return any(len(list(same)) >= (each.limit or REPEATS) for _, same in groupby(calls))


MATCHES: Mapping[FilterKind, Callable[[EndedAgentRun, Filter], bool]] = {
    "not_completed": lambda run, each: run.reason is not StopReason.COMPLETED,
    "truncated": _cut_off,
    "over_long": lambda run, each: sum(len(turn.output_ids) // 4 for turn in run.turns) > (each.limit or 0),
    "repeated_calls": _repeated,
    "malformed_calls": lambda run, each: any(turn.malformed_calls for turn in run.turns),
    "no_patch": lambda run, each: not run.patch,
}
"""For each kind of filter, a function that returns True if the filter matches a run."""
