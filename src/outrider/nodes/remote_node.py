"""A node in another process, as the service has it: attempts go there, and what the node needs of the service is done
for it here.

It knows nothing of how the process is started (`processes.py`), or comes by itself (`joined.py`). Invariants: what a
node asked for is done only while its connection lasts, so nothing is stored for an attempt that the scheduler has given
up with its node; and all that a node had set aside is given back when the connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Failures
from outrider.config import is_local
from outrider.engines.base import ChatRequest, Chunk, GenerateRequest
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.sharing import PoolState
from outrider.engines.relay.link import Disconnected, Link, Socket
from outrider.engines.relay.messages import Beat, Close
from outrider.errors import Conflict, ErrorRecord, OutriderError, ServiceError, error_from, record_of
from outrider.nodes.messages import (
    TO_SERVICE,
    Abort,
    AddTurn,
    Answer,
    Call,
    Cancel,
    Doubt,
    EndOutlived,
    Follow,
    Gate,
    Generate,
    Generated,
    GiveBack,
    KeepArtifact,
    KeepIndex,
    Leaving,
    Loads,
    OfAttempt,
    Pull,
    Pulled,
    Ran,
    ReadCarried,
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
from outrider.rootfs.store import Image, has_image
from outrider.schemas import NodeStats
from outrider.sessions.attempt import Attempt, NodeLost
from outrider.sessions.priority_semaphore import Slot
from outrider.sessions.resources import NodeResources
from outrider.spec import RuntimeSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.store import Store
from outrider.trajectory import SessionResult

log = logging.getLogger("outrider.node")

HEARTBEAT_SECONDS = 4.0
SILENCE_SECONDS = 20.0
"""A node that says nothing for so long is given up: it hangs."""
START_SECONDS = 120.0
"""The same, for a node that starts: it is busy, and says nothing."""

SHA256 = re.compile("[0-9a-f]{64}")

Pools = Mapping[str | None, EnginePool]
"""The engine pools of a service by model; that of the policy is None's."""


class ServiceParts(msgspec.Struct, frozen=True):
    """What the service does for its nodes is done with these. `resources` are those of the machine, which all nodes on
    it share. What fails is noted in `failures`."""

    store: Store
    artifacts: ArtifactStore
    pools: Pools
    resources: NodeResources
    failures: Failures = msgspec.field(default_factory=Failures)


class RemoteNode:
    """`sessions.attempt.Node`, over one connection after another. It has no room for sessions before it has said how
    much. `elsewhere`: it is on another machine, and cannot reach engines that are on this one."""

    def __init__(self, name: str, machine: str, parts: ServiceParts, *, elsewhere: bool = False) -> None:
        self.name = name
        self.machine = machine
        self._elsewhere = elsewhere
        self._parts = parts
        self._connection: Connection | None = None
        self._nothing = NodeStats(name=name, sessions=0, capacity=0, lanes=(), resources=parts.resources.stats())
        self._stats = self._nothing
        self._reachable = True
        self._images: frozenset[str] | None = None
        """The names of those that it has; None if they are those of this machine."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when it can take more sessions than before."""

    async def serve(
        self,
        socket: Socket,
        setup: Setup,
        *,
        ready: Callable[[ErrorRecord | None], None],
        ended: Callable[[], Awaitable[None]],
        heard: Callable[[], float] = lambda: 0.0,
    ) -> Disconnected:
        """Have the node at the other end work until the connection ends; how it ended. `ready` is called when the node
        has said that it runs attempts, or why it cannot. `ended` is awaited in the end, and returns when the node has
        nothing any more: only then is given back what was set aside for it. `heard`: see `Link`."""
        async with asyncio.TaskGroup() as tasks:
            self._connection = connection = Connection(self.name, socket, self._parts, tasks, heard)
            connection.link.send(setup)
            for model, pool in self._parts.pools.items():
                self.tell(model, pool.state())
            try:
                return await connection.run(ready, self._note_report)
            finally:
                self._connection = None
                self._stats = self._nothing
                connection.lose_attempts()
                await shielded(ended)
                connection.give_back()

    def tell(self, model: str | None, state: PoolState) -> None:
        """Tell the node how the engine pool of a model stands, if it is there. One that comes later is told then."""
        if self._connection is not None:
            self._connection.link.send(Follow(model=model, state=_without_local(state) if self._elsewhere else state))

    def weigh(self, model: str | None, loads: dict[str, float]) -> None:
        """The same for the load that others put on its engines."""
        if self._connection is not None:
            self._connection.link.send(Loads(model=model, loads=loads))

    def stats(self) -> NodeStats:
        out_of_reach = not self._reachable or (self._connection is not None and self._connection.leaving)
        capacity = 0 if out_of_reach else self._stats.capacity
        return msgspec.structs.replace(self._stats, capacity=capacity, resources=self._parts.resources.stats())

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return has_image(runtime.image, self._images)

    def set_reachable(self, reachable: bool) -> None:
        """Whether attempts can be sent there now. It has no room while they cannot."""
        more = reachable and not self._reachable
        self._reachable = reachable
        if more:
            self.on_room()

    async def run(self, attempt: Attempt) -> SessionResult:
        if self._connection is None:
            raise NodeLost(f"node {self.name} is gone")
        return await self._connection.run_attempt(attempt)

    async def pull_image(self, reference: str, name: str) -> Image:
        if self._connection is None:
            raise ServiceError(f"node {self.name} is gone")
        return await self._connection.pull_image(reference, name)

    def outlived(self) -> dict[str, int]:
        return {} if self._connection is None else dict(self._connection.outlived)

    def end_outlived(self, session_id: str) -> None:
        if self._connection is not None:
            self._connection.end_outlived(session_id)

    def _note_report(self, report: Report) -> None:
        more = report.stats.capacity > self._stats.capacity
        self._stats, self._images = report.stats, report.images
        if more:
            self.on_room()


def _without_local(state: PoolState) -> PoolState:
    """For a node on another machine: engines at an address that only this machine has are reached through it."""
    engines = [
        msgspec.structs.replace(engine, spec=None) if is_local(urlsplit(engine.url or "").hostname or "") else engine
        for engine in state.engines
    ]
    return msgspec.structs.replace(state, engines=tuple(engines))


class Connection:
    """What goes on over one connection to a node. `tasks` runs what the node asks for."""

    def __init__(
        self, name: str, socket: Socket, parts: ServiceParts, tasks: asyncio.TaskGroup, heard: Callable[[], float]
    ) -> None:
        self._name = name
        self._parts = parts
        self._tasks = tasks
        self.link: Link[ToService] = Link(
            socket, TO_SERVICE, heartbeat=HEARTBEAT_SECONDS, silence=START_SECONDS, heard=heard
        )
        self._numbers = itertools.count()
        self.leaving = False
        """Whether the node takes no new attempts, and is to be let go when it has none."""
        self._attempts: dict[int, asyncio.Future[SessionResult | None]] = {}
        self._running: dict[tuple[str, int], Attempt] = {}
        """These by their session's id and their number in it."""
        self.outlived: dict[str, int] = {}
        """As in `Node`."""
        self._pulls: dict[int, asyncio.Future[Image]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._slots: dict[int, Slot] = {}
        """What is set aside for the node, by the number of its `Take`."""
        self._generations: dict[int, asyncio.Task[None]] = {}
        self._ended = False

    async def run(
        self, ready: Callable[[ErrorRecord | None], None], note_report: Callable[[Report], None]
    ) -> Disconnected:
        self._note_ready, self._note_report = ready, note_report
        return await self.link.run(self._handle)

    def lose_attempts(self) -> None:
        """The node is gone, and its attempts with it. Nothing is done for it any more."""
        self._ended = True
        for attempt in self._attempts.values():
            if not attempt.done():
                attempt.set_exception(self._lost())
        for pulled in self._pulls.values():
            if not pulled.done():
                pulled.set_exception(ServiceError(f"node {self._name} is gone"))
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
        if self._ended or self.leaving:
            raise self._lost()
        number = next(self._numbers)
        done: asyncio.Future[SessionResult | None] = asyncio.get_running_loop().create_future()
        self._attempts[number] = done
        session = attempt.session
        self._running[session.id, session.attempt] = attempt
        if attempt.goes_on:
            self.outlived.pop(session.id, None)
        self.link.send(
            Run(
                attempt=number,
                session=session,
                task=task,
                reserved=attempt.reserved,
                stored=attempt.stored,
                goes_on=attempt.goes_on,
            )
        )
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
            del self._running[session.id, session.attempt]
            self._let_go()
        if result is None:  # it was not told to: it is about to end, or cannot go on where its last process had been
            raise self._lost()
        return result

    def end_outlived(self, session_id: str) -> None:
        if self.outlived.pop(session_id, None) is not None:
            self.link.send(EndOutlived(session_id))

    async def pull_image(self, reference: str, name: str) -> Image:
        number = next(self._numbers)
        pulled: asyncio.Future[Image] = asyncio.get_running_loop().create_future()
        self._pulls[number] = pulled
        self.link.send(Pull(pull=number, reference=reference, name=name))
        try:
            return await pulled
        finally:
            del self._pulls[number]

    def _let_go(self) -> None:
        if self.leaving and not self._attempts:
            self.link.close(Close.LEFT, "it has ended all its sessions")

    def _lost(self) -> NodeLost:
        return NodeLost(f"node {self._name} is gone")

    def _handle(self, message: ToService) -> None:
        pools = self._parts.pools
        match message:
            case AddTurn() | SetState() | ReadTurns() | KeepArtifact() | KeepIndex() | ReadCarried() | Take():
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
            case Pulled():
                if (pulled := self._pulls.get(message.pull)) is None or pulled.done():
                    pass
                elif message.image is not None:
                    pulled.set_result(message.image)
                else:
                    pulled.set_exception(error_from(message.error) if message.error else ServiceError("no image"))
            case Report():
                self._note_report(message)
                for used in message.uses:
                    pools[used.model].note_uses(self._name, used.engines)
            case Gate():
                pools[message.model].policy.gate.report(self._name, message.report)
            case Doubt():
                pools[message.model].doubt(message.engine)
            case Leaving():
                self.leaving = True
                self._let_go()
            case Ready(error=None):
                self.outlived = message.outlived
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
        store, artifacts = self._parts.store, self._parts.artifacts
        answer = Answer(call=call.call)
        try:
            if isinstance(call, OfAttempt) and (call.session_id, call.attempt) not in self._running:
                raise Conflict(f"attempt {call.attempt} of session {call.session_id} does not run on this node")
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
                case KeepArtifact():
                    digest = await artifacts.keep(call.session_id, call.attempt, call.data)
                    answer = Answer(call=call.call, digest=digest)
                case KeepIndex():
                    # Not what the list says of itself, nor any digest: they become paths.
                    if not all(SHA256.fullmatch(artifact.sha256) for artifact in call.listed.artifacts):
                        raise ServiceError("an artifact is listed without its SHA-256")
                    listed = msgspec.structs.replace(call.listed, session_id=call.session_id, attempt=call.attempt)
                    await artifacts.keep_index(listed)
                case ReadCarried():
                    graded = (attempt.stored for attempt in self._running.values())
                    if not any(
                        run and (run.session_id, run.attempt) == (call.session_id, call.attempt) for run in graded
                    ):
                        raise Conflict(f"no run of session {call.session_id} is graded again on this node")
                    answer = Answer(call=call.call, data=await artifacts.carried(call.session_id, call.attempt))
                case Take():
                    share = await self._parts.resources.take(call.amount, call.priority)
                    self._slots[call.call] = share
                    answer = Answer(call=call.call, gpus=share.gpus)
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
