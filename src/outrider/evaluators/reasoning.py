"""The evaluator `reasoning-gym`: scores the agent's answer to an entry of reasoning-gym, using the scorer of the
entry's data set.

reasoning-gym runs in other processes (see `checks/pool.py`). Invariants: a scorer that evaluates answers as Python gets
only plain expressions; a data set whose scorer is known to reward wrong answers is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from outrider.errors import InvalidField
from outrider.evaluators.answers import NoAnswer, last_words, marked_answer
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.pool import Checks, Library, checks_of
from outrider.evaluators.checks.reasoning_sets import check_data_set
from outrider.evaluators.options import read_options
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, SandboxPath, Spec
from outrider.trajectory import Verdict

LIBRARY = Library(
    distribution="reasoning-gym",
    packages=("reasoning_gym",),
    install="'reasoning-gym>=0.1.25,<0.2'",
    checks="outrider.evaluators.checks.reasoning_check",
)
CHECKS = partial(Checks, library=LIBRARY)


class ReasoningOptions(Spec):
    """Options of kind `reasoning-gym`.

    entry: an entry of a data set, with `question`, `answer` and `metadata`.
    answer_file, seconds: as in kind `math`."""

    entry: dict[str, Any]
    answer_file: SandboxPath | None = None
    seconds: Annotated[float, Field(gt=0, le=60)] = 10.0


class ReasoningGymEvaluator:
    """Gives reasoning-gym's score, from 0 to 1, as the reward."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = read_options(ReasoningOptions, spec)
        entry, metadata = self._options.entry, self._options.entry.get("metadata")
        name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
        if not isinstance(name, str):
            raise InvalidField(
                "must be the name of a data set of reasoning-gym",
                field="task.evaluator.options.entry.metadata.source_dataset",
            )
        check_data_set(name, field="task.evaluator.options.entry.metadata.source_dataset")
        if not isinstance(entry.get("answer"), str):
            raise InvalidField(
                "must be the text of the entry's own answer", field="task.evaluator.options.entry.answer"
            )
        LIBRARY.require()

    async def check_spec(self, host: Host) -> None:
        """Raise InvalidField if the entry cannot be scored, for example because its own answer does not score 1."""
        request = {"entry": self._options.entry}
        checks = await checks_of(host, CHECKS)
        checked = await checks.check(request, seconds=self._options.seconds, submitted=True)
        why = checked.fault if checked.answer is None else checked.answer["unusable"]
        if why is not None:
            raise InvalidField(f"cannot be scored: {why} ({LIBRARY})", field="task.evaluator.options.entry")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        file = self._options.answer_file
        try:
            text = await last_words(outcome, file)
        except NoAnswer as none:
            return Verdict(reward=0.0, metrics={"answered": 0.0}, reason=str(none))
        marked = text if file is not None else marked_answer(text)
        request = {"entry": self._options.entry, "answer": text if marked is None else marked}
        checks = await checks_of(outcome.host, CHECKS)
        checked = await checks.check(
            request, seconds=self._options.seconds, bucket=outcome.bucket, off_the_clock=outcome.off_the_clock
        )
        metrics = {"answered": float(marked is not None), "check_seconds": checked.seconds}
        result = checked.answer or {"refused": checked.fault}
        if "refused" in result:
            return Verdict(reward=0.0, metrics=metrics, reason=f"{result['refused']} ({LIBRARY})")
        score = result["score"]
        solved, reason = score == 1, f"it scores {score:g} ({LIBRARY})"
        metrics["solved"] = float(solved)
        if solved:
            metrics["answered"] = 1.0
        elif marked is None:
            # Some scorers give a small score for any text. So a reply without a marked answer gets reward 0.
            return Verdict(reward=0.0, metrics=metrics, reason=f"no answer is marked; {reason}")
        return Verdict(reward=score, metrics=metrics, reason=reason)
