"""A session in each dialect on a real vLLM, with every way in which a call can join its session: the record is exact.

Prompts are laid out once as Qwen3's, and the tiny policy, sampled hot, says odd things at length; and once by its own
template, where it calls its tool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.spec import EngineSpec
from outrider.trajectory import BranchKind, ForkCause, JoinKind, TokenMode, Turn
from outrider.wire import GroupView

from .dialect_clients import CLIENTS, Answer, DialectClient, Item, Way, events_of
from .logprobs import assert_agrees
from .parked import a_parked_session
from .vllm_cpu import VllmServer

pytestmark = pytest.mark.real

TOLERANCE = 1e-4
TEMPLATE = "template:qwen3"
WAYS = {"qwen3": Way(max_tokens=24, temperature=2.0), TEMPLATE: Way(max_tokens=48, temperature=1.0)}
"""How the policy is sampled, by the renderer of its prompts."""
AT_ONCE = slice(1, 3)
"""The turns of the two calls that are made at once; either may be the first."""
LEFT_ZONE = "jade"
INVALID_JSON = "INVALID_JSON"
"""The key under which dialects whose arguments are objects tell of arguments that are none."""


class Join(msgspec.Struct, frozen=True):
    """How a call joined, and the turn whose ids it goes on from."""

    kind: JoinKind
    parent: int | None
    cause: ForkCause | None = None


class Agent:
    """Makes the calls of one session in its dialect. `answers` are what it was told, by call."""

    def __init__(self, client: DialectClient, way: Way, http: aiohttp.ClientSession, base_url: str) -> None:
        self._client = client
        self._way = way
        self._http = http
        self._base_url = base_url
        self.answers: list[Answer] = []

    async def converse(self) -> None:
        """Nine calls, of which `expected_joins` says how they join; the last two are the same request."""
        client = self._client
        opening = [client.user("Where is maple?")]
        first = await self._ask(opening, stream=False)

        left, right = (self._after(opening, first, f"zone: {zone}") for zone in (LEFT_ZONE, "onyx"))
        async with asyncio.TaskGroup() as calls:
            beside = calls.create_task(self._ask(left, stream=True))
            calls.create_task(self._ask(right, stream=False))
        second = beside.result()
        await self._ask(self._after(left, second, "Please find fern."), stream=True)

        rewritten = self._after(self._after(opening, first, "zone: ruby"), second, "In which zone is maple?")
        another = await self._ask(rewritten, stream=False)
        await self._ask(self._after(rewritten, another, "zone: opal"), stream=True)

        retold = [*opening, client.said("It is in nobody's zone."), client.user("Where is fern?")]
        other = await self._ask(retold, stream=True)
        newest = self._after(retold, other, "zone: topaz")
        await self._ask(newest, stream=False)
        await self._ask(newest, stream=True)

    async def _ask(self, history: Sequence[Item], *, stream: bool) -> Answer:
        client = self._client
        url = self._base_url + client.path(stream=stream)
        body = client.body(history, self._way, stream=stream)
        async with self._http.post(url, json=body, headers=client.headers) as reply:
            data = await reply.read()
            assert reply.status == 200, data
            assert reply.content_type == ("text/event-stream" if stream else "application/json")
        answer = client.gather(events_of(data)) if stream else client.read(json.loads(data))
        self.answers.append(answer)
        return answer

    def _after(self, history: Sequence[Item], answer: Answer, text: str) -> list[Item]:
        """The history with the answer and what follows it: `text` is the result of each call that the answer makes,
        and what the user says where it makes none."""
        calls = answer.reply.tool_calls
        return [*history, *answer.echo, *(self._client.results(calls, text) if calls else [self._client.user(text)])]


def expected_joins(renderer: str, left: int) -> list[Join]:
    """`left` is the turn of the first of the two calls made at once. Behind a template of the policy's own, a history
    with other replies in it is rendered anew."""
    kept = None if renderer == TEMPLATE else 0
    at_once = [Join(JoinKind.APPEND, 0), Join(JoinKind.FORK, 0, ForkCause.SIBLING)]
    return [
        Join(JoinKind.ROOT, None),
        *at_once,
        Join(JoinKind.APPEND, left),
        Join(JoinKind.FORK, kept, ForkCause.HISTORY_REWRITTEN),
        Join(JoinKind.APPEND, 4),
        Join(JoinKind.FORK, None, ForkCause.HISTORY_REWRITTEN),
        Join(JoinKind.APPEND, 6),
        Join(JoinKind.RETRY, 6),
    ]


@pytest.mark.parametrize("renderer", WAYS)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_the_record_of_a_dialect_is_exact_across_forks(
    client: DialectClient, renderer: str, vllm_url: VllmServer, tmp_path: Path
) -> None:
    engine = EngineSpec(kind="vllm", url=vllm_url.url, model=vllm_url.model)
    async with (
        a_parked_session(tmp_path, vllm_url.model_folder, engine, renderer=renderer) as session,
        aiohttp.ClientSession() as http,
    ):
        agent = Agent(client, WAYS[renderer], http, session.base_url)
        await agent.converse()
        group, turns = await session.end(), await session.turns()
    assert {(turn.dialect, turn.mode) for turn in turns} == {(client.name, TokenMode.TOKENS)}
    assert_joined(turns, renderer)
    assert_told(agent.answers, turns)
    assert_every_token_trains(group, turns)
    assert group.samples is not None
    gap = await asyncio.to_thread(assert_agrees, group.samples, vllm_url.model_folder, TOLERANCE)
    calls = sum(len(turn.reply.tool_calls) for turn in turns if turn.reply is not None)
    print(f"{client.name}, {renderer}: {len(group.samples)} rows, {calls} tool calls, largest gap {gap:.1e}")


def assert_joined(turns: Sequence[Turn], renderer: str) -> None:
    left = next(turn.index for turn in turns[AT_ONCE] if LEFT_ZONE in turn.messages[-1].content)
    joins = [Join(turn.join, turn.parent, turn.cause) for turn in turns]
    joins[AT_ONCE] = sorted(joins[AT_ONCE], key=lambda join: join.kind)
    assert joins == expected_joins(renderer, left)


def assert_told(answers: Sequence[Answer], turns: Sequence[Turn]) -> None:
    """The wire said what is recorded, streamed or not."""
    told = [as_told(answer.reply) for answer in answers]
    recorded = [as_told(turn.reply) for turn in turns if turn.reply is not None]
    for both in (told, recorded):
        both[AT_ONCE] = sorted(both[AT_ONCE], key=str)
    assert told == recorded


def as_told(reply: Message) -> tuple[Any, ...]:
    """A reply in terms that every dialect has: reasoning where it was told, arguments as an object."""
    calls = [(call.id, call.name, as_object(call.arguments)) for call in reply.tool_calls]
    return reply.content, reply.reasoning, calls


def as_object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def assert_every_token_trains(group: GroupView, turns: Sequence[Turn]) -> None:
    """Nothing drifted, and each sampled token is trained on in one row: `main` ones and the retry."""
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
