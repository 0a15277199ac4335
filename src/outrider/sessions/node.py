"""A node: the process that hosts sessions, with their sandboxes, their model endpoints and their lanes.

It knows no queue and no group; it is handed assignments and returns results. A node elsewhere is only another
implementation of `Node`. Invariant: a session's credential works from the start of its attempt to the end of
its run, and never again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from outrider.concurrency.cancellation import opened
from outrider.concurrency.watchdog import Watchdog
from outrider.errors import ErrorRecord, OutriderError, record_of
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import Harness
from outrider.harnesses.factory import make_harness
from outrider.lifecycle import SessionState, StopReason
from outrider.plugins import contained
from outrider.runtimes.node_host import Host
from outrider.sandboxes.node_folder import NodeFolder
from outrider.sandboxes.sandbox import Sandbox, Sandboxes
from outrider.sandboxes.sweeps import keep_sweeping, try_to_sweep
from outrider.sandboxes.warm_pool import Warm, WarmLimits
from outrider.schemas import NodeStats
from outrider.sessions.artifacts import Collector
from outrider.sessions.calls.on_token_engine import Endpoint
from outrider.sessions.conversation import Conversation
from outrider.sessions.grading import Bench, Grading
from outrider.sessions.resources import asked
from outrider.sessions.rollout import Ending, Parts, SessionRun
from outrider.sessions.slots import Lanes
from outrider.spec import TaskSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.base import Store
from outrider.tokens.samples import count, policy_of
from outrider.trajectory import SessionResult, Turn

log = logging.getLogger("outrider.session")


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one session, to be run."""

    session_id: str
    group_id: str
    sample_index: int
    attempt: int
    priority: int
    task: TaskSpec


class Node(Protocol):
    """Where sessions run. `run` returns how the attempt ended; only its cancellation is an exception."""

    name: str

    def stats(self) -> NodeStats: ...
    async def run(self, assignment: Assignment) -> SessionResult: ...


class LocalNode:
    """The node in this process. Enter it before use; leaving it ends what it does in the background."""

    def __init__(
        self,
        name: str,
        *,
        endpoint: Endpoint,
        store: Store,
        artifacts: ArtifactStore,
        lanes: Lanes,
        files: Path,
        warm: WarmLimits | None = None,
    ) -> None:
        self.name = name
        self.gateway_url = ""
        self._endpoint = endpoint
        self._store = store
        self._collector = Collector(artifacts)
        self._lanes = lanes
        self._files = files
        self._warm_limits = warm or WarmLimits()
        self._watchdog = Watchdog()
        self._held = AsyncExitStack()
        self._background = asyncio.TaskGroup()
        """Sweeps, sandboxes that are made ahead of sessions, and those for grading while they start."""
        self._conversations: dict[str, Conversation] = {}
        self._sessions = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as held:
            self._folder = await held.enter_async_context(opened(NodeFolder.make, NodeFolder.remove))
            host = await held.enter_async_context(Host(self._folder.path))
            await try_to_sweep(host)
            await held.enter_async_context(self._background)
            await held.enter_async_context(self._watchdog)
            held.callback(self._background.create_task(keep_sweeping(host), name="sweeps").cancel)
            self._sandboxes = Sandboxes(
                host=host,
                owner=self._background,
                files=self._files,
                gateway_url=lambda: self.gateway_url,
                gateway_socket=self.gateway_socket,
            )
            self._warm = await held.enter_async_context(Warm(self._sandboxes, self._warm_limits))
            self._held = held.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def gateway_socket(self) -> Path:
        """The Unix socket on which the model gateway must listen; sandboxes without network use it."""
        return self._folder.path / "gateway.sock"

    def conversation(self, key: str) -> Conversation | None:
        """The conversation a credential belongs to, while its run lasts."""
        return self._conversations.get(key)

    def stats(self) -> NodeStats:
        return NodeStats(
            name=self.name,
            sessions=self._sessions,
            capacity=self._lanes.capacity,
            lanes=self._lanes.stats(),
            room=self._lanes.room.stats(),
            warm=self._warm.stats(),
            stalls=self._watchdog.stalls,
        )

    async def run(self, assignment: Assignment) -> SessionResult:
        key = secrets.token_urlsafe(24)
        self._sessions += 1
        try:
            with contained():
                harness = make_harness(assignment.task.harness)
            mounts = await asyncio.to_thread(harness.mounts)  # what is shown may have to be made first
            parts = self._parts(assignment, key, harness, mounts)
            self._conversations[key] = parts.conversation
            ending = await SessionRun(parts).run()
            turns = await self._turns(assignment)
            work = partial(self._result, assignment, parts.conversation, ending, turns)
            return await self._endpoint.offload.run(work)
        except Exception as error:  # of a plugin that cannot be made any more, or a record that cannot be read
            if not isinstance(error, OutriderError):
                log.exception("session %s failed in a way it never should", assignment.session_id)
            return _failed(assignment, record_of(error))
        finally:
            self._sessions -= 1
            self._conversations.pop(key, None)

    def _parts(self, assignment: Assignment, key: str, harness: Harness, mounts: tuple[Path, ...]) -> Parts:
        task = assignment.task

        async def record(turn: Turn) -> None:
            await self._store.add_turn(assignment.session_id, assignment.attempt, turn)

        async def enter(state: SessionState) -> None:
            await self._store.set_state(assignment.session_id, assignment.attempt, state)

        async def sandbox() -> Sandbox:
            if (ready := await self._warm.take(task.runtime, mounts)) is not None:
                return ready
            return self._sandboxes.make(task.runtime, assignment.session_id, assignment.attempt, mounts=mounts)

        conversation = Conversation(
            self._endpoint,
            session_key=f"{assignment.session_id}-{assignment.attempt}",
            sample_index=assignment.sample_index,
            limits=task.limits,
            sampling=task.sampling,
            history=task.history,
            record=record,
        )
        return Parts(
            task=task,
            priority=assignment.priority,
            key=key,
            model=self._endpoint.model,
            conversation=conversation,
            sandbox=sandbox,
            harness=harness,
            grading=Grading(task, make_evaluator(task.evaluator), self._bench(assignment, mounts)),
            lanes=self._lanes,
            watchdog=self._watchdog,
            enter=enter,
            turns=partial(self._turns, assignment, images=True),
            collect=partial(
                self._collector.collect, task=task, session_id=assignment.session_id, attempt=assignment.attempt
            ),
        )

    def _bench(self, assignment: Assignment, mounts: tuple[Path, ...]) -> Bench:
        def sandbox(number: int, layer: Path | None) -> Sandbox:
            name = f"{assignment.session_id}-g{number}"
            return self._sandboxes.make(assignment.task.runtime, name, assignment.attempt, mounts=mounts, layer=layer)

        return Bench(
            sandbox=sandbox,
            second=lambda: self._lanes.room.take_now(asked(assignment.task.runtime.resources)),
            starts=self._lanes.grading,
            priority=assignment.priority,
            folder=self._folder.path / f"{assignment.session_id}-{assignment.attempt}-graded",
            owner=self._background,
        )

    async def _turns(self, assignment: Assignment, *, images: bool = False) -> list[Turn]:
        return await self._store.turns(assignment.session_id, assignment.attempt, images=images)

    def _result(
        self, assignment: Assignment, conversation: Conversation, ending: Ending, turns: list[Turn]
    ) -> SessionResult:
        policy = policy_of(assignment.task.branches)
        counts = count(turns, policy)
        return SessionResult(
            session_id=assignment.session_id,
            group_id=assignment.group_id,
            sample_index=assignment.sample_index,
            attempt=assignment.attempt,
            stop_reason=ending.reason,
            verdict=ending.verdict,
            error=ending.error,
            harness_exit=ending.harness_exit,
            turns=len(turns),
            forks=counts.forks | {cause.value: number for cause, number in conversation.tree.forks.items()},
            tokens=counts.tokens,
            seconds=ending.seconds,
            samples=counts.samples,
            policy=policy,
            ignored=counts.ignored,
            labels=assignment.task.labels,
        )


def _failed(assignment: Assignment, error: ErrorRecord) -> SessionResult:
    return SessionResult(
        session_id=assignment.session_id,
        group_id=assignment.group_id,
        sample_index=assignment.sample_index,
        attempt=assignment.attempt,
        stop_reason=StopReason.ERROR,
        error=error,
        labels=assignment.task.labels,
    )
