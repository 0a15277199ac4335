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

from outrider.errors import ErrorRecord, OutriderError, record_of
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.factory import make_harness
from outrider.lifecycle import SessionState, StopReason
from outrider.plugins import resolve
from outrider.runtimes.base import Runtime, SandboxContext
from outrider.runtimes.host import Host
from outrider.sessions.calls import Endpoint
from outrider.sessions.conversation import Conversation
from outrider.sessions.folder import NodeFolder, remove_tree
from outrider.sessions.lanes import Lanes
from outrider.sessions.session import Ending, Parts, SessionRun
from outrider.sessions.shield import run_to_end
from outrider.spec import TaskSpec
from outrider.store.base import Store
from outrider.tokens.samples import count, policy_of
from outrider.trajectory import SessionResult, Turn
from outrider.wire import NodeStats

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
    """The node in this process. Enter it before use; leaving it waits for every teardown."""

    def __init__(self, name: str, *, endpoint: Endpoint, store: Store, lanes: Lanes, files: Path) -> None:
        self.name = name
        self.gateway_url = ""
        self._endpoint = endpoint
        self._store = store
        self._lanes = lanes
        self._files = files
        self._held = AsyncExitStack()
        self._teardowns = asyncio.TaskGroup()
        self._conversations: dict[str, Conversation] = {}
        self._sessions = 0

    async def __aenter__(self) -> Self:
        self._folder = await asyncio.to_thread(NodeFolder.make)
        self._held.push_async_callback(asyncio.to_thread, self._folder.remove)
        self._host = await self._held.enter_async_context(Host(self._folder.path))
        await self._held.enter_async_context(self._teardowns)
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
            name=self.name, sessions=self._sessions, capacity=self._lanes.capacity, lanes=self._lanes.stats()
        )

    async def run(self, assignment: Assignment) -> SessionResult:
        key = secrets.token_urlsafe(24)
        directory = self._folder.path / f"{assignment.session_id}-{assignment.attempt}"
        self._sessions += 1
        try:
            directory.mkdir(mode=0o700)
            parts = self._parts(assignment, key, directory)
            self._conversations[key] = parts.conversation
            ending = await SessionRun(parts).run()
            return self._result(assignment, parts.conversation, ending, await self._turns(assignment))
        except Exception as error:  # of a plugin that cannot be made any more, or a record that cannot be read
            if not isinstance(error, OutriderError):
                log.exception("session %s failed in a way it never should", assignment.session_id)
            return _failed(assignment, record_of(error))
        finally:
            self._sessions -= 1
            self._conversations.pop(key, None)
            await run_to_end(self._teardowns, _remove(directory), name=f"remove {directory.name}")

    def _parts(self, assignment: Assignment, key: str, directory: Path) -> Parts:
        task = assignment.task

        async def record(turn: Turn) -> None:
            work = self._store.add_turn(assignment.session_id, assignment.attempt, turn)
            # To its end, also when the agent is cut off: a turn that is stored late would be missing from the result.
            await run_to_end(self._teardowns, work, name="store a turn")

        async def enter(state: SessionState) -> None:
            await self._store.set_state(assignment.session_id, assignment.attempt, state)

        harness = make_harness(task.harness)
        runtime_class: type[Runtime] = resolve("runtime", task.runtime.kind)
        context = SandboxContext(
            session_id=assignment.session_id,
            attempt=assignment.attempt,
            directory=directory,
            host=self._host,
            gateway_url=self.gateway_url,
            gateway_socket=self.gateway_socket,
            mounts=harness.mounts(),
        )
        conversation = Conversation(
            self._endpoint,
            session_key=f"{assignment.session_id}-{assignment.attempt}",
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
            files=self._files,
            conversation=conversation,
            runtime=runtime_class.create(task.runtime, context),
            harness=harness,
            evaluator=make_evaluator(task.evaluator),
            lanes=self._lanes,
            enter=enter,
            turns=partial(self._turns, assignment, images=True),
            teardown=self._stop,
        )

    async def _stop(self, runtime: Runtime) -> None:
        await run_to_end(self._teardowns, runtime.stop(), name="stop sandbox")

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
            turns=len(turns),
            forks=counts.forks | {cause.value: number for cause, number in conversation.tree.forks.items()},
            tokens=counts.tokens,
            seconds=ending.seconds,
            samples=counts.samples,
            policy=policy,
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


async def _remove(directory: Path) -> None:
    await asyncio.to_thread(remove_tree, directory)
