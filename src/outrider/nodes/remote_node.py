"""A node in another process, as the service has it: attempts go there, and what the node needs of the service is done
for it here.

It knows nothing of how the process is started (`processes.py`). Invariants: what a node asked for is done only while
its connection lasts, so nothing is stored for an attempt that the scheduler has given up with its node; and all that a
node had set aside is given back when the connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from outrider.concurrency.cancellation import shielded
from outrider.engines.base import ChatRequest, Chunk, GenerateRequest
from outrider.engines.pool.pool import EnginePool
from outrider.engines.relay.link import Disconnected, Link
from outrider.engines.relay.messages import Beat, Close
from outrider.errors import ErrorRecord, OutriderError, ServiceError, record_of
from outrider.nodes.messages import (
    TO_SERVICE,
    Abort,
    AddTurn,
    Answer,
    Call,
    Cancel,
    Doubt,
    Follow,
    Gate,
    Generate,
    Generated,
    GiveBack,
    Loads,
    Ran,
    ReadTurns,
    Ready,
    Report,
    Run,
    SetState,
    Setup,
    Take,
    ToService,
    framed,
)
from outrider.nodes.pipe import Pipe
from outrider.rootfs.store import has_image
from outrider.schemas import NodeStats
from outrider.sessions.attempt import Attempt, NodeLost
from outrider.sessions.priority_semaphore import Slot
from outrider.sessions.resources import NodeResources, ResourceAmount
from outrider.spec import RuntimeSpec
from outrider.store.store import Store
from outrider.trajectory import SessionResult

log = logging.getLogger("outrider.node")

HEARTBEAT_SECONDS = 4.0
SILENCE_SECONDS = 20.0
"""A node that says nothing for so long is given up: it hangs."""
START_SECONDS = 120.0
"""The same, for a node that starts: it is busy, and says nothing."""

Pools = Mapping[str | None, EnginePool]
"""The engine pools of a service by model; that of the policy is None's."""


class ServiceParts(msgspec.Struct, frozen=True):
    """What the service does for its nodes is done with these. `resources` are those of the machine, which all nodes on
    it share."""

    store: Store
    pools: Pools
    resources: NodeResources


class RemoteNode:
    """`sessions.attempt.Node`, over one connection after another. It has no room for sessions before it has said how
    much."""

    def __init__(self, name: str, machine: str, parts: ServiceParts) -> None:
        self.name = name
        self.machine = machine
        self._parts = parts
        self._connection: Connection | None = None
        self._nothing = NodeStats(name=name, sessions=0, capacity=0, lanes=(), resources=parts.resources.stats())
        self._stats = self._nothing
        self.on_room: Callable[[], None] = lambda: None
        """Called when it can take more sessions than before."""

    async def serve(
        self,
        pipe: Pipe,
        setup: Setup,
        *,
        ready: Callable[[ErrorRecord | None], None],
        ended: Callable[[], Awaitable[None]],
    ) -> Disconnected:
        """Have the node at the other end work until the connection ends; how it ended. `ready` is called when the node
        has said that it runs attempts, or why it cannot. `ended` is awaited in the end, and returns when the node has
        nothing any more: only then is given back what was set aside for it."""
        async with asyncio.TaskGroup() as tasks:
            self._connection = connection = Connection(self.name, pipe, self._parts, tasks)
            try:
                return await connection.run(setup, ready, self._note_stats)
            finally:
                self._connection = None
                self._stats = self._nothing
                connection.lose_attempts()
                await shielded(ended)
                connection.give_back()

    def send(self, message: Follow | Loads) -> None:
        """Tell the node, if it is there. One that comes later is told everything then."""
        if self._connection is not None:
            self._connection.link.send(message)

    def stats(self) -> NodeStats:
        return msgspec.structs.replace(self._stats, resources=self._parts.resources.stats())

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return has_image(runtime.image)

    async def run(self, attempt: Attempt) -> SessionResult:
        if self._connection is None:
            raise NodeLost(f"node {self.name} is gone")
        return await self._connection.run_attempt(attempt)

    def _note_stats(self, stats: NodeStats) -> None:
        more = stats.capacity > self._stats.capacity
        self._stats = stats
        if more:
            self.on_room()


class Connection:
    """What goes on over one connection to a node. `tasks` runs what the node asks for."""

    def __init__(self, name: str, pipe: Pipe, parts: ServiceParts, tasks: asyncio.TaskGroup) -> None:
        self._name = name
        self._parts = parts
        self._tasks = tasks
        self.link: Link[ToService] = Link(pipe, TO_SERVICE, heartbeat=HEARTBEAT_SECONDS, silence=START_SECONDS)
        self._numbers = itertools.count()
        self._attempts: dict[int, asyncio.Future[SessionResult | None]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._slots: dict[int, Slot] = {}
        """What is set aside for the node, by the number of its `Take`."""
        self._generations: dict[int, asyncio.Task[None]] = {}
        self._ended = False

    async def run(
        self, setup: Setup, ready: Callable[[ErrorRecord | None], None], note_stats: Callable[[NodeStats], None]
    ) -> Disconnected:
        self._note_ready, self._note_stats = ready, note_stats
        self.link.send(setup)
        for model, pool in self._parts.pools.items():
            self.link.send(Follow(model=model, state=pool.state()))
        return await self.link.run(self._handle)

    def lose_attempts(self) -> None:
        """The node is gone, and its attempts with it. Nothing is done for it any more."""
        self._ended = True
        for attempt in self._attempts.values():
            if not attempt.done():
                attempt.set_exception(self._lost())
        for task in (*self._calls.values(), *self._generations.values()):
            task.cancel()

    def give_back(self) -> None:
        """What was set aside for the node, and what it had on engines."""
        for slot in self._slots.values():
            slot.release()
        for pool in self._parts.pools.values():
            pool.note_uses(self._name, {})
            pool.policy.gate.forget(self._name)

    async def run_attempt(self, attempt: Attempt) -> SessionResult:
        """As `Node.run`: a cancellation is raised when the node has torn the attempt down."""
        # In a thread: a task may hold megabytes of files.
        task = await asyncio.to_thread(lambda: attempt.task.model_dump_json().encode())
        if self._ended:
            raise self._lost()
        number = next(self._numbers)
        done: asyncio.Future[SessionResult | None] = asyncio.get_running_loop().create_future()
        self._attempts[number] = done
        self.link.send(Run(attempt=number, session=attempt.session, task=task, reserved=attempt.reserved))
        try:
            result = await asyncio.shield(done)
        except asyncio.CancelledError:
            self.link.send(Cancel(number))
            await shielded(lambda: asyncio.wait([done]))
            if not done.cancelled():
                done.exception()  # asyncio logs an error that nobody has asked for
            raise
        finally:
            del self._attempts[number]
        if result is None:  # it was not told to: it is about to end
            raise self._lost()
        return result

    def _lost(self) -> NodeLost:
        return NodeLost(f"node {self._name} is gone")

    def _handle(self, message: ToService) -> None:
        pools = self._parts.pools
        match message:
            case AddTurn() | SetState() | ReadTurns() | Take():
                self._start(self._calls, message.call, self._answer(message))
            case GiveBack():
                if (slot := self._slots.pop(message.call, None)) is not None:
                    slot.release()
                elif (call := self._calls.get(message.call)) is not None:
                    call.cancel()  # it still waits
            case Generate():
                self._start(self._generations, message.generation, self._generate(message))
            case Abort():
                if (generation := self._generations.get(message.generation)) is not None:
                    generation.cancel()
            case Ran():
                if not (attempt := self._attempts[message.attempt]).done():
                    attempt.set_result(message.result)
            case Report():
                self._note_stats(message.stats)
                for used in message.uses:
                    pools[used.model].note_uses(self._name, used.engines)
            case Gate():
                pools[message.model].policy.gate.report(self._name, message.report)
            case Doubt():
                pools[message.model].doubt(message.engine)
            case Ready(error=None):
                self.link.silence = SILENCE_SECONDS
                for pool in pools.values():
                    pool.policy.gate.expect(self._name)
                self._note_ready(None)
            case Ready():
                self._note_ready(message.error)
                self.link.close(Close.LEFT, "it cannot start")
            case Beat():
                pass

    def _start(self, among: dict[int, asyncio.Task[None]], number: int, work: Coroutine[Any, Any, None]) -> None:
        among[number] = task = self._tasks.create_task(work)
        task.add_done_callback(lambda _: among.pop(number, None))

    async def _answer(self, call: Call) -> None:
        store = self._parts.store
        answer = Answer(call=call.call)
        try:
            match call:
                case AddTurn():
                    await store.add_turn(call.session_id, call.attempt, call.turn, model=call.model)
                case SetState():
                    await store.set_state(call.session_id, call.attempt, call.state)
                case ReadTurns(frozen=True):
                    frozen = await store.frozen_turns(call.session_id, call.attempt)
                    answer = Answer(call=call.call, frozen={model: tuple(turns) for model, turns in frozen.items()})
                case ReadTurns():
                    turns = await store.turns(call.session_id, call.attempt, images=call.images)
                    answer = Answer(call=call.call, turns=tuple(turns))
                case Take():
                    amount = ResourceAmount(cpus=call.cpus, memory_mb=call.memory_mb)
                    self._slots[call.call] = await self._parts.resources.take(amount, call.priority)
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("what node %s asked for failed", self._name)
            answer = Answer(call=call.call, error=record_of(error))
        try:
            frame = framed(answer)
        except ServiceError as error:
            frame = framed(Answer(call=call.call, error=error.record()))
        self.link.send_encoded(frame)

    async def _generate(self, asked: Generate) -> None:
        """Pass on a generation of an engine that only this process has."""
        number = asked.generation
        try:
            request: GenerateRequest | ChatRequest
            if asked.chat is not None:
                request = asked.chat
            else:
                assert asked.sampling is not None
                request = GenerateRequest(
                    request_id=asked.request_id,
                    session_key=asked.session_key,
                    input_ids=np.frombuffer(asked.input_ids, dtype=np.int32),
                    sampling=asked.sampling,
                )
            async with aclosing(self._parts.pools[asked.model].forward(asked.engine, request)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, Chunk):
                        self.link.send(Generated(generation=number, chunk=chunk))
                    else:
                        self.link.send(Generated(generation=number, chat=chunk))
            self.link.send(Generated(generation=number))
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("a generation for node %s failed", self._name)
            self.link.send(Generated(generation=number, error=record_of(error)))
