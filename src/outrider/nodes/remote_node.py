"""The service's side of a node in another process: sends attempts to the node, and carries out the node's calls.

Other modules start the process (`processes.py`) or let the node join (`joined.py`). Invariants: a call of a node is
carried out only while the node's connection lasts, so nothing is stored for an attempt that the scheduler has given up
together with the node; all resources set aside for a node are given back when the connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Failures
from outrider.concurrency.events import Feed
from outrider.config import is_local
from outrider.engines.base import ChatRequest, Chunk, GenerateRequest
from outrider.engines.pool.checks import MAX_COUNT
from outrider.engines.pool.leader import PoolState, forwarded, note_uses, pool_state
from outrider.engines.pool.pool import EnginePool
from outrider.errors import (
    Conflict,
    EngineUnavailable,
    ErrorRecord,
    OutriderError,
    ServiceError,
    bounded,
    error_from,
    record_of,
)
from outrider.nodes.claims import (
    INDEX_RULES,
    MAX_KEPT_BYTES,
    RESULT_RULES,
    TURN_RULES,
    Given,
    check,
    checked_stats,
    checked_uses,
    shortened,
)
from outrider.nodes.messages import (
    TO_SERVICE,
    AbortForwarded,
    AddTurn,
    Call,
    CallReply,
    Cancel,
    CheckEngine,
    EndOutlived,
    Follow,
    ForwardGeneration,
    Gate,
    Generated,
    GiveBack,
    KeepArtifact,
    KeepIndex,
    Leaving,
    Loads,
    NodeSetup,
    OfAttempt,
    Pull,
    Pulled,
    Ran,
    ReadCarried,
    ReadTurns,
    Ready,
    Report,
    RunAttempt,
    SetState,
    Take,
    ToService,
    framed,
)
from outrider.sandbox.rootfs.store import RootImage, has_image
from outrider.schemas import NodeStats
from outrider.sessions.attempt import Attempt, NodeLost
from outrider.sessions.priority_semaphore import Slot
from outrider.sessions.resources import NodeResources
from outrider.spec import RuntimeSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.store import Store
from outrider.trajectory import SessionResult
from outrider.wire.frames import Beat, Close, Nonsense
from outrider.wire.link import Disconnected, Link, Socket

log = logging.getLogger("outrider.node")

HEARTBEAT_SECONDS = 4.0
SILENCE_SECONDS = 20.0
"""Seconds of silence after which a node is given up as hanging."""
START_SECONDS = 120.0
"""Seconds of silence after which a starting node is given up. Such a node is busy and sends nothing."""

CANCEL_SECONDS = 120.0
"""Seconds that a node on another machine has to end a cancelled attempt. One call to a container daemon may take as
long."""

MAX_CALLS, MAX_CALL_BYTES = 1024, 64 << 20
"""Maximum number and bytes of a node's unanswered calls. At either limit nothing more is read from the node."""
MAX_GENERATIONS, MAX_GENERATION_BYTES = 8192, 512 << 20
"""Maximum number and bytes of a node's forwarded generations. Further generations are refused."""
SPARE_TAKES = 16
"""Number of `Take` calls, waiting or granted, allowed in addition to two for each attempt of the node."""

Pools = Mapping[str | None, EnginePool]
"""The engine pools of a service by model. The policy's key is None."""


class ServiceParts(msgspec.Struct, frozen=True):
    """The parts of the service for carrying out the nodes' calls. All nodes on one machine share the machine's
    `resources`. Failures are recorded in `failures`."""

    store: Store
    artifacts: ArtifactStore
    pools: Pools
    resources: NodeResources
    failures: Failures = msgspec.field(default_factory=Failures)


class RemoteNode:
    """The service's proxy for a node in another process: a `sessions.attempt.Node` over one connection after another.
    The node has no room for sessions before its first report. `elsewhere`: the node is on another machine, and cannot
    reach engines on this machine. `dialled`: the node dialled in, and may be anybody's program with a node's token."""

    def __init__(
        self, name: str, machine: str, parts: ServiceParts, *, elsewhere: bool = False, dialled: bool = False
    ) -> None:
        self.name = name
        self.machine = machine
        self._elsewhere = elsewhere
        self._dialled = dialled
        self._parts = parts
        self._connection: NodeConnection | None = None
        self._nothing = NodeStats(name=name, sessions=0, capacity=0, lanes=(), resources=parts.resources.stats())
        self._stats = self._nothing
        self._reachable = True
        self._images: frozenset[str] | None = None
        """Names of the images on the node's machine; None for a node on this machine."""
        self.room = Feed[None]()
        """Publishes when the node has room for more sessions than before."""

    async def serve(
        self,
        socket: Socket,
        setup: NodeSetup,
        *,
        ready: Callable[[ErrorRecord | None], None],
        ended: Callable[[], Awaitable[None]],
        last_arrival: Callable[[], float] = lambda: 0.0,
        taken: Callable[[], float] = lambda: 0.0,
    ) -> Disconnected:
        """Run the node at the other end of `socket` until the connection ends. Returns the reason for the end. `ready`
        is called with None when the node is ready to run attempts, or with the error if it cannot run any. `ended` is
        awaited at the end, and returns when the node has stopped using its resources: only then are the resources given
        back. `last_arrival`, `taken`: see `Link`."""
        async with asyncio.TaskGroup() as tasks:
            link = Link(
                socket,
                TO_SERVICE,
                heartbeat=HEARTBEAT_SECONDS,
                silence=START_SECONDS,
                last_arrival=last_arrival,
                taken=taken,
                stranger=self._dialled,
            )
            self._connection = connection = NodeConnection(self.name, link, self._parts, tasks, dialled=self._dialled)
            connection.link.send(setup)
            for model, pool in self._parts.pools.items():
                self.send_pool_state(model, pool_state(pool))
            try:
                return await connection.run(ready, self._note_report)
            finally:
                self._connection = None
                self._stats = self._nothing
                connection.lose_attempts()
                await shielded(ended)
                connection.give_back()

    def send_pool_state(self, model: str | None, state: PoolState) -> None:
        """Send the state of a model's engine pool to the node, if it is connected. Each later connection begins with
        the states of all pools."""
        if self._connection is not None:
            self._connection.link.send(Follow(model=model, state=_without_local(state) if self._elsewhere else state))

    def send_loads(self, model: str | None, loads: dict[str, float]) -> None:
        """Send the load that other processes put on a model's engines to the node, if it is connected."""
        if self._connection is not None:
            self._connection.link.send(Loads(model=model, loads=loads))

    def stats(self) -> NodeStats:
        out_of_reach = not self._reachable or (self._connection is not None and self._connection.leaving)
        capacity = 0 if out_of_reach else self._stats.capacity
        return msgspec.structs.replace(self._stats, capacity=capacity, resources=self._parts.resources.stats())

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return has_image(runtime.image, self._images)

    def set_reachable(self, reachable: bool) -> None:
        """Set whether attempts can be sent to the node. A node out of reach has no room."""
        more = reachable and not self._reachable
        self._reachable = reachable
        if more:
            self.room.publish(None)

    async def run(self, attempt: Attempt) -> SessionResult:
        if self._connection is None:
            raise NodeLost(f"node {self.name} is gone")
        return await self._connection.run_attempt(attempt)

    async def pull_image(self, reference: str, name: str) -> RootImage:
        if self._connection is None:
            raise ServiceError(f"node {self.name} is gone")
        return await self._connection.pull_image(reference, name)

    def outlived(self) -> dict[str, int]:
        return {} if self._connection is None else dict(self._connection.outlived)

    def end_outlived(self, session_id: str) -> None:
        if self._connection is not None:
            self._connection.end_outlived(session_id)

    def _note_report(self, report: Report) -> None:
        stats = checked_stats(self.name, report)
        more = stats.capacity > self._stats.capacity
        self._stats, self._images = stats, report.images
        if more:
            self.room.publish(None)


def _without_local(state: PoolState) -> PoolState:
    """Return the state for a node on another machine: engines at addresses local to this machine lose their specs, so
    that the node reaches the engines through the service."""
    engines = [
        msgspec.structs.replace(engine, spec=None) if is_local(urlsplit(engine.url or "").hostname or "") else engine
        for engine in state.engines
    ]
    return msgspec.structs.replace(state, engines=tuple(engines))


class NodeConnection:
    """One connection to a node. `tasks` runs the node's calls."""

    def __init__(
        self, name: str, link: Link[ToService], parts: ServiceParts, tasks: asyncio.TaskGroup, *, dialled: bool
    ) -> None:
        self._name = name
        self._dialled = dialled
        self._parts = parts
        self._tasks = tasks
        self.link = link
        self._numbers = itertools.count()
        self.leaving = False
        """True once the node takes no new attempts. The connection is closed when the last attempt has ended."""
        self._attempts: dict[int, asyncio.Future[SessionResult | None]] = {}
        self._running: dict[tuple[str, int], Given] = {}
        """Running attempts by session id and attempt number."""
        self._by_number: dict[int, Given] = {}
        """Running attempts by the number of their `RunAttempt`."""
        self.outlived: dict[str, int] = {}
        """See `Node.outlived`."""
        self._pulls: dict[int, asyncio.Future[RootImage]] = {}
        self._asked = -1
        """The number of the node's last call or generation. The numbers must rise."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._call_bytes = 0
        self._takes: dict[int, asyncio.Task[None]] = {}
        self._slots: dict[int, Slot] = {}
        """Resources set aside for the node, by the number of the `Take`."""
        self._generations: dict[int, asyncio.Task[None]] = {}
        self._generation_bytes = 0
        self._answered = asyncio.Event()
        self._ended = False

    async def run(
        self, ready: Callable[[ErrorRecord | None], None], note_report: Callable[[Report], None]
    ) -> Disconnected:
        self._note_ready, self._note_report = ready, note_report
        return await self.link.run(self._handle, ready=self._ready_for_more)

    async def _ready_for_more(self) -> None:
        """Wait until the node's unanswered calls are within their limits."""
        while len(self._calls) >= MAX_CALLS or self._call_bytes > MAX_CALL_BYTES:
            self._answered.clear()
            await self._answered.wait()

    def lose_attempts(self) -> None:
        """Fail all attempts and pulls of a node that is gone, and cancel its calls."""
        self._ended = True
        for attempt in self._attempts.values():
            if not attempt.done():
                attempt.set_exception(self._lost())
        for pulled in self._pulls.values():
            if not pulled.done():
                pulled.set_exception(ServiceError(f"node {self._name} is gone"))
        for task in (*self._calls.values(), *self._takes.values(), *self._generations.values()):
            task.cancel()

    def give_back(self) -> None:
        """Give back the resources set aside for the node, and clear its use of engines."""
        for slot in self._slots.values():
            slot.release()
        for pool in self._parts.pools.values():
            note_uses(pool, self._name, {})
            pool.policy.gate.forget(self._name)

    async def run_attempt(self, attempt: Attempt) -> SessionResult:
        """See `Node.run`. A cancellation is raised when the node has torn the attempt down."""
        # The task is encoded in a thread, because it may have megabytes of files.
        task = await asyncio.to_thread(lambda: attempt.task.model_dump_json().encode())
        if self._ended or self.leaving:
            raise self._lost()
        number = next(self._numbers)
        done: asyncio.Future[SessionResult | None] = asyncio.get_running_loop().create_future()
        self._attempts[number] = done
        session, given = attempt.session, Given(attempt)
        given.vocabularies = {model: pool.vocabulary for model, pool in self._parts.pools.items()}
        given.kept_here = self._dialled
        self._running[session.id, session.attempt] = self._by_number[number] = given
        if attempt.goes_on:
            self.outlived.pop(session.id, None)
        self.link.send(
            RunAttempt(
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
            await shielded(lambda: self._end_of(attempt.name, done))
            if not done.cancelled():
                done.exception()  # asyncio logs an exception that is never retrieved
            raise
        finally:
            del self._attempts[number], self._by_number[number]
            del self._running[session.id, session.attempt]
            self._let_go()
        if result is None:  # without a cancellation: the node will end, or could not continue the last node's run
            raise self._lost()
        return result

    async def _end_of(self, name: str, done: asyncio.Future[SessionResult | None]) -> None:
        """Return when a cancelled attempt has ended or is lost. A node on another machine that does not end the attempt
        within CANCEL_SECONDS is given up: the node may be anybody's program, and must not keep a group, or the service,
        from ending."""
        await asyncio.wait([done], timeout=CANCEL_SECONDS if self._dialled else None)
        if not done.done():
            self._lose(f"it has not ended attempt {name} within {CANCEL_SECONDS:g} s")
            await asyncio.wait([done])

    def end_outlived(self, session_id: str) -> None:
        if self.outlived.pop(session_id, None) is not None:
            self.link.send(EndOutlived(session_id))

    async def pull_image(self, reference: str, name: str) -> RootImage:
        number = next(self._numbers)
        pulled: asyncio.Future[RootImage] = asyncio.get_running_loop().create_future()
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
        """Handle a message. Raises Nonsense for a message that breaks the protocol."""
        pools = self._parts.pools
        match message:
            case Take():
                if len(self._takes) + len(self._slots) >= 2 * len(self._running) + SPARE_TAKES:
                    raise Nonsense(f"it asks for resources more often than for {len(self._running)} attempts")
                self._start(self._takes, message.call, self._answer(message))
            case AddTurn() | SetState() | ReadTurns() | KeepArtifact() | KeepIndex() | ReadCarried():
                self._check_call(message)
                self._start(self._calls, message.call, self._answer(message, size=self.link.size))
            case GiveBack():
                if (slot := self._slots.pop(message.call, None)) is not None:
                    slot.release()
                elif (take := self._takes.get(message.call)) is not None:
                    take.cancel()  # the call still waits
            case ForwardGeneration():
                self._check_generation(message)
                self._start(self._generations, message.generation, self._generate(message, size=self.link.size))
            case AbortForwarded():
                if (generation := self._generations.get(message.generation)) is not None:
                    generation.cancel()
            case Ran():
                if (attempt := self._attempts.get(message.attempt)) is None:
                    raise Nonsense("the end of an attempt that it does not have")
                if message.result is not None:
                    check(message.result, RESULT_RULES, self._by_number[message.attempt])
                if not attempt.done():
                    attempt.set_result(message.result and shortened(message.result))
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
                    uses = checked_uses(used.engines, stranger=self._dialled)
                    note_uses(self._pool(used.model), self._name, uses)
            case Gate():
                gate = self._pool(message.model).policy.gate
                if not gate.expects(self._name):  # the node has only begun to follow the pool
                    gate.expect(self._name, self._lose)
                try:
                    gate.report(self._name, message.report)
                except ValueError as error:
                    raise Nonsense(f"it reports {error}") from error
            case CheckEngine():
                self._pool(message.model).health.look(message.engine)
            case Leaving():
                self.leaving = True
                self._let_go()
            case Ready(error=None):
                self.outlived = message.outlived
                self.link.silence = SILENCE_SECONDS
                for pool in pools.values():
                    if not pool.policy.gate.expects(self._name):
                        pool.policy.gate.expect(self._name, self._lose)
                self._note_ready(None)
            case Ready():
                self._note_ready(message.error and bounded(message.error))
                self.link.close(Close.LEFT, "it cannot start")
            case Beat():
                pass

    def _pool(self, model: str | None) -> EnginePool:
        if (pool := self._parts.pools.get(model)) is None:
            raise Nonsense("a model that the service does not have")
        return pool

    def _lose(self, why: str) -> None:
        """Give the node up."""
        log.warning("node %s is given up: %s", self._name, why)
        self.link.close(Close.SILENT, why)

    def _start(self, among: dict[int, asyncio.Task[None]], number: int, work: Coroutine[Any, Any, None]) -> None:
        if number <= self._asked:
            work.close()
            raise Nonsense(f"call {number} came after {self._asked}")
        self._asked = number
        among[number] = task = self._tasks.create_task(work)
        task.add_done_callback(lambda _: among.pop(number, None))

    def _check_call(self, call: OfAttempt | ReadCarried) -> None:
        """Check the data to be stored for a running attempt. `_do` refuses calls for all other attempts. Raises
        Nonsense."""
        if (given := self._running.get((call.session_id, call.attempt))) is None:
            return
        match call:
            case AddTurn():
                check(call, TURN_RULES, given)
            case KeepArtifact():
                given.kept_bytes += len(call.data)
                if given.kept_bytes > MAX_KEPT_BYTES:
                    raise Nonsense(f"more than {MAX_KEPT_BYTES} bytes of artifacts of attempt {given.attempt.name}")
            case _:
                pass

    def _check_generation(self, asked: ForwardGeneration) -> None:
        """Raise Nonsense for a request that no engine may be given."""
        self._pool(asked.model)
        if (asked.chat is None) == (asked.sampling is None) or len(asked.input_ids) % 4:
            raise Nonsense("a generation that is neither of ids nor of messages")
        if asked.sampling is not None:
            ids = np.frombuffer(asked.input_ids, dtype=np.int32)
            if not len(ids) or ids.min() < 0:  # a negative id ends an SGLang server
                raise Nonsense("a prompt with ids that cannot be")
        sampling = asked.sampling if asked.chat is None else asked.chat.sampling
        assert sampling is not None
        if not 0 < sampling.max_tokens <= MAX_COUNT:
            raise Nonsense(f"a generation of {sampling.max_tokens} tokens")

    async def _answer(self, call: Call, *, size: int = 0) -> None:
        self._call_bytes += size
        try:
            await self._do(call)
        except Nonsense as error:
            self.link.close(Close.NONSENSE, str(error))
        finally:
            self._call_bytes -= size
            self._answered.set()

    async def _do(self, call: Call) -> None:
        """Carry out a call of the node and send the reply. Raises Nonsense."""
        store, artifacts = self._parts.store, self._parts.artifacts
        answer = CallReply(call=call.call)
        try:
            given = None
            if isinstance(call, OfAttempt) and (given := self._running.get((call.session_id, call.attempt))) is None:
                raise Conflict(f"attempt {call.attempt} of session {call.session_id} does not run on this node")
            match call:
                case AddTurn():
                    assert given is not None
                    try:
                        await store.add_turn(call.session_id, call.attempt, call.turn, model=call.model)
                    except Conflict:
                        raise
                    except BaseException:
                        given.certain = False  # the turn may be stored all the same
                        raise
                    given.note_turn(call)
                case SetState():
                    await store.set_state(call.session_id, call.attempt, call.state)
                case ReadTurns(frozen=True):
                    frozen = await store.frozen_turns(call.session_id, call.attempt)
                    answer = CallReply(call=call.call, frozen={model: tuple(turns) for model, turns in frozen.items()})
                case ReadTurns():
                    turns = await store.turns(call.session_id, call.attempt, images=call.images)
                    answer = CallReply(call=call.call, turns=tuple(turns))
                case KeepArtifact():
                    assert given is not None
                    digest = await artifacts.keep(call.session_id, call.attempt, call.data)
                    given.kept[digest] = len(call.data)
                    answer = CallReply(call=call.call, digest=digest)
                case KeepIndex():
                    assert given is not None
                    # Session id, attempt and digests become paths. So the first two are taken from the call, which is
                    # for a running attempt, and the digests are checked here.
                    check(call, INDEX_RULES, given)
                    listed = msgspec.structs.replace(call.listed, session_id=call.session_id, attempt=call.attempt)
                    await artifacts.keep_index(listed)
                case ReadCarried():
                    graded = (other.attempt.stored for other in self._running.values())
                    if not any(
                        run and (run.session_id, run.attempt) == (call.session_id, call.attempt) for run in graded
                    ):
                        raise Conflict(f"no run of session {call.session_id} is graded again on this node")
                    answer = CallReply(call=call.call, data=await artifacts.carried(call.session_id, call.attempt))
                case Take():
                    share = await self._parts.resources.take(call.amount, call.priority, call.tenant)
                    self._slots[call.call] = share
                    answer = CallReply(call=call.call, gpus=share.gpus)
        except Nonsense:
            raise
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("what node %s asked for failed", self._name)
            answer = CallReply(call=call.call, error=record_of(error))
        try:
            frame = framed(answer)
        except ServiceError as error:
            frame = framed(CallReply(call=call.call, error=error.record()))
        await self.link.room()
        self.link.send_encoded(frame)

    async def _generate(self, asked: ForwardGeneration, *, size: int) -> None:
        """Forward a generation to an engine that only this process can reach."""
        number = asked.generation
        self._generation_bytes += size
        try:
            if len(self._generations) > MAX_GENERATIONS or self._generation_bytes > MAX_GENERATION_BYTES:
                raise EngineUnavailable(f"node {self._name} has too many generations forwarded at once")
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
            async with aclosing(forwarded(self._parts.pools[asked.model], asked.engine, request)) as chunks:
                async for chunk in chunks:
                    await self.link.room()
                    if isinstance(chunk, Chunk):
                        self.link.send(Generated(generation=number, chunk=chunk))
                    else:
                        self.link.send(Generated(generation=number, chat=chunk))
            self.link.send(Generated(generation=number))
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("a generation for node %s failed", self._name)
            self.link.send(Generated(generation=number, error=record_of(error)))
        finally:
            self._generation_bytes -= size
