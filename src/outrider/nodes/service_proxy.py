"""The node's side of its connection to the service: receives attempts, sends results, and gives the node access to the
service's store, the machine's resources, and engines that only the service can reach.

Invariant: all attempts end with the connection, and nothing is stored for an attempt afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from outrider.concurrency.chores import Chores
from outrider.engines.base import ChatChunk, ChatRequest, Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.engines.pool.follower import PoolFollower
from outrider.engines.pool.policy import GateReport
from outrider.engines.pool.record import EngineState
from outrider.errors import OutriderError, ServiceError, error_from, record_of
from outrider.lifecycle import SessionState, StopReason
from outrider.nodes.messages import (
    TO_NODE,
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
    ModelUses,
    NodeSetup,
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
    ToNode,
    framed,
)
from outrider.nodes.remote_node import HEARTBEAT_SECONDS
from outrider.schemas import ArtifactList
from outrider.sessions.attempt import Attempt, NodeLost, session_result
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import Capacity, NodeResources, ResourceAmount, ResourceShare
from outrider.spec import TaskSpec
from outrider.store.rows import SessionRow
from outrider.trajectory import SessionResult, Turn
from outrider.wire.frames import Beat
from outrider.wire.link import Disconnected, Link, Socket

log = logging.getLogger("outrider.node")

SILENT_SECONDS = 0.5
"""A service without a message for this many seconds has stalled: in this time five messages about loads are due."""

REPORT_SECONDS = 0.1
"""Seconds between two reports to the service. An unchanged report is not sent."""

IMAGES_SECONDS = 5.0
"""Seconds between two looks for new images on the machine."""

DOUBT_SECONDS = 0.5
"""Seconds for which the result of a failed attempt is held back if one signal may have ended its sandbox and this
process: the process may receive the signal later than the sandbox."""

FOR_EVER = 1e9
"""Maximum seconds of silence on the link. The silence has no limit, because a service that stalled for a while is still
the service. Only the end of the connection shows that the service is gone."""


Followers = Mapping[str | None, PoolFollower]
"""The node's engine pools by model. The policy's key is None."""


class ServiceProxy:
    """The node's proxy for the service. `service.run(...)` runs the service's attempts. While the connection lasts, the
    parts of the node use `store`, `artifacts`, `resources`, `leader` and `forwarded`. `images` returns the names of
    this machine's images, if the service is on another machine. `ending` is set when this process and its sandboxes are
    ended together: results of attempts mean nothing from then on, and the attempts count as lost."""

    def __init__(
        self,
        socket: Socket,
        capacity: Capacity,
        *,
        images: Callable[[], frozenset[str]] | None = None,
        ending: asyncio.Event | None = None,
    ) -> None:
        self._link: Link[ToNode] = Link(socket, TO_NODE, heartbeat=HEARTBEAT_SECONDS, silence=FOR_EVER)
        self._images = images
        self._elsewhere = images is not None
        self._ending_together = ending
        self.store = RemoteStore(self)
        self.artifacts = RemoteArtifacts(self)
        self.resources = SharedResources(self, capacity)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[CallReply]] = {}
        self._generations: dict[int, asyncio.Queue[Generated]] = {}
        self._attempts: dict[int, asyncio.Task[SessionResult | None]] = {}
        self._early: list[ToNode] = []
        """Messages received before the node was ready."""
        self._ready: tuple[LocalNode, Followers, Chores] | None = None
        """The parts to which messages are applied; None before the node is ready."""
        self._reported: Report | None = None
        self._last_arrival: float | None = None
        """The time of the service's last message; None before the node is ready."""
        self._ending = False
        """True once new attempts are ignored."""
        self._ended = False
        """True once the connection is gone."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[asyncio.Task[Disconnected]]:
        """Send and receive while the block runs. Yields a task that is done when the connection has ended."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._link.run(self._receive), name="service link")
            running.add_done_callback(lambda _: self._end())
            try:
                yield running
            finally:
                running.cancel()

    def silence(self) -> float:
        """Return the seconds since the service's last message, or 0 below SILENT_SECONDS."""
        silent = 0.0 if self._last_arrival is None else time.monotonic() - self._last_arrival
        return silent if silent >= SILENT_SECONDS else 0.0

    async def run(self, node: LocalNode, pools: Followers) -> None:
        """Run attempts on the node until cancelled."""
        images: frozenset[str] | None = None
        looked = -IMAGES_SECONDS

        async def report() -> None:
            nonlocal images, looked
            if self._images is not None and time.monotonic() - looked > IMAGES_SECONDS:
                with suppress(OSError):  # a shared file system may fail: the last names stay valid
                    images = await asyncio.to_thread(self._images)
                looked = time.monotonic()
            self._report(node, pools, images)

        async with Chores(node.failures) as attempts:
            self._ready = node, pools, attempts
            self._last_arrival = time.monotonic()
            for message in self._early:
                self._receive(message)
            self._link.send(Ready(outlived=node.outlived()))
            try:
                await attempts.begin("report to the service", report, every=REPORT_SECONDS)
            finally:
                self._ending = True

    def _receive(self, message: ToNode) -> None:
        if self._ready is None:
            self._early.append(message)
        else:
            self._apply(*self._ready, message)

    def leave(self) -> None:
        """Take no new attempts. The service ends the connection when the present attempts have ended."""
        self._link.send(Leaving())

    def fail(self, error: OutriderError) -> None:
        """Send the service the error that keeps the node from starting."""
        self._link.send(Ready(error=error.record()))

    def leader(self, model: str | None) -> ModelLeader:
        return ModelLeader(self, model)

    def forwarded(self, model: str | None) -> Callable[[EngineState], ForwardedEngine]:
        return partial(ForwardedEngine, self, model)

    def send(self, message: msgspec.Struct) -> None:
        self._link.send(message)

    async def call(self, make: Callable[[int], Call]) -> CallReply:
        """Send a call, made by `make` from its number, and return the reply. Raises the service's error, and
        ServiceError if the service is gone."""
        if self._ended:
            raise ServiceError("the service is gone")
        number = next(self._numbers)
        answer: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        frame = framed(make(number), elsewhere=self._elsewhere)
        self._calls[number] = answer
        self._link.send_encoded(frame)
        try:
            found = await answer
        finally:
            del self._calls[number]
        if found.error is not None:
            raise error_from(found.error)
        return found

    async def generated(self, ask: Callable[[int], ForwardGeneration]) -> AsyncGenerator[Chunk | ChatChunk, None]:
        """Yield the chunks of a generation on an engine that only the service can reach. `ask` makes the request from
        its number."""
        if self._ended:
            raise ServiceError("the service is gone")
        number = next(self._numbers)
        parts: asyncio.Queue[Generated] = asyncio.Queue()
        frame = framed(ask(number), elsewhere=self._elsewhere)
        self._generations[number] = parts
        self._link.send_encoded(frame)
        finished = False
        try:
            while True:
                part = await parts.get()
                if part.error is not None:
                    finished = True
                    raise error_from(part.error)
                if (chunk := part.chunk or part.chat) is None:
                    finished = True
                    return
                yield chunk
        finally:
            del self._generations[number]
            if not finished:
                self._link.send(AbortForwarded(number))

    def _end(self) -> None:
        """Fail all calls and generations: the connection is gone."""
        self._ended = True
        gone = ServiceError("the service is gone")
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(gone)
        for number, parts in self._generations.items():
            parts.put_nowait(Generated(generation=number, error=gone.record()))

    def _apply(self, node: LocalNode, pools: Followers, attempts: Chores, message: ToNode) -> None:
        if silent := self.silence():
            node.note_stall(silent)
        self._last_arrival = time.monotonic()
        match message:
            case CallReply():
                if (call := self._calls.get(message.call)) is not None and not call.done():
                    call.set_result(message)
            case Generated():
                if (parts := self._generations.get(message.generation)) is not None:
                    parts.put_nowait(message)
            case RunAttempt() if self._ending:
                pass  # the end of the connection reports the loss
            case RunAttempt():
                task = attempts.create_task(
                    self._run(node, message), name=f"session {message.session.id}", chore="sessions"
                )
                self._attempts[message.attempt] = task
                # A callback notes the end, not the task itself, because a task that is cancelled at once runs none of
                # its code.
                task.add_done_callback(partial(self._note_end, message))
            case EndOutlived():
                node.end_outlived(message.session_id)
            case Cancel():
                if (running := self._attempts.get(message.attempt)) is not None:
                    running.cancel()
            case Pull():
                attempts.create_task(self._pull(node, message), name=f"image {message.name}", chore="pull images")
            case Follow():
                pools[message.model].follow(message.state)
            case Loads():
                pools[message.model].set_loads(message.loads)
            case NodeSetup() | Beat():
                pass

    async def _run(self, node: LocalNode, message: RunAttempt) -> SessionResult | None:
        try:
            # The task is validated in a thread, because the validation decodes the base64 of every file in the task.
            task = await asyncio.to_thread(TaskSpec.model_validate_json, message.task)
            attempt = Attempt(
                session=message.session,
                task=task,
                reserved=message.reserved,
                stored=message.stored,
                goes_on=message.goes_on,
            )
            return await node.run(attempt)
        except NodeLost as error:
            log.warning("session %s is lost: %s", message.session.id, error)
            return None
        except Exception as error:  # a bug, which must not end the other sessions
            log.exception("session %s cannot be run", message.session.id)
            return _failed(message.session, error)

    async def _pull(self, node: LocalNode, asked: Pull) -> None:
        try:
            self._link.send(Pulled(pull=asked.pull, image=await node.pull_image(asked.reference, asked.name)))
        except Exception as error:
            if not isinstance(error, OutriderError):
                log.exception("image %s cannot be had", asked.name)
            self._link.send(Pulled(pull=asked.pull, error=record_of(error)))

    def _note_end(self, run: RunAttempt, task: asyncio.Task[SessionResult | None]) -> None:
        del self._attempts[run.attempt]
        result = None if task.cancelled() else task.result()
        if self._ending_together is not None and result is not None and result.error is not None:
            # If the process ends meanwhile, no result is sent, and the service counts the attempt as lost.
            asyncio.get_running_loop().call_later(DOUBT_SECONDS, self._send_result, run, result)
        else:
            self._send_result(run, result)

    def _send_result(self, run: RunAttempt, result: SessionResult | None) -> None:
        if self._ending_together is not None and self._ending_together.is_set():
            result = None
        try:
            frame = framed(Ran(attempt=run.attempt, result=result), elsewhere=self._elsewhere)
        except ServiceError as error:
            log.exception("the result of session %s cannot be sent", run.session.id)
            frame = framed(Ran(attempt=run.attempt, result=_failed(run.session, error)))
        self._link.send_encoded(frame)

    def _report(self, node: LocalNode, pools: Followers, images: frozenset[str] | None) -> None:
        uses = tuple(ModelUses(model=model, engines=pool.uses()) for model, pool in pools.items())
        report = Report(stats=node.stats(), uses=uses, images=images)
        if report != self._reported:
            self._reported = report
            self._link.send(report)


def _failed(session: SessionRow, error: Exception) -> SessionResult:
    """Return the result of an attempt that would fail again."""
    record = msgspec.structs.replace(record_of(error), retryable=False)
    return session_result(session, StopReason.ERROR, [], task=None, error=record)


class RemoteStore:
    """The service's store, as a `sessions.attempt.AttemptStore`."""

    def __init__(self, service: ServiceProxy) -> None:
        self._service = service

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        await self._service.call(
            lambda number: SetState(call=number, session_id=session_id, attempt=attempt, state=state)
        )

    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None:
        await self._service.call(
            lambda number: AddTurn(call=number, session_id=session_id, attempt=attempt, turn=turn, model=model)
        )

    async def turns(self, session_id: str, attempt: int, *, images: bool = False) -> list[Turn]:
        answer = await self._service.call(
            lambda number: ReadTurns(call=number, session_id=session_id, attempt=attempt, images=images)
        )
        return list(answer.turns)

    async def frozen_turns(self, session_id: str, attempt: int) -> dict[str, list[Turn]]:
        answer = await self._service.call(
            lambda number: ReadTurns(call=number, session_id=session_id, attempt=attempt, frozen=True)
        )
        return {model: list(turns) for model, turns in answer.frozen.items()}


class RemoteArtifacts:
    """The service's artifact store, as a `store.artifacts.KeepsArtifacts`."""

    def __init__(self, service: ServiceProxy) -> None:
        self._service = service

    async def keep(self, session_id: str, attempt: int, data: bytes) -> str:
        answer = await self._service.call(
            lambda number: KeepArtifact(call=number, session_id=session_id, attempt=attempt, data=data)
        )
        return answer.digest

    async def keep_index(self, listed: ArtifactList) -> None:
        assert listed.attempt is not None
        session_id, attempt = listed.session_id, listed.attempt
        await self._service.call(
            lambda number: KeepIndex(call=number, session_id=session_id, attempt=attempt, listed=listed)
        )

    async def carried(self, session_id: str, attempt: int) -> bytes:
        answer = await self._service.call(
            lambda number: ReadCarried(call=number, session_id=session_id, attempt=attempt)
        )
        return answer.data


class SharedResources(NodeResources):
    """The machine's resources, which the service gives out to all nodes on the machine."""

    def __init__(self, service: ServiceProxy, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._service = service

    async def take(self, amount: ResourceAmount, priority: int = 0, tenant: str = "") -> ResourceShare:
        if not any(amount.quantities):
            return await super().take(amount, priority, tenant)
        asked: list[int] = []

        def ask(number: int) -> Take:
            asked.append(number)
            return Take(call=number, amount=amount, priority=priority, tenant=tenant)

        def give_back() -> None:
            self._service.send(GiveBack(asked[0]))

        try:
            answer = await self._service.call(ask)
        except asyncio.CancelledError:
            give_back()
            raise
        return ResourceShare(give_back, answer.gpus)

    def try_take(self, amount: ResourceAmount, tenant: str = "") -> ResourceShare | None:
        """Return None for every amount except zero, because an optional use must not wait for the service."""
        return None if any(amount.quantities) else super().try_take(amount, tenant)


class ModelLeader:
    """The `engines.pool.follower.Leader` of one model's pool."""

    def __init__(self, service: ServiceProxy, model: str | None) -> None:
        self._service = service
        self._model = model

    def settled(self, report: GateReport) -> None:
        self._service.send(Gate(model=self._model, report=report))

    def engine_failed(self, engine: str) -> None:
        self._service.send(CheckEngine(model=self._model, engine=engine))


class ForwardedEngine:
    """The proxy for an engine that only the service can reach: an `Engine` and `ChatEngine`. Only the service pauses
    the engine."""

    def __init__(self, service: ServiceProxy, model: str | None, state: EngineState) -> None:
        self.name = state.name
        self.mode = state.mode
        self.logprob_kind = state.logprob_kind
        self.constraints = state.constraints
        self.awaits_workers = state.awaits_workers
        self._service = service
        self._model = model
        self._health = state.health

    def apply_state(self, state: EngineState) -> None:
        """Update the engine's state from the service: workers of a relay may have connected since."""
        self.logprob_kind, self.constraints, self._health = state.logprob_kind, state.constraints, state.health

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def health(self) -> EngineHealth:
        """Return the health last sent by the service, with `ok` set: the pool gets the engine's availability from the
        service, too."""
        return msgspec.structs.replace(self._health, ok=True)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        return self._service.generated(
            lambda number: ForwardGeneration(
                generation=number,
                model=self._model,
                engine=self.name,
                request_id=request.request_id,
                session_key=request.session_key,
                input_ids=np.asarray(request.input_ids, dtype=np.int32).tobytes(),
                sampling=request.sampling,
            )
        )

    def chat(self, request: ChatRequest) -> AsyncGenerator[Any, None]:
        return self._service.generated(
            lambda number: ForwardGeneration(generation=number, model=self._model, engine=self.name, chat=request)
        )
