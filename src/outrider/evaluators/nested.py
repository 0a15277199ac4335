"""Reads the parts of a combining evaluator (kind `weighted` or `all`): specs of other evaluators, nested in the
combining evaluator's spec.

The service reads the nested specs before it checks which names a task may use. So this module makes no evaluator, and
imports nothing that a task names. Invariant: a part takes only the fields in WHOLE from the combining evaluator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError

from outrider.errors import InvalidField, renamed_field
from outrider.evaluators.options import read_options
from outrider.spec import REPORTED, EvaluatorSpec, Spec, complaints, fault_text

FIELD = "task.evaluator"
WHOLE = ("seconds", "carry", "runtime")
"""Fields of `task.evaluator` that a part takes from its combining evaluator, and must not set itself."""
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Specs = Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=32)]


class WeightedOptions(Spec):
    """Options of kind `weighted`.

    parts: evaluators by name, each like `task.evaluator` without `seconds`, `carry` and `runtime`.
    weights: the weight of each part. The default is 1."""

    parts: Specs
    weights: dict[str, Number] = Field(default_factory=dict)


class AllOptions(Spec):
    """Options of kind `all`.

    parts: as in kind `weighted`.
    passed: the lowest reward with which each part passes. The default is 1."""

    parts: Specs
    passed: dict[str, Number] = Field(default_factory=dict)


KINDS: dict[str, type[WeightedOptions] | type[AllOptions]] = {"weighted": WeightedOptions, "all": AllOptions}


def nested_specs(spec: EvaluatorSpec, field: str = FIELD) -> Iterator[tuple[EvaluatorSpec, str]]:
    """Yield the spec and all specs nested in it, each with the path of its field. Raises InvalidField for an invalid
    spec."""
    yield spec, field
    if spec.kind in KINDS:
        with renamed_field(FIELD, field):
            options = read_options(KINDS[spec.kind], spec)
        for name, given in options.parts.items():
            own = f"{field}.options.parts.{name}"
            yield from nested_specs(part_spec(given, spec, own), own)


def part_spec(given: dict[str, Any], whole: EvaluatorSpec, field: str) -> EvaluatorSpec:
    """Return the spec of a part, with the fields in WHOLE from `whole`, the combining evaluator's spec. Raises
    InvalidField with a path that begins with `field`."""
    for name in WHOLE:
        if name in given:
            raise InvalidField("must be set on the combining evaluator, not on a part", field=f"{field}.{name}")
    if given.get("kind") == REPORTED:
        raise InvalidField(
            "kind 'reported' takes the reward of the whole session from its agent, and cannot be a part",
            field=f"{field}.kind",
            hint="use it alone, without parts; or leave it out, and let the other parts grade",
        )
    try:
        return EvaluatorSpec.model_validate({**given, **{name: getattr(whole, name) for name in WHOLE}})
    except ValidationError as error:
        first = complaints(error)[0]
        message = fault_text(first, EvaluatorSpec)
        place = ".".join((field, *map(str, first["loc"])))
        raise InvalidField(message[:1].lower() + message[1:], field=place) from error
