"""Evaluators are made from their specs, and wrong specs are refused with the name of the field."""

from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.evaluators.command import CommandEvaluator
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.function import CallableEvaluator
from outrider.spec import EvaluatorSpec


class Picky:
    def __init__(self, spec: Any) -> None:
        raise KeyError("rubric")

    async def evaluate(self, outcome: Any) -> None: ...


def test_each_kind_is_made() -> None:
    assert isinstance(make_evaluator(EvaluatorSpec(run="true")), CommandEvaluator)
    assert isinstance(make_evaluator(EvaluatorSpec(kind="callable", path="math:sqrt")), CallableEvaluator)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"kind": "nosuch"}, ".kind"),
        ({"kind": "no.such.module:Evaluator"}, ".kind"),
        ({"kind": "math:sqrt"}, ".kind"),
        ({"kind": f"{__name__}:Picky"}, ""),
        ({"kind": "callable", "path": "nosuch"}, ".path"),
        ({"kind": "callable", "path": "no.such.module:reward"}, ".path"),
        ({"kind": "callable", "path": "math:nosuch"}, ".path"),
        ({"kind": "callable", "path": "math:pi"}, ".path"),
        ({"kind": "callable", "path": "math:sqrt", "run": "true"}, ".run"),
        ({"run": "true", "path": "math:sqrt"}, ".path"),
        ({"run": "true", "options": {"a": 1}}, ".options"),
        ({"run": "echo \0"}, ".run"),
    ],
)
def test_what_is_wrong_is_named_at_submission(spec: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_evaluator(EvaluatorSpec(**spec))
    assert caught.value.field == f"task.evaluator{field}"
