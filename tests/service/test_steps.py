"""Tasks of several steps: the agent starts anew for each step in the same sandbox, and each step is graded
separately."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.config import PluginsConfig
from outrider.errors import Conflict, EvaluatorError, InvalidField
from outrider.evaluators.base import Outcome
from outrider.evaluators.verdict import MAX_METRICS as MAX_VERDICT_METRICS
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.sessions.step_verdicts import MAX_METRICS, verdict_on_steps
from outrider.spec import RegradeSpec
from outrider.trajectory import BranchKind, Verdict

from .conftest import MakeWorld
from .program import program
from .world import World, result_of

DOER = {"agent": "service.test_steps:Doer"}
PATH = "service.test_steps:graded"


class Doer:
    """An agent that calls the model once for each `ask` in its instruction. Its answer is the instruction."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """There are no options."""

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        said = [Message(role=Role.USER, content=context.task.instruction)]
        for number in range(context.task.instruction.count("ask")):
            said += [await context.model.chat(said), Message(role=Role.USER, content=f"and {number}")]
        return HarnessOutcome(answer=context.task.instruction)


def graded(outcome: Outcome) -> Verdict:
    options = outcome.task.evaluator.options
    assert outcome.harness.answer in (outcome.task.instruction, None)
    return Verdict(reward=options["reward"], metrics=options.get("metrics", {}), reason=outcome.task.instruction)


def earning(reward: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "callable", "path": PATH, "options": {"reward": reward, "metrics": metrics}}


async def run(w: World, *steps: dict[str, Any], **fields: Any) -> Any:
    first, *then = steps
    return await w.run(harness=DOER, then=then, **first, **fields)


def step(instruction: str, reward: float, **fields: Any) -> dict[str, Any]:
    metrics = fields.pop("metrics", {})
    return {"instruction": instruction, "evaluator": earning(reward, **metrics), **fields}


async def test_each_step_is_run_and_graded_and_the_reward_is_their_mean(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(
            w,
            step("ask, ask", 1.0, metrics={"lines": 4.0}),
            step("ask again", 0.5),
            step("ask a third time", 0.0, metrics={"lines": 2.0}),
        )
        result = result_of(session)
        assert (result.stop_reason, result.turns, result.answer) == (StopReason.COMPLETED, 4, "ask a third time")
        assert result.verdict == Verdict(
            reward=0.5,
            metrics={
                "lines": 2.0,
                "step1.reward": 1.0,
                "step1.lines": 4.0,
                "step2.reward": 0.5,
                "step3.reward": 0.0,
                "step3.lines": 2.0,
            },
            reason="ask a third time",
        )
        assert [turn.step for turn in await w.service.reader.turns(session.id)] == [0, 0, 1, 2]
        samples = await w.service.reader.samples(session.id)
        assert [(sample.kind, sample.reward) for sample in samples] == [(BranchKind.MAIN, 0.5)] * 3
        w.assert_quiet()


async def test_the_reward_may_be_that_of_the_final_step(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, step("ask", 1.0), step("ask more", 0.25, metrics={"a": 3.0}), steps_reward="final")
        verdict = result_of(session).verdict
        assert verdict is not None
        assert (verdict.reward, verdict.metrics["a"], verdict.metrics["step1.reward"]) == (0.25, 3.0, 1.0)


def test_the_metrics_of_all_steps_are_bounded() -> None:
    """The service would refuse a result with more of them, and cut off the node that sends it."""
    verdict = Verdict(reward=1.0, metrics={f"case{number}": 1.0 for number in range(MAX_VERDICT_METRICS)})
    assert len(verdict_on_steps([verdict] * 3, "mean").metrics) < MAX_METRICS
    with pytest.raises(EvaluatorError, match="the verdicts on the steps give 60005 metrics, and may give 50000"):
        verdict_on_steps([verdict] * 5, "mean")


@pytest.mark.parametrize(
    ("needs", "goes_on"),
    [({"reward": 0.5}, True), ({"reward": 0.6}, False), ({"lines": 2.0}, True), ({"words": 0.0}, False)],
)
async def test_a_step_is_begun_if_the_one_before_earned_enough(
    world: MakeWorld, needs: dict[str, float], goes_on: bool
) -> None:
    async with world() as w:
        session = await run(w, step("ask", 0.5, metrics={"lines": 2.0}), step("ask more", 1.0, needs=needs))
        result = result_of(session)
        assert result.verdict is not None
        assert (result.turns, result.verdict.reward) == ((2, 0.75) if goes_on else (1, 0.5))
        assert ("step2.reward" in result.verdict.metrics) == goes_on


async def test_steps_with_the_same_words_are_conversations_of_their_own(world: MakeWorld) -> None:
    """The second step repeats the requests of the first step. They do not count as retries whose first replies the
    agent discarded."""
    async with world() as w:
        session = await run(w, step("ask, ask", 1.0), step("ask, ask", 1.0))
        samples = await w.service.reader.samples(session.id)
        assert {sample.kind for sample in samples} == {BranchKind.MAIN}
        assert sum(sum(sample.loss_mask) for sample in samples) == result_of(session).tokens.sampled


async def test_limits_are_those_of_the_whole_session(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, step("ask, ask, ask", 0.5), step("ask", 1.0), limits={"turns": 2})
        result = result_of(session)
        assert (result.stop_reason, result.turns) == (StopReason.MAX_TURNS, 2)
        assert result.verdict is not None
        assert result.verdict.metrics == {"step1.reward": 0.5}


async def test_an_agent_that_asks_nothing_in_a_later_step_has_failed(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, step("ask", 1.0), step("be silent", 1.0), max_attempts=1)
        result = result_of(session)
        assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
        assert result.error is not None
        assert "without a single model call" in result.error.message


@pytest.mark.parametrize(
    ("then", "field"),
    [
        ({"evaluator": {"kind": "nope"}}, "task.then.0.evaluator.kind"),
        ({"evaluator": {"kind": "math", "options": {}}}, "task.then.0.evaluator.options.gold"),
        ({"prepare": [{"run": "true"}, {"upload": "gone", "to": "x"}]}, "task.then.0.prepare.1.upload"),
        ({"needs": {"reward": "much"}}, "task.then.0.needs.reward"),
    ],
)
async def test_what_is_wrong_with_a_step_is_named(world: MakeWorld, then: dict[str, Any], field: str) -> None:
    async with world() as w:
        with pytest.raises(InvalidField) as caught:
            await run(w, step("ask", 1.0), {**step("ask", 1.0), **then})
        assert caught.value.field == field


async def test_python_of_a_step_must_be_allowed(world: MakeWorld) -> None:
    async with world(plugins=PluginsConfig(allow=("service.stage", "service.test_steps:Doer"))) as w:
        with pytest.raises(InvalidField, match="is not among the Python") as caught:
            await w.submit("ask", then=[step("ask", 1.0)])
        assert caught.value.field == "task.then.0.evaluator.path"


async def test_a_session_of_several_steps_is_not_graded_again(world: MakeWorld) -> None:
    async with world() as w:
        session = await run(w, step("ask", 1.0), step("ask", 1.0))
        with pytest.raises(Conflict, match="several steps"):
            await w.service.regrade_session(session.id, RegradeSpec())


async def in_sandbox(w: World, agent: str, then: dict[str, Any], **fields: Any) -> Any:
    return await w.run(
        "ask",
        instruction="one",
        harness=program(agent),
        runtime={"kind": "namespace", "prepare": [{"write": "1\n", "to": "first"}]},
        evaluator={"run": "test -s first && echo kept > between && ! test -e second"},
        then=[{"instruction": "two", "evaluator": {"run": "cat first between second"}, **then}],
        max_attempts=2,
        **fields,
    )


async def test_a_sandbox_goes_on_from_step_to_step(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        carry = {"run": "cat made-one made-two second", "carry": ["made-one", "made-two"]}
        prepare = {"prepare": [{"run": "test -s between && test -s made-one"}, {"write": "2\n", "to": "second"}]}
        made = 'echo x > "made-$OUTRIDER_INSTRUCTION"'
        result = result_of(await in_sandbox(w, made, prepare))
        assert result.verdict is not None, result
        assert (result.verdict.reward, result.turns) == (1.0, 2)
        # A new sandbox for the last step's grading is prepared for both steps, without the changes made in between.
        alone = {"prepare": [{"write": "2\n", "to": "second"}], "evaluator": carry}
        result = result_of(await in_sandbox(w, made, alone))
        assert result.verdict is not None, result
        assert result.verdict.metrics == {"step1.reward": 1.0, "step2.reward": 1.0}
        w.assert_quiet()


async def test_an_agent_is_installed_anew_for_each_step(world: MakeWorld, temporary: Path) -> None:
    """The agent's files may contain the instruction, and the agent may have changed them."""
    async with world(http=True) as w:
        agent = {**program("cat ~/told >> told; echo changed > ~/told; exit 0"), "files": {"told": "{instruction}\n"}}
        session = await w.run(
            instruction="one",
            harness=agent,
            runtime={"kind": "namespace"},
            evaluator={"run": "true"},
            then=[{"instruction": "two", "evaluator": {"run": "printf 'one\\ntwo\\n' | cmp - told"}}],
        )
        verdict = result_of(session).verdict
        assert verdict is not None
        assert verdict.metrics["step2.reward"] == 1.0


@pytest.mark.deep
async def test_a_step_that_can_never_be_prepared_is_the_tasks_fault(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        result = result_of(await in_sandbox(w, "true", {"prepare": [{"run": "echo so; exit 3"}]}))
        assert (result.stop_reason, result.verdict, result.attempt) == (StopReason.ERROR, None, 2)
        assert result.error is not None
        assert (result.error.field, result.error.log_tail) == ("task.then.0.prepare.0", "so")
        w.assert_quiet()


async def test_a_step_that_takes_too_long_to_prepare_blames_nobody(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        slow = {"prepare": [{"run": "test -e between && sleep 60", "seconds": 0.5}]}
        result = result_of(await in_sandbox(w, "true", slow))
        assert (result.stop_reason, result.verdict, result.attempt) == (StopReason.ERROR, None, 2)
        assert result.error is not None
        assert "took longer than 0.5 s" in result.error.message


async def test_an_agent_that_keeps_the_next_step_from_being_prepared_earns_nothing(
    world: MakeWorld, temporary: Path
) -> None:
    async with world(http=True) as w:
        prepare = {"prepare": [{"run": "mkdir second"}]}
        result = result_of(await in_sandbox(w, "rm -f /usr/bin/mkdir; exit 0", prepare))
        assert (result.stop_reason, result.error, result.attempt) == (StopReason.AGENT_EXCESS, None, 1), result
        assert result.verdict is not None
        assert result.verdict.reward == 0.0
        w.assert_quiet()


@pytest.mark.deep
async def test_what_a_step_leaves_running_makes_no_call_between_the_steps(world: MakeWorld, temporary: Path) -> None:
    """A process of the first step calls the model all the time. Its calls between the steps are refused, and every turn
    counts in the step in which it was made."""
    async with world(http=True) as w:
        asks = "(while :; do ask; sleep 0.02; done) > /dev/null 2>&1 & sleep 0.2; exit 0"
        session = await in_sandbox(w, asks, {"prepare": [{"run": "sleep 0.3; echo 2 > second"}]})
        result = result_of(session)
        assert result.verdict is not None, result
        steps = [turn.step for turn in await w.service.reader.turns(session.id)]
        assert steps == sorted(steps)
        assert {*steps} == {0, 1}
        w.assert_quiet()
