"""The parameters of a request besides its messages: which are sent to the engine, recorded, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import EngineMisbehaved, EngineRejected, RequestError
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import StopReason
from outrider.spec import SamplingSpec
from outrider.tokens.samples import MAX_IGNORED_NAMES, OTHER_IGNORED, build_samples, count_session
from outrider.trajectory import FinishReason, SessionResult

from .world import BASH, a_world, call_markup, echoed

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
RESULT = SessionResult(session_id="s", group_id="g", sample_index=0, attempt=1, stop_reason=StopReason.COMPLETED)


async def test_what_alters_sampling_reaches_the_engine_and_is_recorded(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"presence_penalty": 0.5, "logit_bias": {"7": -5}, "min_tokens": 1, "stop_token_ids": [9]}
    async with a_world(tmp_path, ["x<|im_end|>", "y<|im_end|>"]) as world:
        first = await world.ask(USER, **fields)
        await world.ask(USER, echoed(first), USER)
        told = world.engine.requests[0].sampling
        assert (told.presence_penalty, told.logit_bias, told.min_tokens) == (0.5, {7: -5.0}, 1)
        assert told.stop_token_ids[-1] == 9
        assert len(told.stop_token_ids) > 1
        one, two = world.turns
        assert (one.sampling["presence_penalty"], one.sampling["logit_bias"]) == (0.5, {"7": -5.0})
        assert (one.altered, two.altered) == (True, False)
        [row] = build_samples(world.turns, RESULT)
        assert (row.turns, row.altered) == ((0, 1), (0,))


async def test_the_tasks_penalties_and_thinking_win(tmp_path: Path) -> None:
    task = SamplingSpec(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, thinking=False)
    asked = {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1, "enable_thinking": True}
    async with a_world(tmp_path, ["x<|im_end|>"], sampling=task) as world:
        await world.ask(USER, **asked)
        [turn] = world.turns
        assert not turn.altered
        assert turn.sampling["thinking"] is False
        assert shown(world.engine).endswith("<think>\n\n</think>\n\n")


async def test_thinking_is_switched_for_one_turn_and_counted_alike(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"]) as world:
        first = await world.ask(USER, reasoning_effort="none")
        await world.ask(USER, echoed(first), USER)
        assert [turn.sampling["thinking"] for turn in world.turns] == [False, None]
        assert first.prompt_tokens == len(world.engine.requests[0].input_ids)
        assert world.turns[1].parent == 0


async def test_what_has_no_effect_is_noted_with_the_turn_and_counted(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>", "y<|im_end|>"]) as world:
        first = await world.ask(USER, tools=[BASH, {"type": "web_search"}], verbosity="low", from_the_future=1)
        await world.ask(USER, echoed(first), USER, tools=[BASH, {"type": "web_search"}])
        assert set(world.turns[0].ignored) == {"verbosity", "unknown.from_the_future", "tools.web_search"}
        counted = count_session(world.turns).ignored
        assert counted == {"tools.web_search": 2, "verbosity": 1, "unknown.from_the_future": 1}


async def test_names_that_clients_make_up_are_bounded(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"]) as world:
        for call in range(4):
            await world.ask(USER, **{f"made_up_{call}_{number}_{'x' * 99}\n": 1 for number in range(100)})
        for turn in world.turns:
            assert len(turn.ignored) == 32
            assert all(len(name) <= 64 and name.isprintable() for name in turn.ignored)
        counted = count_session(world.turns).ignored
        assert len(counted) == MAX_IGNORED_NAMES + 1
        assert counted[OTHER_IGNORED] == 4 * 32 - MAX_IGNORED_NAMES


async def test_a_reply_is_held_to_a_form_and_does_not_think(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["{}<|im_end|>"]) as world:
        await world.ask(USER, response_format=FORM, enable_thinking=True)
        [turn] = world.turns
        assert world.engine.requests[0].sampling.constraint == Constraint(
            ConstraintKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}}}'
        )
        assert turn.sampling["constraint"]["kind"] == "json_schema"
        assert turn.altered
        assert shown(world.engine).endswith("</think>\n\n")
        assert turn.ignored == ("thinking",)


async def test_a_form_and_tools_at_once_are_refused(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["{}<|im_end|>"]) as world:
        with pytest.raises(RequestError, match="cannot call a tool"):
            await world.ask(USER, response_format=FORM, tools=[BASH])
        await world.ask(USER, response_format=FORM, tools=[BASH], tool_choice="none")
        assert len(world.turns) == 1


REJECTS = {"reply": "x<|im_end|>", "fail": "rejected"}


async def test_what_an_engine_refuses_of_the_clients_own_is_no_failure_of_the_engine(tmp_path: Path) -> None:
    async with a_world(tmp_path, [REJECTS]) as world:
        for fields in ({"guided_regex": "(unclosed"}, {"logit_bias": {"7": 1}}, {"stop_token_ids": [9]}):
            with pytest.raises(RequestError, match="by its script"):
                await world.ask(USER, **fields)
            assert world.conversation.failure is None
        asked = len(world.engine.requests)
        for fields in ({"logit_bias": {"999999": 1}}, {"stop_token_ids": [999_999]}):
            with pytest.raises(RequestError, match="token 999999, which the model does not have"):
                await world.ask(USER, **fields)
            assert world.conversation.failure is None
        assert len(world.engine.requests) == asked
        with pytest.raises(EngineRejected):
            await world.ask(USER)
        assert isinstance(world.conversation.failure, EngineRejected)


async def test_a_stop_token_of_the_clients_is_no_text(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one two<|im_end|>"]) as world:
        assert world.engine._tokenizer is not None
        ids = world.engine._tokenizer.encode("one two")
        first = await world.ask(USER, stop_token_ids=[ids[-1]])
        assert first.reply.content == world.engine._tokenizer.decode(ids[:-1])
        await world.ask(USER, echoed(first), USER)
        assert world.turns[1].parent == 0


class Plain(ScriptedEngine):
    """A third party's engine that does not declare response formats."""

    constraints = frozenset()


async def test_an_engine_that_cannot_is_not_asked(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["{}<|im_end|>"], kind=Plain) as world:
        with pytest.raises(RequestError, match="cannot constrain a reply by a json_schema") as caught:
            await world.ask(USER, response_format=FORM)
        assert caught.value.hint
        assert not world.engine.requests
        assert world.conversation.failure is None


READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
NAMED = {"type": "function", "function": {"name": "bash"}}


@pytest.mark.parametrize(("choice", "names"), [("required", ["bash", "read"]), (NAMED, ["bash"])])
async def test_a_forced_call_is_held_by_a_grammar_and_does_not_think(
    tmp_path: Path, choice: Any, names: list[str]
) -> None:
    async with a_world(tmp_path, [call_markup("ls")]) as world:
        done = await world.ask(USER, tools=[BASH, READ], tool_choice=choice, enable_thinking=True)
        [turn] = world.turns
        constraint = world.engine.requests[0].sampling.constraint
        assert constraint is not None
        assert constraint.kind is ConstraintKind.TOOL_CALLS
        [*tags] = json.loads(constraint.text)["format"]["tags"]
        assert [tag["begin"].split('"')[3] for tag in tags] == names
        assert tags[0]["content"]["json_schema"] == PARAMETERS
        assert [call.name for call in done.reply.tool_calls] == ["bash"]
        assert turn.altered
        assert turn.sampling["constraint"]["kind"] == "tool_calls"
        assert shown(world.engine).endswith("</think>\n\n")
        assert turn.ignored == ("thinking",)


@pytest.mark.parametrize(
    ("reply", "made"), [("no.<|im_end|>", "calls no tool"), (call_markup("ls").replace("bash", "read"), "calls 'read'")]
)
async def test_a_reply_that_breaks_a_forced_call_is_the_engines_failure(tmp_path: Path, reply: str, made: str) -> None:
    async with a_world(tmp_path, [reply]) as world:
        with pytest.raises(EngineMisbehaved, match=f"the reply {made}, although the request's tool_choice"):
            await world.ask(USER, tools=[BASH, READ], tool_choice=NAMED)
        [turn] = world.turns
        assert turn.finish is FinishReason.ABORT
        assert isinstance(world.conversation.failure, EngineMisbehaved)


async def test_a_forced_call_may_be_cut_off_by_a_limit(tmp_path: Path) -> None:
    async with a_world(tmp_path, [call_markup("ls")]) as world:
        done = await world.ask(USER, tools=[BASH], tool_choice="required", max_tokens=2)
        assert (done.finish, done.reply.tool_calls) == (FinishReason.LENGTH, ())


async def test_a_forced_call_and_a_form_at_once_are_refused(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["{}<|im_end|>"]) as world:
        with pytest.raises(RequestError, match="at once") as caught:
            await world.ask(USER, response_format=FORM, tools=[BASH], tool_choice="required")
        assert caught.value.field == "tool_choice"
        assert not world.engine.requests


async def test_an_engine_without_grammars_refuses_a_forced_call(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], kind=Plain) as world:
        with pytest.raises(RequestError, match="cannot be held to calls of chosen tools") as caught:
            await world.ask(USER, tools=[BASH], tool_choice="required")
        assert (caught.value.field, bool(caught.value.hint)) == ("tool_choice", True)
        await world.ask(USER, tools=[BASH], tool_choice="auto")
        assert len(world.engine.requests) == 1


async def test_a_grammar_that_the_engine_refuses_is_the_clients_error(tmp_path: Path) -> None:
    async with a_world(tmp_path, [REJECTS]) as world:
        with pytest.raises(RequestError, match="by its script"):
            await world.ask(USER, tools=[BASH], tool_choice="required")
        assert world.conversation.failure is None


def shown(engine: ScriptedEngine) -> str:
    """The newest prompt as text."""
    assert engine._tokenizer is not None
    return engine._tokenizer.decode(engine.requests[-1].input_ids.tolist())
