"""A model call, from messages to a stored turn. The ids that the engine receives and samples are recorded and trained
on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from outrider.dialects.base import Completion, Opening
from outrider.engines.base import Chunk, GenerateRequest
from outrider.errors import ContextOverflow, EngineMisbehaved, EngineUnavailable, RequestError, ServiceError
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.lifecycle import StopReason
from outrider.sessions.calls.limits import LimitReached
from outrider.sessions.conversation import RunEnded
from outrider.sessions.transcript import transcript
from outrider.spec import Limits, SamplingSpec
from outrider.trajectory import FinishReason, ForkCause, JoinKind, unpack_ids, unpack_logprobs

from .world import BASH, a_world, call_markup, chat_request, echoed, picture, text_of

USER = {"role": "user", "content": "hello there"}


async def test_the_second_turn_begins_with_every_id_of_the_first(tmp_path: Path) -> None:
    async with a_world(tmp_path, [call_markup("ls"), "done<|im_end|>"]) as world:
        first = await world.ask(USER, tools=[BASH])
        answer = {"role": "tool", "tool_call_id": first.reply.tool_calls[0].id, "content": "a.txt"}
        await world.ask(USER, echoed(first), answer, tools=[BASH])
        given = [request.input_ids.tolist() for request in world.engine.requests]
        one, two = world.turns
        sampled = unpack_ids(one.output_ids).tolist()
        assert given[1][: len(given[0]) + len(sampled)] == given[0] + sampled
        assert (one.join, two.join, two.parent) == (JoinKind.ROOT, JoinKind.APPEND, 0)
        assert given[1] == given[0] + sampled + unpack_ids(two.prompt_delta).tolist()


async def test_recorded_logprobs_are_the_engines_own(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["some words<|im_end|>"]) as world:
        await world.ask(USER)
        [turn] = world.turns
        ids = unpack_ids(turn.output_ids).tolist()
        expected = [scripted_logprob(turn.prompt_length + at, token) for at, token in enumerate(ids)]
        assert unpack_logprobs(turn.logprobs).tolist() == expected


async def test_text_is_streamed_while_the_engine_is_still_generating(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": "first words and more<|im_end|>", "stall": 4}]) as world:
        async with aclosing(world.conversation.call(chat_request(USER), dialect="chat")) as batches:
            opening, *first = await anext(batches)
            assert isinstance(opening, Opening)
            early = text_of(first)
            while not early:
                early += text_of(await anext(batches))
            assert world.turns == []
            world.engine.release()
            rest = [step async for steps in batches for step in steps]
        assert early + text_of(rest) == "first words and more"
        assert isinstance(rest[-1], Completion)
        assert len(world.turns) == 1


async def test_a_caller_that_leaves_aborts_upstream_and_its_tokens_are_recorded(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": "never to be finished<|im_end|>", "stall": 3}]) as world:
        async with aclosing(world.conversation.call(chat_request(USER), dialect="chat")) as batches:
            for _ in range(3):  # each batch has one token
                await anext(batches)
        assert world.engine.abort_seen.is_set()
        [turn] = world.turns
        assert (turn.finish, len(unpack_ids(turn.output_ids))) == (FinishReason.ABORT, 3)


async def test_the_same_request_again_is_a_retry_of_the_same_prompt(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>", "two<|im_end|>"]) as world:
        await world.ask(USER)
        await world.ask(USER)
        assert [turn.join for turn in world.turns] == [JoinKind.ROOT, JoinKind.RETRY]
        assert world.turns[0].prompt_delta == world.turns[1].prompt_delta


async def test_a_rewritten_history_is_a_named_fork(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>", "two<|im_end|>"]) as world:
        await world.ask(USER)
        await world.ask(USER, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "so?"})
        assert world.turns[1].join is JoinKind.FORK
        assert world.turns[1].cause is ForkCause.HISTORY_REWRITTEN
        assert world.conversation.tree.forks == {ForkCause.HISTORY_REWRITTEN: 1}


async def test_the_tasks_sampling_wins_and_is_recorded(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], sampling=SamplingSpec(temperature=0.5, max_tokens=50)) as world:
        await world.ask(USER, temperature=2.0, top_p=0.9, max_tokens=10)
        used = world.turns[0].sampling
        assert (used["temperature"], used["top_p"], used["max_tokens"]) == (0.5, 0.9, 50)


async def test_an_oversized_max_tokens_is_clamped_to_the_context(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], context_tokens=512) as world:
        await world.ask(USER, max_tokens=1_000_000)
        turn = world.turns[0]
        assert turn.sampling["max_tokens"] == 512 - turn.prompt_length


async def test_a_prompt_that_does_not_fit_is_a_context_overflow(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], context_tokens=64) as world:
        with pytest.raises(ContextOverflow):
            await world.ask({"role": "user", "content": "many words " * 100})
        assert world.turns == []
        assert isinstance(world.conversation.failure, ContextOverflow)


async def test_a_call_that_succeeds_clears_the_failure_of_one_before(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], context_tokens=64) as world:
        with pytest.raises(ContextOverflow):
            await world.ask({"role": "user", "content": "many words " * 100})
        await world.ask(USER)
        assert world.conversation.failure is None


TITLE = {"role": "user", "content": "a title, please"}
BREAKS_OFF = {"when": "hello there", "reply": "some words and more<|im_end|>", "fail": "unavailable", "after": 2}


async def test_a_call_beside_the_one_that_failed_does_not_make_up_for_it(tmp_path: Path) -> None:
    """The last call to end has succeeded, but it began before the failure. It does not show that the agent has
    continued."""
    async with a_world(tmp_path, [BREAKS_OFF, {"reply": "a title<|im_end|>", "stall": 1}]) as world:
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(world.ask(TITLE, tools=[BASH]))
            await world.engine.stalled.wait()
            with pytest.raises(EngineUnavailable):
                await world.ask(USER, tools=[BASH])
            world.engine.release()
        assert beside.result().reply.content == "a title"
        assert isinstance(world.conversation.failure, EngineUnavailable)
        await world.ask(TITLE, tools=[BASH])
        assert world.conversation.failure is None


@pytest.mark.parametrize(
    ("first", "then", "goes_on"),
    [([BASH], [], False), ([BASH], [BASH], True), ([], [], True), ([], [BASH], True)],
    ids=["side call", "with tools", "without tools", "now with tools"],
)
async def test_a_call_for_a_title_does_not_show_that_the_work_goes_on(
    tmp_path: Path, first: list[Any], then: list[Any], goes_on: bool
) -> None:
    async with a_world(tmp_path, [BREAKS_OFF, "a reply<|im_end|>"]) as world:
        with pytest.raises(EngineUnavailable):
            await world.ask(USER, tools=first)
        await world.ask(TITLE, tools=then)
        assert (world.conversation.failure is None) is goes_on


async def test_an_engines_failure_outranks_a_prompt_that_was_too_long(tmp_path: Path) -> None:
    """The overlong prompt may belong to a side call. If it outranked the failure, the attempt would be graded."""
    async with a_world(tmp_path, [BREAKS_OFF], context_tokens=256) as world:
        with pytest.raises(EngineUnavailable):
            await world.ask(USER, tools=[BASH])
        with pytest.raises(ContextOverflow):
            await world.ask({"role": "user", "content": "many words " * 1000})
        assert isinstance(world.conversation.failure, EngineUnavailable)


@pytest.mark.deep  # nine calls, and each is tried again
async def test_failures_that_nothing_makes_up_for_are_not_heaped_up(tmp_path: Path) -> None:
    async with a_world(tmp_path, [BREAKS_OFF]) as world:
        for tools in ([BASH], [], []) * 3:
            with pytest.raises(EngineUnavailable):
                await world.ask(USER, tools=tools)
        failed = world.conversation._failed._failed
        assert [one.tools for one in failed] == [True, False]


async def test_the_turn_limit_is_told_once_and_refuses_further_calls(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], limits=Limits(turns=1)) as world:
        await world.ask(USER)
        for _ in range(2):
            with pytest.raises(LimitReached):
                await world.ask(USER)
        assert world.limits_told == [StopReason.MAX_TURNS]


async def test_the_token_limit_bounds_the_whole_session(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["many many many words<|im_end|>"], limits=Limits(response_tokens=3)) as world:
        completion = await world.ask(USER)
        assert (completion.finish, completion.completion_tokens) == (FinishReason.LENGTH, 3)
        with pytest.raises(LimitReached):
            await world.ask(USER)


async def test_an_engine_that_dies_mid_reply_leaves_an_aborted_turn(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}]) as world:
        with pytest.raises(EngineUnavailable):
            await world.ask(USER)
        [turn] = world.turns
        assert (turn.finish, len(unpack_ids(turn.output_ids))) == (FinishReason.ABORT, 2)


class Liar(ScriptedEngine):
    """An engine that sends two tokens of its script, then an id outside the tokenizer's vocabulary."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            for _ in range(2):
                yield await anext(chunks)
        yield Chunk(ids=[1 << 40], logprobs=[-1.0], finish=FinishReason.STOP)


async def test_an_engine_that_lies_mid_reply_leaves_what_it_had_sampled(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["some words here<|im_end|>"], kind=Liar) as world:
        with pytest.raises(EngineMisbehaved, match="the id 1099511627776"):
            await world.ask(USER)
        assert isinstance(world.conversation.failure, EngineMisbehaved)
        assert world.conversation.open
        [turn] = world.turns
        assert (turn.finish, len(unpack_ids(turn.output_ids))) == (FinishReason.ABORT, 2)


async def test_a_malformed_call_comes_back_as_text_and_is_counted(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["<tool_call>\n{broken\n</tool_call><|im_end|>"]) as world:
        completion = await world.ask(USER, tools=[BASH])
        assert completion.reply.tool_calls == ()
        assert "{broken" in completion.reply.content
        assert world.turns[0].malformed_calls == 1


async def test_closing_cuts_off_what_is_in_flight_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": "never to be finished<|im_end|>", "stall": 3}]) as world:
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(world.ask(USER))
            await world.engine.stalled.wait()
            await world.conversation.close()
        assert hanging.cancelled()
        assert [turn.finish for turn in world.turns] == [FinishReason.ABORT]
        with pytest.raises(RunEnded):
            await world.ask(USER)


async def test_parallel_calls_are_branches_and_each_keeps_its_own_ids(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>"]) as world:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(world.ask({"role": "user", "content": f"question {number}"}))
        assert sorted(turn.index for turn in world.turns) == list(range(8))
        assert {turn.join for turn in world.turns} == {JoinKind.ROOT}
        assert {turn.conversation for turn in world.turns} == set(range(8))


async def test_a_message_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"]) as world:
        with pytest.raises(RequestError) as refused:
            await world.ask(USER, {"role": "nobody", "content": "x"})
        assert refused.value.field is not None
        assert refused.value.field.startswith("messages[1]")
        assert world.turns == []


async def test_the_transcript_is_the_main_conversation_with_its_last_reply(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>", "title<|im_end|>"]) as world:
        await world.ask(USER)
        await world.ask({"role": "system", "content": "make a title"}, {"role": "user", "content": "of this"})
        assert [message.content for message in transcript(world.turns)] == ["hello there", "one"]


async def test_a_prompt_is_counted_without_an_engine(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>"]) as world:
        counted = await world.conversation.count(chat_request(USER))
        assert world.conversation.backend.pool.status()[0].sessions == 0
        await world.ask(USER)
        assert counted == world.turns[0].prompt_length
        await world.conversation.backend.pool.remove("scripted")
        assert await world.conversation.count(chat_request(USER)) == counted


async def test_an_image_is_not_counted_where_the_model_is_given_text_only(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>"]) as world:
        with pytest.raises(RequestError, match="text only"):
            await world.conversation.count(chat_request(picture(b"one")))
        await world.conversation.close()
        with pytest.raises(RunEnded):
            await world.conversation.count(chat_request(picture(b"one")))
        assert world.conversation.backend.pool.status()[0].sessions == 0


async def test_a_turn_that_cannot_be_stored_is_known_though_its_caller_has_left(tmp_path: Path) -> None:
    """An agent may end while its last call is under way. A failure to store the call's turn is still recorded."""
    async with a_world(tmp_path, ["one<|im_end|>"]) as world:
        world.store_failure = ServiceError("disk full")
        async with asyncio.TaskGroup() as callers:
            call = callers.create_task(world.ask(USER))
            await world.storing.wait()
            call.cancel()
        assert call.cancelled()
        assert world.conversation.broken is world.store_failure
        assert not world.conversation.open


async def test_a_turn_that_cannot_be_stored_ends_the_record(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>"]) as world:
        world.store_failure = ServiceError("disk full")
        with pytest.raises(ServiceError, match="disk full"):
            await world.ask(USER)
        assert isinstance(world.conversation.failure, ServiceError)
        world.store_failure = None
        with pytest.raises(RunEnded):
            await world.ask(USER)
