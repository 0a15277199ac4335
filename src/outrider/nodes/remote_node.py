"""The service's side of a node in another process. Sends attempts to the node, and carries out the node's calls.

Other modules start the node's process (`processes.py`) or accept joining nodes (`joined.py`). Invariants: a node's
calls are carried out only while its connection lasts, so nothing more is stored for the attempts of a lost node. When
the connection ends, all resources taken for the node are given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Failures
from outrider.concurrency.events import Feed
from outrider.config import is_local
from outrider.counts import NodeCounts
from outrider.engines.base import MAX_COUNT, ChatRequest, GenerateRequest, SamplingParams
from outrider.engines.pool.leader import forwarded, note_uses, pool_state
from outrider.engines.pool.placement import PoolState
from outrider.errors import Conflict, EngineUnavailable, ErrorRecord, OutriderError, ServiceError, bounded
from outrider.lifecycle import StopReason
from outrider.nodes import messages
from outrider.nodes.calls import CallEnded, Handler, LinkCalls, PendingCall
from outrider.nodes.claims import (
    IMAGE_RULES,
    INDEX_RULES,
    MAX_KEPT_BYTES,
    RESULT_RULES,
    TURN_RULES,
    AttemptRecords,
    check,
    checked_counts,
    checked_stats,
    checked_uses,
    has_image_bytes,
    shortened,
)
from outrider.sandbox.rootfs.store import RootImage, has_image
from outrider.schemas import NodeStats
from outrider.sessions.attempt import Attempt, NodeLost, session_result
from outrider.sessions.priority_semaphore import Slot
from outrider.sessions.resources import NodeResources
from outrider.spec import RuntimeSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.store import Store
from outrider.trajectory import SessionResult, Turn
from outrider.wire.link import Disconnected, Link, Socket
from outrider.wire.link_protocol import Beat, Close, Nonsense

if TYPE_CHECKING:  # for annotations only: this module makes no pools
    from outrider.engines.pool.pool import EnginePool

log = logging.getLogger("outrider.node")

MAX_GENERATIONS, MAX_GENERATION_BYTES = 8192, 512 << 20
"""The service forwards at most this many generations for a node at a time, with at most this many request bytes
together. Further generations are refused."""
MOST_RECENT = 10_000
"""The service accepts timeline entries for this many of a node's newest attempts. An attempt need not be running,
because an entry may arrive after its attempt has ended."""
SPARE_TAKES = 16
"""A node may have two `Take` calls (requests for resources) for each of its attempts, and this many more. Waiting and
granted calls count."""

Pools = Mapping[str | None, "EnginePool"]
"""The engine pools of a service, by model. The key of the policy is None."""


class NodeWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a service waits for a node, in seconds.

    - `heartbeat`: the maximum time between two messages of the service to the node, and of the node to the service.
    - `silence`: how long a node may send nothing. After that the node counts as hanging, and is given up.
    - `start`: the limit in place of `silence` while a node is starting. It is higher, because a starting node is busy
        and sends nothing.
    - `cancel`: how long a node on another machine has to end a cancelled attempt before the service gives the node up.
        A single call to a container daemon may take that long.
    """

    heartbeat: float = 4.0
    silence: float = 20.0
    start: float = 120.0
    cancel: float = 120.0


WAITS = NodeWaits()


class ServiceParts(msgspec.Struct, frozen=True):
    """The parts of the service that are used by the calls of nodes. All nodes of a machine share its `resources`.
    `failures` records failures of background work. `waits` are the service's waits for each node."""

    store: Store
    artifacts: ArtifactStore
    pools: Pools
    resources: NodeResources
    failures: Failures = msgspec.field(default_factory=Failures)
    waits: NodeWaits = WAITS


class RemoteNode:
    """Represents, in the service's process, a node that runs in another process; implements `sessions.attempt.Node`.

    There is at most one connection at a time, but the node may connect again. The capacity is 0 until the node's first
    report. `elsewhere` is True if the node runs on another machine and cannot reach engines on this machine. `dialled`
    is True if the node opened the connection. Such a node may be any program that has a node's token.
    """

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
        self._counted, self._counted_before = NodeCounts(), NodeCounts()
        """The counts of the present connection's last report, and the summed counts of all earlier connections."""
        self._reachable = True
        self._images: frozenset[str] | None = None
        """Names of the images on the node's machine; None for a node on this machine."""
        self.room = Feed[None]()
        """Publishes when the node can run more sessions than before."""

    async def serve(
        self,
        socket: Socket,
        setup: messages.NodeSetup,
        *,
        ready: Callable[[ErrorRecord | None], None],
        ended: Callable[[], Awaitable[None]],
    ) -> Disconnected:
        """Use the connection `socket` to the node until it ends. Returns the reason for the end.

        If the node can run attempts, `ready` is called with None; otherwise with the node's error. `ended` is awaited
        after the connection has ended. The node's resources are given back as soon as `ended` returns, so `ended` must
        wait until the node no longer uses them."""
        async with asyncio.TaskGroup() as tasks:
            link = Link(
                socket,
                messages.TO_SERVICE,
                heartbeat=self._parts.waits.heartbeat,
                silence=self._parts.waits.start,
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
                self._counted, self._counted_before = NodeCounts(), self.counts()
                connection.calls.end()
                connection.calls.cancel()
                await shielded(ended)
                connection.give_back()

    def send_pool_state(self, model: str | None, state: PoolState) -> None:
        """Send the state of a model's engine pool to the node if it is connected. (A new connection begins with the
        states of all pools.)"""
        if self._connection is not None:
            self._connection.link.send(
                messages.Follow(model=model, state=_without_local(state) if self._elsewhere else state)
            )

    def send_loads(self, model: str | None, loads: dict[str, float]) -> None:
        """Send to a connected node the load that other processes put on a model's engines."""
        if self._connection is not None:
            self._connection.link.send(messages.Loads(model=model, loads=loads))

    def stats(self) -> NodeStats:
        out_of_reach = not self._reachable or (self._connection is not None and self._connection.leaving)
        capacity = 0 if out_of_reach else self._stats.capacity
        return msgspec.structs.replace(self._stats, capacity=capacity, resources=self._parts.resources.stats())

    def counts(self) -> NodeCounts:
        """Return the sum of what all processes of this node have counted."""
        return self._counted_before.plus(self._counted)

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return has_image(runtime.image, self._images)

    def set_reachable(self, reachable: bool) -> None:
        """Set whether attempts can be sent to the node. While they cannot be sent, the node's capacity is 0."""
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
        return await self._connection.calls.call(messages.PullImage(reference, name))

    def _note_report(self, report: messages.Report) -> None:
        stats = checked_stats(self.name, report)
        self._counted = checked_counts(report, self._counted)
        more = stats.capacity > self._stats.capacity
        self._stats, self._images = stats, report.images
        if more:
            self.room.publish(None)


def _without_local(state: PoolState) -> PoolState:
    """Return the state of a pool for a node on another machine, without the specs of engines whose addresses work only
    on this machine. The node reaches an engine without a spec through the service."""
    engines = [
        msgspec.structs.replace(engine, spec=None) if is_local(urlsplit(engine.url or "").hostname or "") else engine
        for engine in state.engines
    ]
    return msgspec.structs.replace(state, engines=tuple(engines))


class NodeConnection:
    """One connection to a node. The node's calls run in `tasks`."""

    def __init__(
        self, name: str, link: Link[messages.ToService], parts: ServiceParts, tasks: asyncio.TaskGroup, *, dialled: bool
    ) -> None:
        self._name = name
        self._dialled = dialled
        self._parts = parts
        self.link = link
        self.leaving = False
        """True once the node takes no new attempts. The connection is closed when the last attempt has ended."""
        self._running: dict[tuple[str, int], AttemptRecords] = {}
        """Running attempts by session id and attempt number."""
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()
        """The newest MOST_RECENT attempts, running or ended."""
        handlers: dict[type[messages.NodeCall[Any]], Handler] = {
            messages.SetState: self._set_state,
            messages.AddTurn: self._add_turn,
            messages.AddTimeline: self._add_timeline,
            messages.ReadTurns: self._read_turns,
            messages.ReadFrozenTurns: self._read_frozen_turns,
            messages.KeepArtifact: self._keep_artifact,
            messages.KeepIndex: self._keep_index,
            messages.ReadCarried: self._read_carried,
            messages.Take: self._take,
            messages.GenerateTokens: self._generate_tokens,
            messages.GenerateChat: self._generate_chat,
        }
        self.calls = LinkCalls(link, handlers, peer=f"node {name}", spawn=tasks.create_task)
        self._left: list[Slot] = []
        """The resource shares that the node held when the connection ended. `give_back` releases these shares."""
        self._stopped = False
        """True once the node has stopped using its resources."""

    async def run(
        self, ready: Callable[[ErrorRecord | None], None], note_report: Callable[[messages.Report], None]
    ) -> Disconnected:
        self._note_ready, self._note_report = ready, note_report
        return await self.link.run(self._handle, ready=self.calls.ready_for_more)

    def give_back(self) -> None:
        """Give back the resources taken for the node, and remove what is recorded about its use of engines."""
        self._stopped = True
        for slot in self._left:
            slot.release()
        for pool in self._parts.pools.values():
            note_uses(pool, self._name, {})
            pool.policy.gate.forget(self._name)

    async def run_attempt(self, attempt: Attempt) -> SessionResult:
        """Run an attempt on the node (see `Node.run`). If the caller is cancelled, CancelledError is raised only when
        the node has ended the attempt."""
        # Encode the task in a thread, because it may contain megabytes of files.
        task = await asyncio.to_thread(lambda: attempt.task.model_dump_json().encode())
        await self.calls.room()  # the sessions of a whole group may begin at once
        if self.calls.ended or self.leaving:
            raise self._lost()
        session = attempt.session
        vocabularies = {model: pool.vocabulary for model, pool in self._parts.pools.items()}
        records = AttemptRecords(attempt, vocabularies, kept_here=self._dialled)
        request = messages.RunAttempt(session=session, task=task, reserved=attempt.reserved, stored=attempt.stored)
        self._running[session.id, session.attempt] = records
        self._recent[session.id, session.attempt] = None
        if len(self._recent) > MOST_RECENT:
            self._recent.popitem(last=False)
        try:
            with self.calls.pending(request) as call:
                try:
                    result = await call.next()
                except asyncio.CancelledError:
                    call.cancel()
                    await shielded(lambda: self._end_of(attempt.name, call))
                    raise
            check(result, RESULT_RULES, records)
        # The call has ended without a result, although it was not cancelled. So the node is about to exit.
        except CallEnded as error:
            raise self._lost() from error
        except Nonsense as error:
            self.link.close(Close.NONSENSE, str(error))
            raise self._lost() from error
        except OutriderError as error:
            if self.calls.ended:
                raise self._lost() from error
            # The attempt or its result could not be sent, or the node cannot run the attempt. Another try would fail in
            # the same way, so the error is not retryable.
            record = msgspec.structs.replace(error.record(), retryable=False)
            return session_result(session, StopReason.ERROR, [], task=attempt.task, error=record)
        finally:
            del self._running[session.id, session.attempt]
            self._let_go()
        return shortened(result)

    async def _end_of(self, name: str, call: PendingCall[SessionResult]) -> None:
        """Wait until a cancelled attempt has ended or is lost. A node on another machine may be any program. Such a
        node must not delay the end of a group of sessions or of the service, so the service gives it up after
        `NodeWaits.cancel` seconds."""
        seconds = self._parts.waits.cancel
        try:
            async with asyncio.timeout(seconds if self._dialled else None):
                await call.end()
        except TimeoutError:
            self._lose(f"it has not ended attempt {name} within {seconds:g} s")
            await call.end()

    def _let_go(self) -> None:
        if self.leaving and not self._running:
            self.link.close(Close.LEFT, "it has ended all its sessions")

    def _lost(self) -> NodeLost:
        return NodeLost(f"node {self._name} is gone")

    def _handle(self, message: messages.ToService) -> None:
        """Handle a message of the node. Raises Nonsense if the message breaks the protocol."""
        match message:
            case messages.CallRequest() | messages.CallReply() | messages.CancelCall():
                self.calls.receive(message)
            case messages.Report():
                self._note_report(message)
                for used in message.uses:
                    uses = checked_uses(used.engines, stranger=self._dialled)
                    note_uses(self._pool(used.model), self._name, uses)
            case messages.Gate():
                gate = self._pool(message.model).policy.gate
                # With its first report, the node becomes a follower of the gate, so that a pause waits for the node.
                # The node sends this report as soon as it has the states of the pools, which is before it sends
                # `Ready`.
                if not gate.expects(self._name):
                    gate.expect(self._name, self._lose)
                try:
                    gate.report(self._name, message.report)
                except ValueError as error:
                    raise Nonsense(f"it reports {error}") from error
            case messages.CheckEngine():
                self._pool(message.model).health.look(message.engine)
            case messages.Leaving():
                self.leaving = True
                self._let_go()
            case messages.Ready(error=None):
                self.link.silence = self._parts.waits.silence
                for pool in self._parts.pools.values():
                    if not pool.policy.gate.expects(self._name):
                        pool.policy.gate.expect(self._name, self._lose)
                self._note_ready(None)
            case messages.Ready():
                self._note_ready(message.error and bounded(message.error))
                self.link.close(Close.LEFT, "it cannot start")
            case Beat():
                pass

    def _pool(self, model: str | None) -> EnginePool:
        if (pool := self._parts.pools.get(model)) is None:
            raise Nonsense("a model that the service does not have")
        return pool

    def _lose(self, why: str) -> None:
        """Give the node up for the reason `why`: close its connection."""
        log.warning("node %s is given up: %s", self._name, why)
        self.link.close(Close.SILENT, why)

    def _records_of(self, call: messages.AttemptCall[Any]) -> AttemptRecords:
        """Return the service's records of the attempt that a call concerns. Raises Conflict if the attempt does not run
        on this node."""
        if (records := self._running.get((call.session_id, call.attempt))) is None:
            raise Conflict(f"attempt {call.attempt} of session {call.session_id} does not run on this node")
        return records

    async def _set_state(self, call: messages.SetState) -> None:
        self._records_of(call)
        await self._parts.store.set_state(call.session_id, call.attempt, call.state)

    async def _add_turn(self, call: messages.AddTurn) -> None:
        records = self._records_of(call)
        if has_image_bytes(call.turn):
            await asyncio.to_thread(check, call, IMAGE_RULES, records)
        else:
            check(call, IMAGE_RULES, records)
        check(call, TURN_RULES, records)
        try:
            with records.storing_turn(call):
                await self._parts.store.add_turn(call.session_id, call.attempt, call.turn, model=call.model)
        except Conflict:
            raise
        except BaseException:
            records.certain = False  # it is not known whether the turn was stored
            raise
        records.note_turn(call)

    async def _add_timeline(self, call: messages.AddTimeline) -> None:
        """Store the timeline of attempts that run or have run on this node. Parts that concern other attempts are
        dropped."""
        own = [part for part in call.parts if (part.session_id, part.attempt) in self._recent]
        await self._parts.store.add_timeline(own)

    async def _read_turns(self, call: messages.ReadTurns) -> list[Turn]:
        self._records_of(call)
        return await self._parts.store.turns(call.session_id, call.attempt, images=call.images)

    async def _read_frozen_turns(self, call: messages.ReadFrozenTurns) -> dict[str, list[Turn]]:
        self._records_of(call)
        return await self._parts.store.frozen_turns(call.session_id, call.attempt)

    async def _keep_artifact(self, call: messages.KeepArtifact) -> str:
        records = self._records_of(call)
        records.kept_bytes += len(call.data)
        if records.kept_bytes > MAX_KEPT_BYTES:
            raise Nonsense(f"more than {MAX_KEPT_BYTES} bytes of artifacts of attempt {records.attempt.name}")
        digest = await self._parts.artifacts.keep(call.session_id, call.attempt, call.data)
        records.kept[digest] = len(call.data)
        return digest

    async def _keep_index(self, call: messages.KeepIndex) -> None:
        # The list's session id, attempt number and digests become parts of file paths. So the digests must be those of
        # stored artifacts, and the id and the number are replaced by those of the call, which identify a running
        # attempt.
        check(call, INDEX_RULES, self._records_of(call))
        listed = msgspec.structs.replace(call.listed, session_id=call.session_id, attempt=call.attempt)
        await self._parts.artifacts.keep_index(listed)

    async def _read_carried(self, call: messages.ReadCarried) -> bytes:
        graded = (other.attempt.stored for other in self._running.values())
        if not any(run and (run.session_id, run.attempt) == (call.session_id, call.attempt) for run in graded):
            raise Conflict(f"no run of session {call.session_id} is graded again on this node")
        return await self._parts.artifacts.kept_for_graders(call.session_id, call.attempt)

    def _take(self, call: messages.Take) -> AsyncGenerator[tuple[str, ...], None]:
        if len(self.calls.streams(messages.Take)) >= 2 * len(self._running) + SPARE_TAKES:
            raise Nonsense(f"it asks for resources more often than {len(self._running)} attempts need")
        return self._held(call)

    async def _held(self, call: messages.Take) -> AsyncGenerator[tuple[str, ...], None]:
        share = await self._parts.resources.take(call.amount, call.priority, call.tenant)
        try:
            yield share.gpus
            await asyncio.Event().wait()
        finally:
            if self.calls.ended and not self._stopped:
                self._left.append(share)
            else:
                share.release()

    def _generate_tokens(self, call: messages.GenerateTokens) -> AsyncGenerator[object, None]:
        ids = np.frombuffer(call.input_ids, dtype=np.int32) if len(call.input_ids) % 4 == 0 else np.array([])
        if not len(ids) or ids.min() < 0:  # a negative id crashes an SGLang server
            raise Nonsense("a prompt with impossible ids")
        request = GenerateRequest(
            request_id=call.request_id, session_key=call.session_key, input_ids=ids, sampling=call.sampling
        )
        return self._generate(call, request, call.sampling)

    def _generate_chat(self, call: messages.GenerateChat) -> AsyncGenerator[object, None]:
        return self._generate(call, call.request, call.request.sampling)

    def _generate(
        self,
        call: messages.GenerateTokens | messages.GenerateChat,
        request: GenerateRequest | ChatRequest,
        sampling: SamplingParams,
    ) -> AsyncGenerator[object, None]:
        """Forward a generation to an engine that only this process can reach. Raises Nonsense if the model is unknown
        or `max_tokens` is impossible."""
        pool = self._pool(call.model)
        if not 0 < sampling.max_tokens <= MAX_COUNT:
            raise Nonsense(f"a generation of {sampling.max_tokens} tokens")
        return self._forwarded(forwarded(pool, call.engine, request))

    async def _forwarded(self, chunks: AsyncGenerator[object, None]) -> AsyncGenerator[object, None]:
        sizes = self.calls.streams(messages.GenerateTokens, messages.GenerateChat)
        if len(sizes) > MAX_GENERATIONS or sum(sizes) > MAX_GENERATION_BYTES:
            raise EngineUnavailable(f"node {self._name} has too many generations forwarded at once")
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
