"""The node's side of its connection to the service. Receives attempts, sends results, and gives the node access to the
service's store, the machine's resources, and engines that only the service can reach.

Invariant: when the connection ends, all attempts end, and nothing more is stored for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from outrider.concurrency.chores import Chores
from outrider.engines.base import ChatChunk, ChatRequest, Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.engines.gates import GateReport
from outrider.engines.pool.follower import PoolFollower
from outrider.engines.pool.placement import EngineState
from outrider.errors import EngineError, OutriderError
from outrider.lifecycle import SessionState
from outrider.nodes import messages
from outrider.nodes.calls import Handler, LinkCalls
from outrider.nodes.remote_node import WAITS
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import ArtifactList
from outrider.sessions.attempt import Attempt
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import Capacity, NodeResources, ResourceAmount, ResourceShare
from outrider.spec import TaskSpec
from outrider.timeline import TimelinePart
from outrider.trajectory import SessionResult, Turn
from outrider.wire.link import Disconnected, Link, Socket
from outrider.wire.link_protocol import Beat

log = logging.getLogger("outrider.node")

SILENT_SECONDS = 0.5
"""A service that sends nothing for this many seconds has stalled. A running service sends five messages about loads in
this time."""

REPORT_SECONDS = 0.1
"""Seconds between two reports to the service. A report without changes is not sent."""

IMAGES_SECONDS = 5.0
"""Seconds between two scans for new images on this machine."""

HOLD_BACK_SECONDS = 0.5
"""If `ServiceProxy` has an `ending`, the result of a failed attempt is held back for this many seconds. A signal that
ends this process and its sandboxes together may have reached the sandbox first, and so have made the attempt fail. If
the signal reaches this process within this time, the result is dropped."""

FOR_EVER = 1e9
"""The link's limit for silence, in seconds: practically none, because a silent service may only have stalled. The
service counts as gone only when the connection ends."""


Followers = Mapping[str | None, PoolFollower]
"""The engine pools of a node, by model. The key of the policy is None."""


class ServiceProxy:
    """Represents the service in the process of a node. `service.run(...)` runs the attempts that the service sends.

    The node can use `store`, `artifacts`, `resources`, `leader` and `forwarded` while it is connected. `images` is
    given if the service is on another machine, and returns the names of this machine's images. `ending` is set when a
    signal ends this process and its sandboxes together. Once `ending` is set, results may be wrong. So they are not
    sent, and their attempts count as lost.
    """

    def __init__(
        self,
        socket: Socket,
        capacity: Capacity,
        *,
        images: Callable[[], frozenset[str]] | None = None,
        ending: asyncio.Event | None = None,
    ) -> None:
        self._link: Link[messages.ToNode] = Link(socket, messages.TO_NODE, heartbeat=WAITS.heartbeat, silence=FOR_EVER)
        self._images = images
        self._elsewhere = images is not None
        self._ending_together = ending
        handlers: dict[type[messages.NodeCall[Any]], Handler] = {
            messages.RunAttempt: self._run_attempt,
            messages.PullImage: self._pull_image,
        }
        self.calls = LinkCalls(self._link, handlers, peer="the service", spawn=self._spawn, elsewhere=self._elsewhere)
        self.store = RemoteStore(self.calls)
        self.artifacts = RemoteArtifacts(self.calls)
        self.resources = SharedResources(self.calls, capacity)
        self._early: list[messages.ToNode] = []
        """Messages received before the node was ready."""
        self._ready: tuple[LocalNode, Followers, Chores] | None = None
        """The parts of the node that handle messages; None before the node is ready."""
        self._reported: messages.Report | None = None
        self._image_names: frozenset[str] | None = None
        """The names that the last call of `images` returned."""
        self._leaving = False
        self._last_arrival: float | None = None
        """The time of the service's last message; None before the node is ready."""
        self._ending = False
        """True once this node ignores new attempts, because it is ending."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[asyncio.Task[Disconnected]]:
        """Send and receive while the block runs. Yields a task that is done when the connection has ended."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._link.run(self._receive), name="service link")
            running.add_done_callback(lambda _: self.calls.end())
            try:
                yield running
            finally:
                running.cancel()

    def silence(self) -> float:
        """Return the seconds since the service's last message, or 0 if they are fewer than SILENT_SECONDS."""
        silent = 0.0 if self._last_arrival is None else time.monotonic() - self._last_arrival
        return silent if silent >= SILENT_SECONDS else 0.0

    async def run(self, node: LocalNode, pools: Followers) -> None:
        """Run the service's attempts on the node until cancelled."""
        looked = -IMAGES_SECONDS

        async def send_report() -> None:
            nonlocal looked
            if self._images is not None and time.monotonic() - looked > IMAGES_SECONDS:
                with suppress(OSError):  # if a shared file system fails, keep the names found before
                    self._image_names = await asyncio.to_thread(self._images)
                looked = time.monotonic()
            self._send_report(node, pools)

        async with Chores(node.failures) as attempts:
            self._ready = node, pools, attempts
            self._last_arrival = time.monotonic()
            for message in self._early:
                self._receive(message)
            self._link.send(messages.Ready())
            try:
                await attempts.begin("report to the service", send_report, every=REPORT_SECONDS)
            finally:
                self._ending = True

    def _send_report(self, node: LocalNode, pools: Followers) -> None:
        uses = tuple(messages.ModelUses(model=model, engines=pool.uses()) for model, pool in pools.items())
        report = messages.Report(stats=node.stats(), uses=uses, images=self._image_names, counts=node.counts())
        if report != self._reported:
            self._reported = report
            self._link.send(report)

    def leave(self) -> None:
        """Take no new attempts. When the running attempts have ended, the service closes the connection."""
        self._leaving = True
        self._link.send(messages.Leaving())

    def fail(self, error: OutriderError) -> None:
        """Tell the service why the node cannot start."""
        self._link.send(messages.Ready(error=error.record()))

    def leader(self, model: str | None) -> ModelLeader:
        return ModelLeader(self.calls, model)

    def forwarded(self, model: str | None) -> Callable[[EngineState], ForwardedEngine]:
        return partial(ForwardedEngine, self.calls, model)

    def _receive(self, message: messages.ToNode) -> None:
        if self._ready is None:
            self._early.append(message)
            return
        node, pools, _ = self._ready
        if silent := self.silence():
            node.note_stall(silent)
        self._last_arrival = time.monotonic()
        match message:
            case messages.CallRequest() | messages.CallReply() | messages.CancelCall():
                self.calls.receive(message)
            case messages.Follow():
                pools[message.model].follow(message.state)
            case messages.Loads():
                pools[message.model].set_loads(message.loads)
            case messages.NodeSetup() | Beat():
                pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._ready is not None
        return self._ready[2].create_task(work, name="call of the service", chore="calls of the service")

    async def _run_attempt(self, call: messages.RunAttempt) -> AsyncGenerator[SessionResult, None]:
        assert self._ready is not None
        if self._ending:
            await asyncio.Event().wait()  # no result is sent, so the attempt counts as lost when the connection ends
        # The task is validated in a thread, because the validation decodes the base64 of every file in the task.
        task = await asyncio.to_thread(TaskSpec.model_validate_json, call.task)
        attempt = Attempt(session=call.session, task=task, reserved=call.reserved, stored=call.stored)
        result = await self._ready[0].run(attempt)
        if self._ending_together is not None:
            if result.error is not None:
                await asyncio.sleep(HOLD_BACK_SECONDS)
            if self._ending_together.is_set():
                return
        # Send the report first, because the service closes the connection of a leaving node after its last result.
        if self._leaving:
            self._send_report(*self._ready[:2])
        yield result

    async def _pull_image(self, call: messages.PullImage) -> RootImage:
        assert self._ready is not None
        return await self._ready[0].pull_image(call.reference, call.name)


class RemoteStore:
    """Gives a node access to the service's store; implements `sessions.attempt.AttemptStore`."""

    def __init__(self, calls: LinkCalls) -> None:
        self._calls = calls

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        await self._calls.call(messages.SetState(session_id, attempt, state))

    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None:
        await self._calls.call(messages.AddTurn(session_id, attempt, turn, model))

    async def add_timeline(self, parts: Sequence[TimelinePart]) -> None:
        await self._calls.call(messages.AddTimeline(list(parts)))

    async def turns(self, session_id: str, attempt: int, *, images: bool = False) -> list[Turn]:
        return await self._calls.call(messages.ReadTurns(session_id, attempt, images))

    async def frozen_turns(self, session_id: str, attempt: int) -> dict[str, list[Turn]]:
        return await self._calls.call(messages.ReadFrozenTurns(session_id, attempt))


class RemoteArtifacts:
    """Gives a node access to the service's artifact store; implements `store.artifacts.KeepsArtifacts`."""

    def __init__(self, calls: LinkCalls) -> None:
        self._calls = calls

    async def keep(self, session_id: str, attempt: int, data: bytes) -> str:
        return await self._calls.call(messages.KeepArtifact(session_id, attempt, data))

    async def keep_index(self, listed: ArtifactList) -> None:
        assert listed.attempt is not None
        await self._calls.call(messages.KeepIndex(listed.session_id, listed.attempt, listed))

    async def kept_for_graders(self, session_id: str, attempt: int) -> bytes:
        return await self._calls.call(messages.ReadCarried(session_id, attempt))


class SharedResources(NodeResources):
    """The resources of this machine. The service divides them among all nodes of the machine."""

    def __init__(self, calls: LinkCalls, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._calls = calls

    async def take(self, amount: ResourceAmount, priority: int = 0, tenant: str = "") -> ResourceShare:
        if not any(amount.quantities):
            return await super().take(amount, priority, tenant)
        held = self._calls.begin(messages.Take(amount, priority, tenant))

        def give_back() -> None:
            held.cancel()
            held.forget()

        try:
            return ResourceShare(give_back, await held.next())
        except BaseException:  # also after a cancellation
            give_back()
            raise

    def try_take(self, amount: ResourceAmount, tenant: str = "") -> ResourceShare | None:
        """Return None for every amount except zero. Only the service can set resources aside, and this function must
        not wait for the service's reply."""
        return None if any(amount.quantities) else super().try_take(amount, tenant)


class ModelLeader:
    """Sends the reports of one model's engine pool to the service; implements `engines.pool.follower.Leader`."""

    def __init__(self, calls: LinkCalls, model: str | None) -> None:
        self._calls = calls
        self._model = model

    def settled(self, report: GateReport) -> None:
        self._calls.send(messages.Gate(model=self._model, report=report))

    def engine_failed(self, engine: str) -> None:
        self._calls.send(messages.CheckEngine(model=self._model, engine=engine))


class ForwardedEngine:
    """Gives a node access to an engine that only the service can reach; implements `Engine` and `ChatEngine`. `pause`
    and `resume` do nothing, because only the service pauses the engine."""

    def __init__(self, calls: LinkCalls, model: str | None, state: EngineState) -> None:
        self.name = state.name
        self.mode = state.mode
        self.logprob_kind = state.logprob_kind
        self.constraints = state.constraints
        self.capabilities = state.capabilities
        self.awaits_workers = state.awaits_workers
        self._calls = calls
        self._model = model
        self._health = state.health

    def apply_state(self, state: EngineState) -> None:
        """Use a newer state of the engine. The service sends one, for example, when a worker of a relay connects."""
        self.logprob_kind, self.constraints, self._health = state.logprob_kind, state.constraints, state.health
        self.capabilities = state.capabilities

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def health(self) -> EngineHealth:
        """Return the health that the service sent last. `ok` is always True, because the pool's state tells whether the
        engine is available."""
        return msgspec.structs.replace(self._health, ok=True)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Forward a request. Raises EngineError for a prompt with images, because the pixel values of images are too
        long for a message, and without them the model would not see the images."""
        if request.images:
            raise EngineError(
                f"engine {self.name!r} is reached through the service, which forwards no images",
                hint="give the engine an address that nodes on other machines can reach",
            )
        ids = np.asarray(request.input_ids, dtype=np.int32).tobytes()
        return self._calls.stream(
            messages.GenerateTokens(
                self._model, self.name, request.request_id, request.session_key, ids, request.sampling
            )
        )

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        return self._calls.stream(messages.GenerateChat(self._model, self.name, request))
