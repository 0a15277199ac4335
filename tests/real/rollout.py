"""One rollout of a real agent program on the scripted engine, watched from both ends of its model calls.

It knows no program. The wire between the sandbox and the gateway is watched by a relay that takes the place of the
gateway's Unix socket: what it has passed on has left the service. Invariant: nothing of the service is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import Config, ModelConfig, NetworkConfig, SandboxesConfig
from outrider.engines.base import EngineOptions
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.tool_server.launch import BRIDGE_URL
from outrider.schemas import GroupView, SessionView, TurnView
from outrider.service.assembly import open_service
from outrider.trajectory import BranchKind, TokenMode
from support.recording_engine import Given, RecordingEngine

END = "<|im_end|>"
CONTEXT_TOKENS = 1 << 20
ROLLOUT_SECONDS = 300.0
STREAM_SECONDS = 20.0
GRADED = '[ "$(cat out.txt)" = hello ]'


def call(tool: str, **arguments: Any) -> str:
    """A tool call, as the model writes it."""
    body = msgspec.json.encode({"name": tool, "arguments": arguments}).decode()
    return f"<tool_call>\n{body}\n</tool_call>"


class Wire:
    """A relay on the gateway's socket. `sent` is what programs have sent, `received` what they were sent, so far."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.received = bytearray()
        self._passed = asyncio.Condition()

    async def until(self, seen: Callable[[Wire], bool]) -> None:
        """Wait until what was passed on satisfies `seen`."""
        async with self._passed:
            await self._passed.wait_for(lambda: seen(self))

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
                async with self._passed:
                    seen += data
                    self._passed.notify_all()
            writer.write_eof()


@asynccontextmanager
async def watched(socket: Path) -> AsyncIterator[Wire]:
    """Watch a bound Unix socket: a relay takes its path, and it moves aside."""
    wire, behind = Wire(), socket.with_suffix(".behind")
    await asyncio.to_thread(socket.rename, behind)
    calls = set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.add(asyncio.create_task(relay(reader, writer)))

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(behind)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(wire.pass_on(reader, inner_writer, wire.sent))
                group.create_task(wire.pass_on(inner_reader, writer, wire.received))
        finally:
            inner_writer.close()
            writer.close()

    server = await asyncio.start_unix_server(accept, socket)
    try:
        yield wire
    finally:
        server.close()
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class World:
    """A service with one scripted engine, and the wire to its gateway."""

    def __init__(self, client: AsyncClient, engine: RecordingEngine, wire: Wire) -> None:
        self.client = client
        self.engine = engine
        self.wire = wire

    async def group(self, preset: str, **task: Any) -> GroupView:
        """Run one session to its end, however it ends."""
        submitted = await self.client.submit({"task": a_task(preset, **task), "n": 1})
        async with asyncio.timeout(ROLLOUT_SECONDS):
            async for done in self.client.follow(samples=True):
                if done.id == submitted.id:
                    return done
        raise AssertionError("the results ended")

    async def run(self, preset: str, *, reward: float = 1.0, **task: Any) -> Rollout:
        """Run one session. Raises AssertionError when it failed, earned another reward, or lost or mislabelled a
        token."""
        done = await self.group(preset, **task)
        return Rollout(done, await self.client.turns(done.sessions[0].id), reward)

    async def run_through_a_stall(self, preset: str, text: str, delta: str, **task: Any) -> Rollout:
        """`run` with an engine that stalls in the middle of a reply, and is released when `text`, the beginning of
        that reply, has been passed on to the program: `delta` is a pattern whose group is a delta of text on the
        wire. Raises TimeoutError when it is not."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.run(preset, **task))
            async with asyncio.timeout(ROLLOUT_SECONDS):
                await self.engine.stalled.wait()
            async with asyncio.timeout(STREAM_SECONDS):
                await self.wire.until(
                    lambda wire: text in "".join(re.findall(delta, wire.received.decode(errors="replace")))
                )
            assert not running.done()
            self.engine.release()
        return running.result()


def a_task(preset: str, **task: Any) -> dict[str, Any]:
    return {
        "instruction": "Write the word hello into the file out.txt in the working directory.",
        "harness": {"preset": preset},
        "runtime": {"kind": "namespace"},
        "evaluator": {"kind": "command", "run": GRADED},
        "limits": {"agent_seconds": 240},
        "max_attempts": 1,
        **task,
    }


@asynccontextmanager
async def a_world(
    folder: Path,
    policy: Path,
    replies: Sequence[str | dict[str, Any]],
    *,
    allow: Sequence[Path] = (),
    traces_to: str | None = None,
    network: NetworkConfig | None = None,
) -> AsyncIterator[World]:
    """A service whose model says `replies`; `policy` is a folder with a tokenizer, `allow` what tasks may mount, and
    `network` what they may reach."""
    engine = RecordingEngine(
        EngineOptions(
            name="scripted",
            tokenizer=str(policy),
            options={"replies": list(replies), "context_tokens": CONTEXT_TOKENS},
        )
    )
    config = Config(
        port=0,
        data=folder,
        model=ModelConfig(tokenizer=str(policy), renderer="qwen3"),
        engines=(),
        sandboxes=SandboxesConfig(allow=tuple(allow)),
        traces_to=traces_to,
        network=network or NetworkConfig(),
    )
    async with (
        open_service(config) as (service, node),
        serving(service, node) as url,
        watched(node.gateway_socket) as wire,
        AsyncClient(url) as client,
    ):
        await service.pool.add_engine(engine)
        yield World(client, engine, wire)


class Row(NamedTuple):
    """What a training row says of its branch, and how many of its tokens train."""

    kind: BranchKind
    turns: tuple[int, ...]
    parent: int | None
    depth: int
    label: str
    trained: int


class Rollout:
    """A finished session that earned this reward, with every token accounted for."""

    def __init__(self, group: GroupView, turns: Sequence[TurnView], reward: float) -> None:
        self.group = group
        self.turns = turns
        result = self.session.result
        assert result is not None
        assert result.error is None, result.error
        assert result.stop_reason is StopReason.COMPLETED
        assert result.verdict is not None
        assert result.verdict.reward == reward, result
        self.verdict = result.verdict
        tokens = result.tokens
        assert tokens.drift == 0
        assert tokens.sampled == tokens.trained + tokens.masked + tokens.dropped
        assert tokens.sampled > 0
        assert group.samples
        for sample in group.samples:
            assert sample.mode is TokenMode.TOKENS
            assert len(sample.ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)
            assert sample.reward == (reward if any(sample.loss_mask) else None)

    @property
    def session(self) -> SessionView:
        (session,) = self.group.sessions
        return session

    def shape(self) -> list[tuple[str, int | None]]:
        """Of each turn, how it joined the session's tree and which turn it went on from."""
        return [(turn.join, turn.parent) for turn in self.turns]

    def rows(self) -> list[Row]:
        return [
            Row(row.kind, row.turns, row.parent, row.depth, row.label, sum(row.loss_mask))
            for row in self.group.samples or ()
        ]

    def said(self, *turns: int) -> int:
        """How many tokens were sampled in these turns."""
        return sum(self.turns[at].output_tokens for at in turns)

    def assert_trained_once(self, given: Sequence[Given]) -> None:
        """Each token that the engine sampled, by its own record, is trained in exactly one row, behind the prompt that
        it was sampled for and with its log-probability; no other token is."""
        rows = self.group.samples or ()
        left = [{at for at, mask in enumerate(row.loss_mask) if mask} for row in rows]
        for one in given:
            start, end = len(one.prompt), len(one.prompt) + len(one.sampled)
            context, places = [*one.prompt.tolist(), *one.sampled], set(range(start, end))
            found = [at for at, row in enumerate(rows) if left[at] >= places and row.ids[:end].tolist() == context]
            assert len(found) == 1
            assert rows[found[0]].logprobs[start:end].tolist() == one.logprobs
            left[found[0]] -= places
        assert not any(left)

    def kinds(self) -> list[tuple[BranchKind, tuple[int, ...]]]:
        """Of each training row, its branch's kind and turns."""
        return [(sample.kind, sample.turns) for sample in self.group.samples or ()]


def assert_saw_only_its_session(environment: str, wire: Wire, secret: str) -> None:
    """`environment` is the program's, line by line; `secret` is what the service has in its own."""
    places = re.findall(r"^[A-Z_]*BASE(?:_URL)?=(.*)$", environment, re.MULTILINE)
    assert len(places) >= 5
    assert all(place.startswith(f"{BRIDGE_URL}/s/") for place in places)
    assert secret not in environment
    assert secret.encode() not in wire.sent
