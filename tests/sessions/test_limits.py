"""Limits on the turns and tokens of a session with concurrent calls. A limit is never exceeded, and it harms no call
before it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from outrider.dialects.base import Completion
from outrider.engines.base import ChatChunk, ChatRequest, EngineHealth
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineUnavailable
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.calls.limits import LimitReached
from outrider.sessions.calls.on_token_engine import PROMISED_TOKENS
from outrider.sessions.conversation import Conversation
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, Turn, unpack_ids
from support.tokenizer import write_tokenizer

from .world import World, a_world, chat_request

WORDS = "a reply of a few words<|im_end|>"


def asking(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"question {number}"}


def lengths(turns: list[Turn]) -> list[int]:
    return [len(unpack_ids(turn.output_ids)) for turn in turns]


async def all_of(world: World, count: int, **fields: Any) -> list[Completion | BaseException]:
    calls = (world.ask(asking(number), **fields) for number in range(count))
    return await asyncio.gather(*calls, return_exceptions=True)


async def settled() -> None:
    """Wait until every task is blocked on something that only the test can do."""
    for _ in range(50):
        await asyncio.sleep(0)


async def length_of(folder: Path) -> int:
    """Return the length of the reply if no other call runs."""
    async with a_world(folder, [WORDS]) as world:
        await world.ask(asking(0))
        return lengths(world.turns)[0]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 50}], ids=["no max_tokens", "max_tokens 50"])
async def test_parallel_calls_sample_no_more_than_the_limit_together(tmp_path: Path, fields: dict[str, Any]) -> None:
    whole = await length_of(tmp_path)
    async with a_world(tmp_path, [WORDS], limits=Limits(response_tokens=100)) as world:
        told = world.limits_told
        replies = await all_of(world, 64, **fields)
        assert sum(lengths(world.turns)) == 100
        # Whole replies, one cut reply, and refusals for the other calls: not 64 pieces of a reply.
        assert sorted(lengths(world.turns), reverse=True) == [whole] * (100 // whole) + [100 % whole] * (
            100 % whole > 0
        )
        refused = [reply for reply in replies if not isinstance(reply, Completion)]
        assert len(refused) == 64 - len(world.turns)
        assert all(isinstance(error, LimitReached) for error in refused)
        assert told == [StopReason.MAX_TOKENS]


async def test_a_call_waits_for_what_another_may_leave_and_neither_is_harmed(tmp_path: Path) -> None:
    whole = await length_of(tmp_path)
    replies = [{"reply": WORDS, "stall": 1}]
    async with a_world(tmp_path, replies, limits=Limits(response_tokens=2 * whole)) as world:
        told = world.limits_told
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.ask(asking(1)))
            await world.engine.stalled.wait()
            second = group.create_task(world.ask(asking(2)))
            await settled()
            assert len(world.engine.requests) == 1
            world.engine.release()
        assert (first.result().finish, second.result().finish) == (FinishReason.STOP, FinishReason.STOP)
        assert world.turns[1].sampling["max_tokens"] == whole
        assert (lengths(world.turns), told) == ([whole, whole], [])


async def test_calls_that_ask_for_all_there_is_still_run_side_by_side(tmp_path: Path) -> None:
    together = asyncio.Barrier(8)

    async def sub_agent(world: World, number: int) -> None:
        async with aclosing(world.conversation.call(chat_request(asking(number)), dialect="chat")) as batches:
            await anext(batches)
            await together.wait()
            assert isinstance([steps async for steps in batches][-1][-1], Completion)

    async with a_world(tmp_path, [WORDS], limits=Limits(response_tokens=8 * PROMISED_TOKENS)) as world:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(sub_agent(world, number))
        assert {turn.finish for turn in world.turns} == {FinishReason.STOP}


async def test_a_call_has_all_that_is_free_beyond_its_promise(tmp_path: Path) -> None:
    limit = PROMISED_TOKENS + 500
    async with a_world(
        tmp_path, [{"ids": [7] * 5000}], limits=Limits(response_tokens=limit), chunk_tokens=100
    ) as world:
        completion = await world.ask(asking(1))
        assert (completion.finish, lengths(world.turns)) == (FinishReason.LENGTH, [limit])


async def test_a_call_beyond_its_promise_is_cut_where_another_was_promised_the_rest(tmp_path: Path) -> None:
    """The other call ends as it would alone."""
    replies = [
        {"ids": [7] * 5000, "when": "question 1", "stall": PROMISED_TOKENS},
        {"ids": [8] * 40, "when": "question 2"},
    ]
    limits = Limits(response_tokens=PROMISED_TOKENS + 50)
    async with a_world(tmp_path, replies, limits=limits, chunk_tokens=64) as world, asyncio.TaskGroup() as group:
        greedy = group.create_task(world.ask(asking(1)))
        await world.engine.stalled.wait()
        batches = world.conversation.call(chat_request(asking(2), max_tokens=45), dialect="chat")
        async with aclosing(batches):
            await anext(batches)
            world.engine.release()
            assert (await greedy).finish is FinishReason.LENGTH
            assert lengths(world.turns) == [PROMISED_TOKENS + 5]
            last = [steps async for steps in batches][-1][-1]
            assert isinstance(last, Completion)
            assert last.finish is FinishReason.STOP
        assert lengths(world.turns) == [PROMISED_TOKENS + 5, 40]


async def test_a_call_that_waits_can_be_given_up_and_ends_with_its_session(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": WORDS, "stall": 1}], limits=Limits(response_tokens=100)) as world:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(world.ask(asking(1)))
            await world.engine.stalled.wait()
            waiting = [group.create_task(world.ask(asking(number))) for number in (2, 3, 4)]
            await settled()
            waiting[0].cancel()
            await settled()
            assert waiting[0].cancelled()
            await world.conversation.close()
        assert all(call.cancelled() for call in (running, *waiting))
        assert len(world.engine.requests) == 1


async def test_one_call_too_many_is_refused_alone_and_the_run_ends_after_those_in_flight(tmp_path: Path) -> None:
    async with a_world(tmp_path, [{"reply": WORDS, "stall": 2}], limits=Limits(turns=1)) as world:
        told = world.limits_told
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.ask(asking(1)))
            await world.engine.stalled.wait()
            for _ in range(3):
                with pytest.raises(LimitReached, match="max_turns"):
                    await world.ask(asking(2))
            assert told == []
            world.engine.release()
        assert first.result().finish is FinishReason.STOP
        assert told == [StopReason.MAX_TURNS]
        with pytest.raises(LimitReached):
            await world.ask(asking(3))
        assert told == [StopReason.MAX_TURNS]


async def test_the_turn_of_a_call_that_failed_is_free_again(tmp_path: Path) -> None:
    replies = [{"reply": "", "stall": 0, "fail": "rejected"}, WORDS]
    async with a_world(tmp_path, replies, limits=Limits(turns=1)) as world:
        told = world.limits_told
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(all_of(world, 1))
            await world.engine.stalled.wait()
            with pytest.raises(LimitReached):
                await world.ask(asking(2))
            world.engine.release()
        assert not isinstance(failing.result()[0], Completion)
        assert (world.turns, told) == ([], [])
        await world.ask(asking(3))
        assert (world.conversation.limit, told) == (None, [])


async def test_a_reply_that_is_still_being_read_counts_as_one_turn(tmp_path: Path) -> None:
    async with a_world(tmp_path, [WORDS], limits=Limits(turns=2)) as world:
        async with aclosing(world.conversation.call(chat_request(asking(1)), dialect="chat")) as batches:
            while not isinstance((await anext(batches))[-1], Completion):
                pass
            async with asyncio.TaskGroup() as group:
                group.create_task(world.ask(asking(2)))
        assert len(world.turns) == 2


class Captured:
    """A chat engine whose replies have 10 tokens, or fewer if the limit is lower."""

    name = "captured"
    mode = TokenMode.CAPTURE
    logprob_kind = LogprobKind.RAW

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        count = min(10, request.sampling.max_tokens)
        await asyncio.sleep(0)
        yield ChatChunk(
            finish=FinishReason.STOP,
            reply=Message(role=Role.ASSISTANT, content="hello"),
            prompt_ids=[1, 2],
            output_ids=[7] * count,
            logprobs=[-0.5] * count,
        )


async def test_captured_replies_keep_the_limit_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    turns: list[Turn] = []

    async def record(turn: Turn) -> None:
        turns.append(turn)

    async with EnginePool(patience=1.0) as pool:
        await pool.add_engine(Captured())
        conversation = Conversation(
            ModelBackend(renderer=make_renderer(Tokenizer.load(tmp_path), "qwen3"), pool=pool, model="policy"),
            session_key="s-1-1",
            limits=Limits(response_tokens=45),
            sampling=SamplingSpec(),
            history="recorded",
            record=record,
        )
        world = World(lambda: conversation, None, turns)  # type: ignore[arg-type]  # it has no scripted engine
        replies = await all_of(world, 20)
        assert lengths(turns) == [10, 10, 10, 10, 5]
        assert [isinstance(reply, LimitReached) for reply in replies] == [False] * 5 + [True] * 15
        await conversation.close()


async def test_an_engine_that_fails_gives_back_what_its_call_was_promised(tmp_path: Path) -> None:
    replies = [{"reply": WORDS, "fail": "unavailable", "after": 3}, WORDS]
    async with a_world(tmp_path, replies, limits=Limits(response_tokens=20)) as world:
        with pytest.raises(EngineUnavailable):
            await world.ask(asking(1))
        assert (await world.ask(asking(2))).completion_tokens == min(17, await length_of(tmp_path / "again"))
