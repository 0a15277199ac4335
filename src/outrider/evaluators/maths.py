"""The evaluator `math`: compares the agent's answer with gold answers as mathematics, using math-verify.

math-verify runs in other processes (see `checks/pool.py`). Invariant: if the check of an answer exceeds the time limit,
the reward is 0; if the machine cannot run the check, an EvaluatorError is raised.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from outrider.errors import InvalidField
from outrider.evaluators.answers import NoAnswer, after_box, last_words, marked_answer
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.pool import Checks, Library, checks_of
from outrider.evaluators.options import read_options
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, SandboxPath, Spec
from outrider.trajectory import Verdict

LIBRARY = Library(
    distribution="math-verify",
    packages=("math_verify",),
    install="'math-verify>=0.9,<0.10'",
    checks="outrider.evaluators.checks.math_check",
)
CHECKS = partial(Checks, library=LIBRARY)
Gold = Annotated[str, Field(min_length=1, max_length=10_000)]


def answers_of(given: Any) -> list[Any]:
    """Return the gold answers as a list. Finite numbers are converted to strings."""
    answers = given if isinstance(given, list | tuple) else [given]
    return [str(one) if type(one) in (int, float) and isfinite(one) else one for one in answers]


class MathOptions(Spec):
    """Options of kind `math`.

    gold: the right answer, or a list of accepted answers.
    answer_file: the file to which the agent writes its answer. By default, the last reply is used.
    relative_tolerance: the greatest accepted difference from the gold answer's number, as a fraction of that number. By
        default, numbers must be equal.
    seconds: maximum processor time of a check."""

    gold: Annotated[
        tuple[Gold, ...],
        BeforeValidator(answers_of),
        Field(strict=False, min_length=1, max_length=64),
    ]
    answer_file: SandboxPath | None = None
    relative_tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    seconds: Annotated[float, Field(gt=0, le=60)] = 2.0


class MathEvaluator:
    """Gives reward 1 if the answer equals a gold answer, else 0."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = read_options(MathOptions, spec)
        LIBRARY.require()

    async def check_spec(self, host: Host) -> None:
        """Raise InvalidField if math-verify cannot use a gold answer, or cannot check it in time (see
        `math_check.check`)."""
        golds = self._options.gold
        checks = await checks_of(host, CHECKS)
        request = {"golds": golds, "relative_tolerance": self._options.relative_tolerance}
        checked = await checks.check(request, seconds=self._options.seconds, submitted=True)
        answer = checked.answer or {"unusable": 0, "why": f"is {checked.fault}"}
        if (number := answer["unusable"]) is not None:
            place = "" if len(golds) == 1 or checked.answer is None else f".{number}"
            raise InvalidField(
                f"{golds[number][:200]!r} {answer['why']} ({LIBRARY})",
                field=f"task.evaluator.options.gold{place}",
                hint="write it as LaTeX, with or without dollar signs, or as a plain number",
            )

    async def evaluate(self, outcome: Outcome) -> Verdict:
        file = self._options.answer_file
        try:
            text = await last_words(outcome, file)
        except NoAnswer as none:
            return Verdict(reward=0.0, metrics={"answered": 0.0}, reason=str(none))
        answer = text if file is not None else marked_answer(text)
        request = {
            "golds": self._options.gold,
            "answer": text if answer is None else answer,
            "whole": answer is not None,
            "after": "" if file is not None else after_box(text),
            "relative_tolerance": self._options.relative_tolerance,
        }
        checks = await checks_of(outcome.host, CHECKS)
        checked = await checks.check(
            request, seconds=self._options.seconds, bucket=outcome.bucket, off_the_clock=outcome.off_the_clock
        )
        metrics = {"answered": 1.0, "check_seconds": checked.seconds}
        if checked.answer is None:
            return Verdict(reward=0.0, metrics=metrics, reason=f"{checked.fault} ({LIBRARY})")
        found, equal = checked.answer["found"], checked.answer["equal"]
        if found is None:
            return Verdict(reward=0.0, metrics=metrics | {"answered": 0.0}, reason=f"no answer found ({LIBRARY})")
        if checked.answer.get("calculates"):
            reason = f"{found[:200]} is not worked out ({LIBRARY})"
            return Verdict(reward=0.0, metrics=metrics, reason=reason)
        judged = f"is not {' or '.join(self._options.gold)}" if equal is None else f"equals {equal}"
        return Verdict(
            reward=0.0 if equal is None else 1.0, metrics=metrics, reason=f"{found[:200]} {judged[:500]} ({LIBRARY})"
        )
