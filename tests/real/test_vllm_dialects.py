"""The record of a session on a real vLLM is exact, in each dialect and for every way in which a call can join a
session.

Prompts are rendered in two ways. With the renderer `qwen3`, the tiny policy is sampled at a high temperature, and its
replies are nonsense. With the policy's own template, it calls its tool and reasons now and then, and each request is
repeated until it does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.schemas import GroupView
from outrider.spec import EngineSpec
from outrider.trajectory import BranchKind, ForkCause, JoinKind, TokenMode, Turn, unpack_ids, unpack_logprobs

from .dialect_clients import CLIENTS, Answer, DialectClient, Item, Way, events_of
from .logprobs import assert_agrees
from .parked import a_parked_session
from .vllm_cpu import VllmServer
from .vllm_tap import Generation, tapped

pytestmark = pytest.mark.real

TOLERANCE = 1e-4
TEMPLATE = "template:qwen3"
LEFT_ZONE = "jade"
INVALID_JSON = "INVALID_JSON"
"""The key for arguments that are not an object, in dialects whose arguments are objects."""


WAYS = {"qwen3": Way(max_tokens=24, temperature=2.0), TEMPLATE: Way(max_tokens=48, temperature=1.0)}
"""Sampling parameters, by the renderer of the prompts."""
TRIES = 80
"""Maximum number of requests for a reply of one kind. With the policy's own template, at least one of seven replies is
of the wanted kind on average."""


class Join(msgspec.Struct, frozen=True):
    """The way in which a call joined the session's tree."""

    kind: JoinKind
    cause: ForkCause | None = None


ROOT, APPEND, RETRY = Join(JoinKind.ROOT), Join(JoinKind.APPEND), Join(JoinKind.RETRY)
SIBLING = Join(JoinKind.FORK, ForkCause.SIBLING)
REWRITTEN = Join(JoinKind.FORK, ForkCause.HISTORY_REWRITTEN)
REFUSED = Join(JoinKind.FORK, ForkCause.BRIDGE_REFUSED)
EITHER = {APPEND, SIBLING}
"""Of two concurrent calls, one appends and the other is its sibling."""

Kind = Callable[[Message], bool]


class Call(msgspec.Struct, frozen=True):
    """A call that was made: its answer, the allowed ways of joining, and the answer that it must continue."""

    answer: Answer
    joins: set[Join]
    onto: Answer | None


class Agent:
    """Makes the calls of one session in one dialect, and records them in `calls`. The two calls from index `at_once` on
    were concurrent."""

    def __init__(self, client: DialectClient, renderer: str, http: aiohttp.ClientSession, base_url: str) -> None:
        self._client = client
        self._way = WAYS[renderer]
        self._by_template = renderer == TEMPLATE
        self._http = http
        self._base_url = base_url
        self.calls: list[Call] = []
        self.at_once = 0

    async def converse(self) -> None:
        opening = [self._client.user("Where is maple?")]
        first = await self._wanted(opening, self._if_able(calls_a_tool), ROOT, None)
        left = await self._fork(opening, first)
        second = await self._wanted(left, self._if_able(reasons), RETRY, first)
        forgotten = Answer(second.reply, self._client.forgetting(second.echo))
        for known, join in ((forgotten, APPEND), (second, RETRY)):
            await self._ask(self._after(left, known, "Please find fern."), join, second, stream=join is APPEND)
        await self._rewrite(opening, first, second)
        if self._by_template:
            await self._go_on_from_open_reasoning(opening)

    async def _fork(self, opening: list[Item], first: Answer) -> list[Item]:
        """Continue one reply with two concurrent calls. Returns the history of the left call."""
        left, right = (self._after(opening, first, f"zone: {zone}") for zone in (LEFT_ZONE, "onyx"))
        self.at_once = len(self.calls)
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(self._answer(left, stream=True))
            whole = tasks.create_task(self._answer(right, stream=False))
        self.calls += [Call(task.result(), EITHER, first) for task in (streamed, whole)]
        return left

    async def _rewrite(self, opening: list[Item], first: Answer, second: Answer) -> None:
        """Send a history that was changed at its end and one that was changed at its beginning, continue both, and send
        one request twice."""
        # With the policy's own template, a history that contains other replies is rendered anew.
        kept = None if self._by_template else first
        changed = self._after(self._after(opening, first, "zone: ruby"), second, "In which zone is maple?")
        another = await self._wanted(changed, is_closed, REWRITTEN, kept)
        await self._ask(self._after(changed, another, "zone: opal"), APPEND, another, stream=True)

        retold = [*opening, self._client.said("It is in nobody's zone."), self._client.user("Where is fern?")]
        other = await self._wanted(retold, is_closed, REWRITTEN, None)
        newest = self._after(retold, other, "zone: topaz")
        await self._ask(newest, APPEND, other, stream=False)
        await self._ask(newest, RETRY, other, stream=True)

    async def _go_on_from_open_reasoning(self, opening: list[Item]) -> None:
        """Continue a reply that ended in the middle of its reasoning. The renderer cannot prove that the new messages
        only add ids after such a reply, so the history is rendered anew."""
        amid = await self._wanted(opening, lambda reply: not is_closed(reply), RETRY, None)
        await self._ask(self._after(opening, amid, "zone: opal"), REFUSED, None, stream=True)

    def _if_able(self, kind: Kind) -> Kind:
        """Return `kind` if prompts are rendered by the policy's own template. Otherwise, the policy rarely gives such
        replies, so return the kind of all replies that can be continued."""
        return kind if self._by_template else is_closed

    async def _wanted(self, history: Sequence[Item], kind: Kind, join: Join, onto: Answer | None) -> Answer:
        """Repeat a request until the reply is of this kind, and return the answer. Every second request is streamed."""
        for asked in range(TRIES):
            answer = await self._ask(history, RETRY if asked else join, onto, stream=bool(asked % 2))
            if kind(answer.reply):
                return answer
        raise AssertionError(f"none of {TRIES} replies is as wanted; the last one is {answer.reply}")

    async def _ask(self, history: Sequence[Item], join: Join, onto: Answer | None, *, stream: bool) -> Answer:
        answer = await self._answer(history, stream=stream)
        self.calls.append(Call(answer, {join}, onto))
        return answer

    async def _answer(self, history: Sequence[Item], *, stream: bool) -> Answer:
        client = self._client
        url = self._base_url + client.path(stream=stream)
        body = client.body(history, self._way, stream=stream)
        async with self._http.post(url, json=body, headers=client.headers) as reply:
            data = await reply.read()
            assert reply.status == 200, data
            assert reply.content_type == ("text/event-stream" if stream else "application/json")
        return client.gather(events_of(data)) if stream else client.read(json.loads(data))

    def _after(self, history: Sequence[Item], answer: Answer, text: str) -> list[Item]:
        """Return the history, the answer and the message after it. `text` is the result of each of the answer's tool
        calls, or the user's next message if there are none."""
        calls = answer.reply.tool_calls
        return [*history, *answer.echo, *(self._client.results(calls, text) if calls else [self._client.user(text)])]


def calls_a_tool(reply: Message) -> bool:
    return bool(reply.tool_calls)


def reasons(reply: Message) -> bool:
    """Return True if the reply has reasoning and then content."""
    return bool(reply.reasoning and reply.content)


def is_closed(reply: Message) -> bool:
    """Return True if the reply does not end in the middle of its reasoning."""
    return bool(reply.content or reply.tool_calls)


@pytest.mark.parametrize("renderer", WAYS)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_the_record_of_a_dialect_is_exact_across_forks(
    client: DialectClient, renderer: str, vllm_url: VllmServer, tmp_path: Path
) -> None:
    async with (
        tapped(vllm_url.url) as tap,
        a_parked_session(
            tmp_path,
            vllm_url.model_folder,
            EngineSpec(kind="vllm", url=tap.url, model=vllm_url.model),
            renderer=renderer,
        ) as session,
        aiohttp.ClientSession() as http,
    ):
        agent = Agent(client, renderer, http, session.base_url)
        await agent.converse()
        group, turns = await session.end(), await session.turns()
    assert {(turn.dialect, turn.mode) for turn in turns} == {(client.name, TokenMode.TOKENS)}
    assert_joined(agent, turns)
    assert_sampled(tap.generations, turns)
    assert_every_token_trains(group, turns)
    assert group.samples is not None
    gap = await asyncio.to_thread(assert_agrees, group.samples, vllm_url.model_folder, TOLERANCE)
    told = [turn.reply for turn in turns if turn.reply is not None]
    kinds = f"{sum(map(calls_a_tool, told))} call tools, {sum(map(reasons, told))} reason"
    print(f"{client.name}, {renderer}: {len(turns)} turns, {kinds}; {len(group.samples)} rows, largest gap {gap:.1e}")


def assert_joined(agent: Agent, turns: Sequence[Turn]) -> None:
    """Check that each call joined as expected, and that its client received the recorded reply, streamed or not."""
    pair = slice(agent.at_once, agent.at_once + 2)
    ordered = list(turns)
    ordered[pair] = sorted(turns[pair], key=lambda turn: LEFT_ZONE not in turn.messages[-1].content)
    for turn, call in zip(ordered, agent.calls, strict=True):
        assert turn.reply is not None
        assert as_told(turn.reply) == as_told(call.answer.reply)
        assert Join(turn.join, turn.cause) in call.joins
        parent = None if turn.parent is None else turns[turn.parent].reply
        assert (parent and as_sent_back(parent)) == (call.onto and as_sent_back(call.onto.reply))
    assert {Join(turn.join, turn.cause) for turn in ordered[pair]} == EITHER


def as_told(reply: Message) -> tuple[Any, ...]:
    """Return a reply in a form that is equal in all dialects: with its reasoning, and with arguments as objects."""
    return (*as_sent_back(reply), reply.reasoning)


def as_sent_back(reply: Message) -> tuple[Any, ...]:
    """Return the parts of a reply that every client sends back, which do not include the reasoning."""
    return reply.content, [(call.id, call.name, as_object(call.arguments)) for call in reply.tool_calls]


def as_object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def assert_sampled(generations: Sequence[Generation], turns: Sequence[Turn]) -> None:
    """Check that the turns have exactly the ids that vLLM received, and the ids and log-probabilities that it sampled.
    A turn's prompt is its parent's prompt, then its parent's output, then its own delta."""
    prompts: list[list[int]] = []
    recorded = []
    for turn in turns:
        before = (
            [] if turn.parent is None else prompts[turn.parent] + unpack_ids(turns[turn.parent].output_ids).tolist()
        )
        prompts.append(before + unpack_ids(turn.prompt_delta).tolist())
        assert len(prompts[-1]) == turn.prompt_length
        recorded.append((prompts[-1], unpack_ids(turn.output_ids).tolist(), unpack_logprobs(turn.logprobs).tolist()))
    assert sorted(recorded) == sorted((made.prompt, made.output, made.logprobs) for made in generations)


def assert_every_token_trains(group: GroupView, turns: Sequence[Turn]) -> None:
    """Check that no token drifted, and that each sampled token trains in one row, of the kind `main` or `retry`."""
    (session,) = group.sessions
    result, samples = session.result, group.samples
    assert result is not None
    assert samples is not None
    assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
    assert {turn.drift_tokens for turn in turns} == {0}
    sampled = sum(len(turn.output_ids) // 4 for turn in turns)
    tokens = result.tokens
    assert tokens.drift == 0
    assert tokens.sampled == tokens.trained + tokens.masked + tokens.dropped
    assert (tokens.sampled, tokens.trained) == (sampled, sampled)
    assert sum(sum(sample.loss_mask) for sample in samples) == sampled
    assert {sample.kind for sample in samples} == {BranchKind.MAIN, BranchKind.RETRY}
