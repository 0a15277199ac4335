"""Engines that send impossible values: each such reply is refused, for every kind of server, and the engine is
suspect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from engines.upstream import Answer, upstream
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import (
    ChatChunk,
    ChatRequest,
    Chunk,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    SamplingParams,
)
from outrider.engines.http.client import MAX_ANSWER
from outrider.engines.pool.call import FAILOVERS, PoolReply
from outrider.engines.pool.checks import FREE_CHARACTERS, ChatCheck, TokenCheck
from outrider.engines.pool.health import GOOD_REPLIES
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineMisbehaved
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.messages import Message, Role, ToolCall
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Vocabulary
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan

from .test_pool import AT_ONCE, IDS, NEVER, chat_request, engine_of, request

SAMPLING = SamplingParams(max_tokens=5, stop=("END",))
VOCABULARY = Vocabulary.of({*range(100), 110})
STOP = FinishReason.STOP
SPANS = (VersionSpan(0, 0, 1),)
NAN = float("nan")


def good(**fields: Any) -> Chunk:
    whole: dict[str, Any] = {"ids": [1], "logprobs": [-1.0], "finish": STOP}
    return Chunk(**whole | fields)


def told(**fields: Any) -> ChatChunk:
    reply = Message(role=Role.ASSISTANT, content="yes")
    ids: dict[str, Any] = {"prompt_ids": [1, 2], "output_ids": [3], "logprobs": [-0.5]}
    return ChatChunk(**ids | {"finish": STOP, "reply": reply} | fields)


def tool_call(arguments: str) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall("c", "bash", arguments),))


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (good(ids=[1] * 6, logprobs=[-1.0] * 6), "6 tokens where at most 5 were asked for"),
        (good(ids=[1, 100]), "1 log-probabilities for 2"),
        (good(ids=[], logprobs=[-1.0]), "1 log-probabilities for 0"),
        (good(ids=[99, 100], logprobs=[-1.0, -1.0]), "the id 100"),
        (good(ids=[111]), "the id 111"),
        (good(ids=[-1]), "the id -1"),
        (good(ids=[1 << 40]), "the id 1099511627776"),
        (good(logprobs=[0.01]), "log-probability 0.01"),
        (good(ids=[1, 2, 3], logprobs=[-1.0, NAN, -1.0]), "log-probability nan"),
        (good(logprobs=[-float("inf")]), "log-probability -inf"),
        (good(ids=[1, 2], logprobs=[-1.0, -1e308]), "log-probability -1e[+]308"),
        (good(logprobs=[-9999.0]), "log-probability -9999.0"),
        (good(ids=[1, 2], logprobs=[-9999.0, 0.0005]), "log-probability -9999.0"),
        (good(prompt_ids=[1, 1 << 31]), "its prompt"),
        (good(prompt_ids=[-1]), "its prompt"),
        (good(prompt_tokens=-3), "prompt tokens = -3"),
        (good(cached_tokens=1 << 70), "cached tokens"),
        (good(stop_match="NaN happened"), "stopped at 'NaN happened'"),
        (good(stop_match=1 << 40), "stopped at"),
        (good(versions=(VersionSpan(0, 0, 2),)), "policy versions"),
        (good(versions=(VersionSpan(1 << 31, 0, 1),)), "policy versions"),
        (good(versions=(VersionSpan(-1, 0, 1),)), "policy versions"),
        (good(versions=(VersionSpan(0, 0, 3), VersionSpan(1, 3, 1))), "policy versions"),
    ],
)
def test_what_cannot_be_true_is_refused(chunk: Chunk, reason: str) -> None:
    with pytest.raises(EngineMisbehaved, match=f"engine 'e' .*{reason}"):
        TokenCheck("e", SAMPLING, VOCABULARY).take(chunk)


@pytest.mark.parametrize(
    "chunk",
    [
        good(ids=[1, 2, 99, 110, 0], logprobs=[-1.0] * 5),
        good(ids=[], logprobs=[]),
        good(logprobs=[2.4e-4]),
        good(logprobs=[-0.0]),
        good(ids=[1] * 5, logprobs=[-5000.0] * 5),
        good(stop_match="END", versions=SPANS, prompt_tokens=4, cached_tokens=0),
        good(stop_match=1),
        good(prompt_ids=[1000]),  # a prompt other than ours is drift, and is counted as drift
    ],
)
def test_what_honest_engines_send_is_taken(chunk: Chunk) -> None:
    assert TokenCheck("e", SAMPLING, VOCABULARY).take(chunk) == len(chunk.ids)


def test_the_tokens_of_all_chunks_count_and_nothing_follows_the_end() -> None:
    check = TokenCheck("e", SAMPLING, VOCABULARY)
    for _ in range(5):
        check.take(good(finish=None))
    with pytest.raises(EngineMisbehaved, match="6 tokens"):
        check.take(good())
    check = TokenCheck("e", SAMPLING, VOCABULARY)
    check.take(good())
    with pytest.raises(EngineMisbehaved, match="went on"):
        check.take(good(ids=[], logprobs=[]))


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (told(output_ids=[3] * 6, logprobs=[-0.5] * 6), "6 tokens where at most 5"),
        (told(output_ids=[100]), "the id 100"),
        (told(logprobs=None), "0 log-probabilities for 1"),
        (told(logprobs=[1.0]), "log-probability 1.0"),
        (told(prompt_ids=None), "without those of its prompt"),
        (told(prompt_ids=[1 << 31]), "its prompt"),
        (told(versions=(VersionSpan(0, 0, 2),)), "policy versions"),
        (told(usage={"completion_tokens": -1}), "completion_tokens = -1"),
        (told(usage={"prompt_tokens": 1 << 64}), "prompt_tokens"),
        (told(text="x" * 1_000_000, reply=None, finish=None), "more text"),
        (told(reasoning="x" * 1_000_000, reply=None, finish=None), "more text"),
        (told(reply=tool_call("x" * 1_000_000)), "more text"),
    ],
)
def test_captured_replies_are_checked_likewise(chunk: ChatChunk, reason: str) -> None:
    with pytest.raises(EngineMisbehaved, match=f"engine 'e' .*{reason}"):
        ChatCheck("e", SAMPLING, VOCABULARY).take(chunk)


def test_an_honest_captured_reply_is_taken() -> None:
    check = ChatCheck("e", SAMPLING, VOCABULARY)
    assert check.take(ChatChunk(text="y" * FREE_CHARACTERS)) == 0
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    assert check.take(told(usage=usage, versions=SPANS, reply=tool_call("{}"))) == 1
    assert ChatCheck("e", SAMPLING, VOCABULARY).take(ChatChunk(finish=STOP, usage={"completion_tokens": 7})) == 7


VLLM = [{"choices": [{"token_ids": [1 << 40], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]}]
SGLANG = [
    {
        "output_ids": [1 << 40],
        "meta_info": {
            "completion_tokens": 1,
            "output_token_logprobs": [[-1.0, 1 << 40, None]],
            "finish_reason": {"type": "stop"},
        },
    }
]
OPENAI = [
    {
        "prompt_token_ids": [1],
        "choices": [
            {"token_ids": [1 << 40], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop", "delta": {}}
        ],
    }
]
PAGES = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}


async def refused(kind: str, events: Sequence[Any]) -> tuple[str, str | None]:
    """The error with which a stream of these events is refused, and the suspicion against the server afterwards."""
    async with upstream(Answer(events=events), pages=PAGES) as (url, _), EnginePool(probing=NEVER) as pool:
        await pool.add(EngineSpec(kind=kind, name="e", url=url))
        reply: PoolReply[Any] = (
            pool.calls.chat(chat_request("s")) if kind == "openai" else pool.calls.generate(request("s"))
        )
        with pytest.raises(EngineMisbehaved) as error:
            _ = [chunk async for chunk in reply]
        return error.value.message, pool.status()[0].suspect


@pytest.mark.parametrize(("kind", "events"), [("vllm", VLLM), ("sglang", SGLANG), ("openai", OPENAI)])
async def test_every_kind_of_server_is_checked(kind: str, events: list[Any]) -> None:
    message, suspicion = await refused(kind, events)
    assert message == suspicion
    assert "the id 1099511627776" in message


UNREADABLE = {
    "no UTF-8": b'data: {"error": "\xff\xfe"}\n\n',
    "deep": b'data: {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n",
    "deep among others": b"data: {}\n\ndata: " + b"[" * 100_000 + b"\n\n",
}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
@pytest.mark.parametrize("case", UNREADABLE)
async def test_an_event_that_cannot_be_read_is_the_engines_fault(kind: str, case: str) -> None:
    message, suspicion = await refused(kind, [UNREADABLE[case]])
    assert message == suspicion
    assert "sent an event" in message


async def test_a_log_probability_of_no_id_is_the_engines_fault() -> None:
    entry = {"token": "token_id:abc", "logprob": -1.0}
    choice = {"token_ids": [5], "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    message, _ = await refused("vllm", [{"choices": [choice]}])
    assert message == "engine 'e' gave the log-probability of abc for token 5"


async def test_tool_calls_without_an_end_do_not_fill_the_memory() -> None:
    delta = {"tool_calls": [{"index": 0, "function": {"name": "bash", "arguments": "x" * 4096}}]}
    message, _ = await refused("openai", [{"choices": [{"delta": delta}]}] * 40)
    assert "more text" in message


async def test_an_event_without_an_end_does_not_fill_the_memory() -> None:
    message, _ = await refused("vllm", [b"data: ", *[b"x" * (1 << 20)] * 10])
    assert f"more than {MAX_ANSWER} bytes" in message


class Odd(ScriptedEngine):
    """Adds an impossible token to its next `odd` replies, after `after` chunks of each."""

    odd = 0
    after = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            given = 0
            await asyncio.sleep(0)  # like any server, so that calls overlap
            async for chunk in chunks:
                if self.odd and given == self.after:
                    self.odd -= 1
                    yield Chunk(ids=[-1], logprobs=[-1.0])
                given += 1
                yield chunk


def odd_engine(name: str, *, odd: int, after: int = 0) -> Odd:
    engine = Odd(EngineOptions(name=name, options={"replies": [{"ids": IDS}]}))
    engine.odd, engine.after = odd, after
    return engine


async def served(pool: EnginePool, session: str) -> str:
    generation = pool.calls.generate(request(session))
    async with aclosing(generation) as chunks:
        assert [token for chunk in [chunk async for chunk in chunks] for token in chunk.ids] == IDS
    return generation.served.engine


def status_of(pool: EnginePool, name: str) -> EngineStatus:
    return next(status for status in pool.status() if status.name == name)


async def test_a_bad_first_chunk_moves_the_call_to_a_better_engine_and_no_session_comes_after_it() -> None:
    async with EnginePool(probing=NEVER) as pool:
        await pool.add_engine(odd_engine("odd", odd=1))
        await pool.add_engine(engine_of("good"))
        assert await served(pool, "s") == "good"
        odd = status_of(pool, "odd")
        assert odd.suspect is not None
        assert "the id -1" in odd.suspect
        assert (odd.ok, odd.misbehaved, odd.failures, odd.sessions, odd.in_flight) == (True, 1, 0, 0, 0)
        assert [await served(pool, f"s{n}") for n in range(5)] == ["good"] * 5


async def test_a_bad_later_chunk_ends_the_call_and_the_session_goes_on_elsewhere() -> None:
    async with EnginePool(probing=NEVER) as pool:
        await pool.add_engine(odd_engine("odd", odd=1, after=2))
        generation = pool.calls.generate(request("s"))
        assert [(await anext(generation)).ids for _ in range(2)] == [[1], [2]]
        with pytest.raises(EngineMisbehaved):
            await anext(generation)
        assert await served(pool, "s") == "odd"  # it is the only engine
        pool.placement.release("s")
        await pool.add_engine(engine_of("good"))
        assert await served(pool, "s") == "good"


async def test_parallel_calls_of_a_session_leave_a_bad_engine_together() -> None:
    async with EnginePool(probing=NEVER) as pool:
        await pool.add_engine(odd_engine("odd", odd=2))
        for name in ("one", "two"):
            await pool.add_engine(engine_of(name))
        assert list(await asyncio.gather(served(pool, "s"), served(pool, "s"))) == ["one", "one"]
        assert [status.sessions for status in pool.status()] == [0, 1, 0]


async def test_a_session_that_keeps_to_a_suspect_engine_stays() -> None:
    """The session's cache is there, and its own replies were good."""
    odd = odd_engine("odd", odd=0)
    async with EnginePool(probing=NEVER) as pool:
        await pool.add_engine(odd)
        assert await served(pool, "old") == "odd"
        odd.odd = 1
        with pytest.raises(EngineMisbehaved):
            await served(pool, "new")
        await pool.add_engine(engine_of("good"))
        assert await served(pool, "old") == "odd"


async def test_a_request_that_every_engine_answers_badly_is_given_up() -> None:
    async with EnginePool(probing=NEVER) as pool:
        engines = [odd_engine(f"odd{n}", odd=99) for n in range(FAILOVERS + 3)]
        for engine in engines:
            await pool.add_engine(engine)
        with pytest.raises(EngineMisbehaved):
            await served(pool, "s")
        assert sum(len(engine.requests) for engine in engines) == FAILOVERS + 1


async def test_a_suspect_engine_is_trusted_after_good_replies_in_a_row() -> None:
    odd = odd_engine("odd", odd=3)
    async with EnginePool(probing=AT_ONCE, patience=5) as pool:
        await pool.add_engine(odd)
        with pytest.raises(EngineMisbehaved):
            await served(pool, "s")
        [trial] = [task for task in asyncio.all_tasks() if task.get_name() == "trial odd"]
        await trial
        assert (status_of(pool, "odd").suspect, status_of(pool, "odd").misbehaved) == (None, 3)
        assert len(odd.requests) == 3 + GOOD_REPLIES
        assert len({asked.request_id for asked in list(odd.requests)[1:]}) == 2 + GOOD_REPLIES
        await pool.add_engine(engine_of("good"))
        assert {await served(pool, f"s{n}") for n in range(4)} == {"odd", "good"}


async def test_an_engine_that_is_down_is_not_trusted_and_trials_end_with_the_pool() -> None:
    odd = odd_engine("odd", odd=1)
    async with EnginePool(probing=RetryPolicy(first=1e-3, longest=1e-3)) as pool:
        await pool.add_engine(odd)
        with pytest.raises(EngineMisbehaved):
            await served(pool, "s")
        odd.kill()
        for _ in range(20):
            await asyncio.sleep(1e-3)
        assert status_of(pool, "odd").suspect is not None
        await pool.remove("odd")


class Boastful(ScriptedEngine):
    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, context_tokens=-5)


class Mute:
    """A chat engine whose reply reports ids, but not the ids of the prompt."""

    name = "mute"
    mode = TokenMode.CAPTURE
    logprob_kind = LogprobKind.RAW

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        yield told(prompt_ids=None)


async def test_engines_of_ones_own_are_checked_too() -> None:
    async with EnginePool(probing=NEVER) as pool:
        with pytest.raises(EngineMisbehaved, match="context is -5"):
            await pool.add_engine(Boastful(EngineOptions(name="boastful")))
        await pool.add_engine(Mute())
        with pytest.raises(EngineMisbehaved, match="without those of its prompt"):
            _ = [chunk async for chunk in pool.calls.chat(chat_request("s"))]
