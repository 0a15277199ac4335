"""The combining evaluators `weighted` and `all`. Their parts are functions of this module, and commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.config import Config, PluginsConfig
from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import ChecksSpec, DecidesEarly, Outcome
from outrider.evaluators.combined import CombiningEvaluator
from outrider.evaluators.factory import make_evaluator
from outrider.sandbox.runtimes.node_host import Host
from outrider.service.allow_lists import AllowLists
from outrider.service.principals import LOCAL
from outrider.spec import EvaluatorSpec, GroupSpec
from outrider.trajectory import Verdict
from support.service import running_service, say

Grade = Callable[..., Awaitable[Verdict]]


def gives(outcome: Outcome) -> Any:
    """Return the verdict in the part's options."""
    return outcome.task.evaluator.options["verdict"]


def says_yes(outcome: Outcome) -> Any:
    return True


class Strict:
    """An evaluator that accepts its spec when it is made, and refuses the spec in `check_spec`."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self.options = spec.options

    async def check_spec(self, host: Host) -> None:
        raise InvalidField("is not strict", field="task.evaluator.options.strict", hint="be strict")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        raise AssertionError("never")


def part(reward: Any, **verdict: Any) -> dict[str, Any]:
    options = {"verdict": {"reward": reward, **verdict}}
    return {"kind": "callable", "path": f"{__name__}:gives", "options": options}


@pytest.fixture
def grade(outcome: Callable[[EvaluatorSpec], Outcome]) -> Grade:
    async def of(kind: str, parts: dict[str, Any], **options: Any) -> Verdict:
        spec = EvaluatorSpec(kind=kind, options={"parts": parts, **options})
        return await make_evaluator(spec).evaluate(outcome(spec))

    return of


async def test_weighted_adds_up_and_keeps_what_each_part_said(grade: Grade) -> None:
    parts = {
        "right": part(1.0, metrics={"lines": 3.0}, reason="all there"),
        "style": part(0.5, turns={0: 1.0}),
        "long": part(1, turns={0: 0.5, 1: 2.0}, reason="too long"),
        "command": {"run": "exit 1"},
    }
    verdict = await grade("weighted", parts, weights={"style": 0.5, "long": -0.25})
    assert verdict.reward == 1.0 + 0.25 - 0.25
    assert verdict.metrics == {"right": 1.0, "right/lines": 3.0, "style": 0.5, "long": 1.0, "command": 0.0}
    assert verdict.reason == "right: all there\nlong: too long"
    assert verdict.turns == {0: 0.375, 1: -0.5}


@pytest.mark.parametrize(
    ("rewards", "passed", "reward"),
    [
        ((1.0, 1.0), {}, 1.0),
        ((1.0, 0.99), {}, 0.0),
        ((1.0, 0.7), {"second": 0.7}, 1.0),
        ((0.0, 1.0), {"second": 0.0}, 0.0),
        ((5.0, -1.0), {"second": -1.0}, 1.0),
    ],
)
async def test_all_asks_every_part_to_pass(grade: Grade, rewards: Any, passed: Any, reward: float) -> None:
    verdict = await grade("all", {"first": part(rewards[0]), "second": part(rewards[1])}, passed=passed)
    assert verdict.reward == reward
    assert verdict.metrics == {"first": rewards[0], "second": rewards[1]}


async def test_parts_may_have_parts(grade: Grade) -> None:
    inner = {"kind": "all", "options": {"parts": {"a": part(1.0), "b": part(0.0, reason="no")}}}
    verdict = await grade("weighted", {"both": inner, "c": part(0.5)})
    assert verdict.reward == 0.5
    assert verdict.metrics == {"both": 0.0, "both/a": 1.0, "both/b": 0.0, "c": 0.5}
    assert verdict.reason == "both: b: no"


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        ("all", {"run": "exit 7"}, "part 'bad': the evaluator exited with code 7"),
        ("weighted", {"run": "exit 7"}, "part 'bad': the evaluator exited with code 7"),
        ("weighted", {"kind": "callable", "path": f"{__name__}:says_yes"}, "part 'bad': .* returned no verdict"),
        ("weighted", part(1.0, rows={0: 1.0}), "part 'bad' rewards rows"),
        ("all", part(1.0, turns={0: 1.0}), "part 'bad' rewards turns"),
    ],
)
async def test_a_part_that_cannot_grade_fails_the_whole(grade: Grade, kind: str, bad: Any, message: str) -> None:
    with pytest.raises(EvaluatorError, match=message):
        await grade(kind, {"good": part(0.0), "bad": bad})


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("weighted", {}, "options.parts"),
        ("weighted", {"parts": {}}, "options.parts"),
        ("weighted", {"parts": {"a": 1}}, "options.parts.a"),
        ("weighted", {"parts": {"a": {"run": "true"}}, "passed": {}}, "options.passed"),
        ("weighted", {"parts": {"a": {"run": "true"}}, "weights": {"b": 1}}, "options.weights"),
        ("weighted", {"parts": {"a": {"run": "true"}}, "weights": {"a": "1"}}, "options.weights.a"),
        ("all", {"parts": {"a": {"run": "true"}}, "passed": {"b": 1}}, "options.passed"),
        ("all", {"parts": {"a/b": {"run": "true"}}}, "options.parts.a/b"),
        ("all", {"parts": {"a": {}}}, "options.parts.a"),
        ("all", {"parts": {"a": {"run": "true", "seconds": 1}}}, "options.parts.a.seconds"),
        ("all", {"parts": {"a": {"run": "true", "carry": ["x"]}}}, "options.parts.a.carry"),
        ("all", {"parts": {"a": {"run": 1}}}, "options.parts.a.run"),
        ("all", {"parts": {"a": {"kind": "nosuch"}}}, "options.parts.a.kind"),
        ("weighted", {"parts": {"a": {"run": "true"}, "b": {"kind": "reported"}}}, "options.parts.b.kind"),
        ("all", {"parts": {"a": {"kind": "callable", "path": "nosuch"}}}, "options.parts.a.path"),
        (
            "all",
            {"parts": {"a": {"kind": "weighted", "options": {"parts": {"b": {"kind": "all"}}}}}},
            "options.parts.a.options.parts.b.options.parts",
        ),
        (
            "all",
            {"parts": {"a": {"kind": "weighted", "options": {"parts": {"b": {"run": "x\0"}}}}}},
            "options.parts.a.options.parts.b.run",
        ),
    ],
)
def test_what_is_wrong_is_named_at_submission(kind: str, options: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_evaluator(EvaluatorSpec(kind=kind, options=options))
    assert caught.value.field == f"task.evaluator.{field}"


class Renamed(CombiningEvaluator):
    """A combining class with a name of its own."""


def test_only_the_built_in_names_have_parts() -> None:
    """The allow-list does not check the parts of other kinds."""
    inner = {"kind": "callable", "path": "os:system"}
    for kind in (f"{__name__}:Renamed", "outrider.evaluators.combined:CombiningEvaluator"):
        with pytest.raises(InvalidField, match="only the kinds weighted and all have parts") as caught:
            make_evaluator(EvaluatorSpec(kind=kind, options={"parts": {"a": inner}}))
        assert caught.value.field == "task.evaluator.kind"


def test_programs_share_the_time_of_the_whole() -> None:
    def code(seconds: float) -> dict[str, Any]:
        return {"kind": "code", "options": {"inputs": ["1"], "outputs": ["1"], "total_seconds": seconds}}

    def made(**parts: Any) -> None:
        make_evaluator(EvaluatorSpec(kind="weighted", seconds=60, options={"parts": parts}))

    def inner(**parts: Any) -> dict[str, Any]:
        return {"kind": "all", "options": {"parts": parts}}

    made(a=code(59), b={"run": "true"})
    made(a=code(19), b=inner(c=code(19), d=code(19)))
    for parts, field in (
        ({"a": code(30), "b": code(1)}, "a"),
        ({"a": code(20), "b": inner(c=code(1), d=code(1))}, "a"),
        ({"a": code(1), "b": inner(c=code(20), d=code(1))}, "b.options.parts.c"),
    ):
        with pytest.raises(InvalidField, match="must be below") as caught:
            made(**parts)
        assert caught.value.field == f"task.evaluator.options.parts.{field}.options.total_seconds"


async def test_parts_check_their_own_specs(tmp_path: Path) -> None:
    options = {"parts": {"good": part(1.0), "bad": {"kind": f"{__name__}:Strict"}}}
    evaluator = make_evaluator(EvaluatorSpec(kind="all", options=options))
    assert isinstance(evaluator, ChecksSpec)
    async with Host(tmp_path) as host:
        with pytest.raises(InvalidField, match="is not strict") as caught:
            await evaluator.check_spec(host)
    assert caught.value.field == "task.evaluator.options.parts.bad.options.strict"


def test_parts_name_python_only_where_the_operator_allows_it() -> None:
    inner = {"kind": "all", "options": {"parts": {"deep": {"kind": "callable", "path": "os:system"}}}}
    task = {
        "instruction": "x",
        "harness": {"agent": "tools"},
        "evaluator": {"kind": "weighted", "options": {"parts": {"ok": {"run": "true"}, "inner": inner}}},
    }
    spec = GroupSpec.model_validate({"task": task})
    with pytest.raises(InvalidField) as caught:
        AllowLists(Config()).check(spec, LOCAL)
    assert caught.value.field == "task.evaluator.options.parts.inner.options.parts.deep.path"
    AllowLists(Config(plugins=PluginsConfig(allow=("os:system",)))).check(spec, LOCAL)


async def test_a_whole_session_is_graded_by_its_parts(tmp_path: Path) -> None:
    task = {
        "instruction": "Say hello.",
        "harness": {"agent": "tools"},
        "runtime": {"kind": "memory"},
        "evaluator": {
            "kind": "weighted",
            "options": {"parts": {"first": part(0.5, metrics={"x": 2}), "second": part(0.25)}},
        },
    }
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url), AsyncClient(url) as client:
        strict = task | {"evaluator": {"kind": f"{__name__}:Strict"}}
        with pytest.raises(InvalidField, match="is not strict"):
            await client.submit({"task": strict})
        [done] = await client.wait([(await client.submit({"task": task})).id])
    verdict = done.sessions[0].result.verdict
    assert verdict.reward == 0.75
    assert verdict.metrics == {"first": 0.5, "first/x": 2.0, "second": 0.25}


class Decides:
    """An evaluator that decides with the verdict in its options."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = spec.options

    def decide(self, outcome: Outcome) -> Any:
        assert outcome.task.evaluator.options == self._options
        return self._options.get("verdict")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        raise AssertionError("never")


def decides(verdict: Any) -> dict[str, Any]:
    return {"kind": f"{__name__}:Decides", "options": {"verdict": verdict}}


DECIDED: list[tuple[str, dict[str, Any], Verdict | None]] = [
    ("weighted", {"a": decides(1.0), "b": decides({"reward": 2.0, "reason": "y"})}, Verdict(reward=3.0, reason="b: y")),
    ("all", {"a": decides(1.0), "b": decides(0.0)}, Verdict(reward=0.0)),
    ("weighted", {"a": decides(1.0), "b": decides(None)}, None),
    ("all", {"a": decides(0.0), "b": part(1.0)}, None),
]


@pytest.mark.parametrize(("kind", "parts", "wanted"), DECIDED)
def test_what_every_part_decides_is_decided(
    kind: str, parts: dict[str, Any], wanted: Verdict | None, outcome: Callable[[EvaluatorSpec], Outcome]
) -> None:
    spec = EvaluatorSpec(kind=kind, options={"parts": parts})
    evaluator = make_evaluator(spec)
    assert isinstance(evaluator, DecidesEarly)
    verdict = evaluator.decide(outcome(spec))
    assert (verdict is None) == (wanted is None)
    if verdict is not None and wanted is not None:
        assert (verdict.reward, verdict.reason) == (wanted.reward, wanted.reason)
        assert verdict.metrics.keys() == {"a", "b"}


def test_a_decision_that_is_no_verdict_names_its_part(outcome: Callable[[EvaluatorSpec], Outcome]) -> None:
    spec = EvaluatorSpec(kind="weighted", options={"parts": {"a": decides("much")}})
    evaluator = make_evaluator(spec)
    assert isinstance(evaluator, DecidesEarly)
    with pytest.raises(EvaluatorError, match="part 'a'"):
        evaluator.decide(outcome(spec))
