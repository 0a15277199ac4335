"""The evaluators that combine other evaluators (their parts): `weighted` adds up the parts' rewards, `all` requires
every part to pass.

Invariants: the parts grade the same outcome in order, one at a time, and share one time limit; if one part cannot
grade, the whole evaluation fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from outrider.errors import EvaluatorError, InvalidField, renamed_field
from outrider.evaluators.base import ChecksSpec, DecidesEarly, Evaluator, Outcome
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.nested import FIELD, KINDS, WeightedOptions, nested_specs, part_spec
from outrider.evaluators.options import read_options
from outrider.evaluators.verdict import read_verdict
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

MAX_REASON = 2000
"""Maximum characters of each part's reason."""
RUN_PROGRAMS = ("code", "swebench")
"""Kinds of evaluators that run a program. With these kinds, a slow program gets reward 0 and causes no error."""


class EvaluatorPart(NamedTuple):
    spec: EvaluatorSpec
    evaluator: Evaluator


class CombiningEvaluator:
    """Combines the verdicts of several evaluators, its parts.

    Kind `weighted`: the reward is the sum of each part's reward times its weight. The rewards of turns are combined in
    the same way. Weights need not add up to 1, and a negative weight is a penalty.

    Kind `all`: the reward is 1 if every part passes, else 0."""

    takes_endpoints = True

    def __init__(self, spec: EvaluatorSpec, endpoints: Endpoints) -> None:
        if spec.kind not in KINDS:  # service/allow_lists.py looks for parts only in these kinds
            raise InvalidField("only the kinds weighted and all have parts", field=f"{FIELD}.kind")
        options = read_options(KINDS[spec.kind], spec)
        self._parts = _parts(options.parts, spec, endpoints)
        self._weighted = isinstance(options, WeightedOptions)
        option = "weights" if self._weighted else "passed"
        numbers: dict[str, float] = getattr(options, option)
        if unknown := numbers.keys() - self._parts.keys():
            raise InvalidField(
                f"there is no part {sorted(unknown)[0]!r}",
                field=f"{FIELD}.options.{option}",
                hint=f"parts: {', '.join(self._parts)}",
            )
        self._numbers = dict.fromkeys(self._parts, 1.0) | numbers

    async def check_spec(self, host: Host) -> None:
        for name, part in self._parts.items():
            if isinstance(part.evaluator, ChecksSpec):
                with renamed_field(FIELD, f"{FIELD}.options.parts.{name}"):
                    await part.evaluator.check_spec(host)

    def decide(self, outcome: Outcome) -> Verdict | None:
        """Return the combined verdict if every part can grade the outcome without a sandbox, otherwise None."""
        verdicts: dict[str, Verdict] = {}
        for name, part in self._parts.items():
            if not isinstance(part.evaluator, DecidesEarly):
                return None
            with _errors_of(name):
                decided = part.evaluator.decide(_outcome_for(part, outcome))
                verdict = None if decided is None else read_verdict(decided)
            if verdict is None:
                return None
            verdicts[name] = _combinable(name, verdict)
        return self._combined(verdicts)

    async def evaluate(self, outcome: Outcome) -> Verdict:
        return self._combined(await _verdicts(self._parts, outcome))

    def _combined(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        turns: dict[int, float] = {}
        if not self._weighted:
            if rewarding := next((name for name, verdict in verdicts.items() if verdict.turns), None):
                raise EvaluatorError(
                    f"part {rewarding!r} rewards turns, but kind 'all' gives only a reward for the whole session"
                )
            reward = float(all(verdict.reward >= self._numbers[name] for name, verdict in verdicts.items()))
        else:
            for name, verdict in verdicts.items():
                for index, given in verdict.turns.items():
                    turns[index] = turns.get(index, 0.0) + self._numbers[name] * given
            reward = sum(self._numbers[name] * verdict.reward for name, verdict in verdicts.items())
        metrics = {name: verdict.reward for name, verdict in verdicts.items()}
        for name, verdict in verdicts.items():
            metrics |= {f"{name}/{metric}": number for metric, number in verdict.metrics.items()}
        reasons = [f"{name}: {verdict.reason[:MAX_REASON]}" for name, verdict in verdicts.items() if verdict.reason]
        return Verdict(reward=reward, metrics=metrics, reason="\n".join(reasons) or None, turns=turns)


def _parts(
    given_parts: dict[str, dict[str, Any]], whole: EvaluatorSpec, endpoints: Endpoints
) -> dict[str, EvaluatorPart]:
    specs, programs = {}, {}
    for name, given in given_parts.items():
        field = f"{FIELD}.options.parts.{name}"
        if not name or "/" in name:
            raise InvalidField("the name of a part must not be empty and must not have a /", field=field)
        specs[name] = spec = part_spec(given, whole, field)
        programs[name] = sum(inner.kind in RUN_PROGRAMS for inner, _ in nested_specs(spec, field))
    made = {}
    for name, spec in specs.items():
        if programs[name]:
            # Parts that run programs divide the whole time limit among themselves. By default, the programs of a part
            # get three quarters of the part's share. So a slow program ends in time, and gets reward 0 instead of an
            # error.
            share = programs[name] / sum(programs.values())
            spec = spec.model_copy(update={"seconds": whole.seconds * share})
        with renamed_field(FIELD, f"{FIELD}.options.parts.{name}"):
            made[name] = EvaluatorPart(spec, make_evaluator(spec, endpoints))
    return made


async def _verdicts(parts: dict[str, EvaluatorPart], outcome: Outcome) -> dict[str, Verdict]:
    """Return the parts' verdicts by name. An EvaluatorError or a ValueError becomes an EvaluatorError that names the
    part."""
    verdicts = {}
    for name, part in parts.items():
        with _errors_of(name):
            verdict = read_verdict(await part.evaluator.evaluate(_outcome_for(part, outcome)))
        verdicts[name] = _combinable(name, verdict)
    return verdicts


def _outcome_for(part: EvaluatorPart, outcome: Outcome) -> Outcome:
    """Return the outcome for one part. The task in this outcome has the part's own spec, because a grading function
    reads its options from there."""
    return replace(outcome, task=outcome.task.model_copy(update={"evaluator": part.spec}))


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Add the part's name to an EvaluatorError raised in the block. A ValueError becomes such an EvaluatorError."""
    try:
        yield
    except (EvaluatorError, ValueError) as error:
        message = f"part {name!r}: {error}"
        if not isinstance(error, EvaluatorError):
            raise EvaluatorError(message) from error
        raise EvaluatorError(message, hint=error.hint, log_tail=error.log_tail, inside=error.inside) from error


def _combinable(name: str, verdict: Verdict) -> Verdict:
    """Return the verdict of a part. Raises EvaluatorError if the verdict rewards training rows."""
    if verdict.rows:
        raise EvaluatorError(f"part {name!r} rewards rows, which cannot be combined with the rewards of other parts")
    return verdict
