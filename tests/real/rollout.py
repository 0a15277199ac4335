"""Rollouts of real agent programs on the scripted engine, with a record of both ends of their model calls.

The module does not depend on a particular program. A relay takes the place of the gateway's Unix socket and records the
traffic between the sandbox and the gateway: recorded replies have left the service. Invariant: the service itself is
not changed.
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
    """Return a tool call as the model writes it."""
    body = msgspec.json.encode({"name": tool, "arguments": arguments}).decode()
    return f"<tool_call>\n{body}\n</tool_call>"


class Wire:
    """A relay at the gateway's socket. `sent` and `received` are the bytes that programs have sent and received so
    far."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.received = bytearray()
        self._passed = asyncio.Condition()

    async def until(self, seen: Callable[[Wire], bool]) -> None:
        """Wait until `seen` returns True for the traffic so far."""
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
    """Move a bound Unix socket aside, and run a relay at its path."""
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
    """A service with one scripted engine, and the relay at its gateway."""

    def __init__(self, client: AsyncClient, engine: RecordingEngine, wire: Wire) -> None:
        self.client = client
        self.engine = engine
        self.wire = wire

    async def group(self, preset: str, **task: Any) -> GroupView:
        """Run one session until it ends, with or without an error. Returns its group."""
        submitted = await self.client.submit({"task": a_task(preset, **task), "n": 1})
        async with asyncio.timeout(ROLLOUT_SECONDS):
            async for done in self.client.follow(samples=True):
                if done.id == submitted.id:
                    return done
        raise AssertionError("the results ended")

    async def run(self, preset: str, *, reward: float = 1.0, **task: Any) -> Rollout:
        """Run one session. Raises AssertionError if it failed, earned another reward, or lost or mislabelled a
        token."""
        done = await self.group(preset, **task)
        return Rollout(done, await self.client.turns(done.sessions[0].id), reward)

    async def run_through_a_stall(self, preset: str, text: str, delta: str, **task: Any) -> Rollout:
        """Like `run`, with an engine that stalls in the middle of a reply. The engine is released when the program has
        received `text`, the beginning of the reply. `delta` is a pattern whose group is a text delta on the wire.
        Raises TimeoutError if the program does not receive `text` in STREAM_SECONDS."""
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
    """Run a service whose model gives `replies`. `policy` is a folder with a tokenizer, tasks may mount the paths in
    `allow`, and `network` determines which servers tasks may reach."""
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
    """The branch of a training row, and the number of its trained tokens."""

    kind: BranchKind
    turns: tuple[int, ...]
    parent: int | None
    depth: int
    label: str
    trained: int


class Rollout:
    """A finished session. The constructor checks its reward, and that each sampled token is trained, masked or
    dropped."""

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
        """Return for each turn how it joined the session's tree, and its parent turn."""
        return [(turn.join, turn.parent) for turn in self.turns]

    def rows(self) -> list[Row]:
        return [
            Row(row.kind, row.turns, row.parent, row.depth, row.label, sum(row.loss_mask))
            for row in self.group.samples or ()
        ]

    def said(self, *turns: int) -> int:
        """Return the number of tokens that were sampled in these turns."""
        return sum(self.turns[at].output_tokens for at in turns)

    def assert_trained_once(self, given: Sequence[Given]) -> None:
        """Check that each token in the engine's own record is trained in exactly one row, after its prompt and with its
        log-probability, and that no other token is trained."""
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
        """Return the kind and the turns of each training row's branch."""
        return [(sample.kind, sample.turns) for sample in self.group.samples or ()]


def assert_saw_only_its_session(environment: str, wire: Wire, secret: str) -> None:
    """Check that the program's endpoints are those of its session, and that `secret`, a value in the service's own
    environment, is neither in the program's environment nor in the bytes that it has sent. `environment` is the
    program's environment, one variable per line."""
    places = re.findall(r"^[A-Z_]*BASE(?:_URL)?=(.*)$", environment, re.MULTILINE)
    assert len(places) >= 5
    assert all(place.startswith(f"{BRIDGE_URL}/s/") for place in places)
    assert secret not in environment
    assert secret.encode() not in wire.sent
