"""A service whose sessions only take time, for the sampler's tests and benchmark: no sandbox, no model, no HTTP.

The service has the methods of `client.AsyncClient` that a sampler calls, with the same meaning, and a number of slots
in which sessions run in the order of submission. All times come from the event loop's clock, so hours of rollouts pass
in a moment on a loop that does not wait (`VirtualLoop`). Invariant: a slot is free or runs one session.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from outrider.concurrency.events import Broadcast, wait_for_event
from outrider.errors import Boundary, Conflict, ErrorRecord, NotFound
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import GroupView, ResultsPage, ServiceStatus, SessionView
from outrider.trajectory import BranchKind, JsonSample, LogprobKind, Sample, SessionResult, TokenMode, Verdict

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when no callback is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop that never waits."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self._loop.jump(timeout)
        return ready


class Played(msgspec.Struct, frozen=True):
    """The outcome of a session: it runs for `seconds` and gets `reward`, or fails if `reward` is None."""

    seconds: float
    reward: float | None


class SimulatedService:
    """A service whose sessions are played: `play(task, sample_index, version)` returns the outcome of a session that
    starts under the policy version `version`.

    The attribute `version` is the current policy version, which the test sets. `busy` is the sum, over all slots, of
    the seconds for which the slot ran a session.
    """

    def __init__(self, play: Callable[[Mapping[str, Any], int, int], Played], *, slots: int) -> None:
        self.version = 0
        self.busy = 0.0
        self.submitted: list[Mapping[str, Any]] = []
        self._play = play
        self._free = slots
        self._queue: deque[_Session] = deque()
        self._groups: dict[str, _Group] = {}
        self._by_key: dict[str, _Group] = {}
        self._done: list[_Group] = []
        self._changed = Broadcast()

    async def submit(self, group: Mapping[str, Any]) -> GroupView:
        key = group["idempotency_key"]
        known = self._by_key.get(key)
        if known is not None:
            if known.body != group:
                raise Conflict(f"there is another group with the key {key!r}", field="idempotency_key")
            return known.view()
        self.submitted.append(group)
        made = _Group(f"g-{len(self._groups)}", group)
        self._groups[made.id] = self._by_key[key] = made
        self._queue.extend(made.sessions)
        self._fill_slots()
        return made.view()

    async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
        return self._find(group_id).view(samples=samples)

    async def cancel(self, group_id: str) -> GroupView:
        group = self._find(group_id)
        if group.cursor is None:
            group.cancelled = True
            for session in group.sessions:
                if session.result is None:
                    if session in self._queue:
                        self._queue.remove(session)
                    self._end(session, StopReason.CANCELLED)
        return group.view()

    async def results(
        self, *, after: int = 0, wait: float = 0.0, limit: int = 100, samples: bool = False
    ) -> ResultsPage:
        deadline = _now() + wait
        while len(self._done) <= after and (left := deadline - _now()) > 0:
            await wait_for_event(self._changed.next(), left)
        page = self._done[after : after + limit]
        return ResultsPage(groups=tuple(group.view(samples=samples) for group in page), cursor=after + len(page))

    async def status(self) -> ServiceStatus:
        return ServiceStatus(
            version="simulated", model="simulated", sessions={}, cursor=len(self._done), nodes=(), engines=()
        )

    def _find(self, group_id: str) -> _Group:
        if (group := self._groups.get(group_id)) is None:
            raise NotFound(f"no group {group_id!r}")
        return group

    def _fill_slots(self) -> None:
        while self._free and self._queue:
            session = self._queue.popleft()
            self._free -= 1
            session.version = self.version
            session.began = _now()
            played = self._play(session.group.body["task"], session.index, self.version)
            session.timer = asyncio.get_running_loop().call_later(
                played.seconds, self._end, session, StopReason.COMPLETED, played.reward
            )

    def _end(self, session: _Session, reason: StopReason, reward: float | None = None) -> None:
        if session.timer is not None:
            session.timer.cancel()
            self.busy += _now() - session.began
            self._free += 1
        error = None
        if reason is StopReason.COMPLETED and reward is None:
            reason = StopReason.ERROR
            error = ErrorRecord(boundary=Boundary.ENGINE, code="engine_unavailable", message="simulated failure")
        session.result = SessionResult(
            session_id=session.id,
            group_id=session.group.id,
            sample_index=session.index,
            attempt=1,
            stop_reason=reason,
            verdict=None if reward is None else Verdict(reward=reward),
            error=error,
        )
        if all(each.result is not None for each in session.group.sessions):
            self._done.append(session.group)
            session.group.cursor = len(self._done)
            self._changed.send()
        self._fill_slots()


class _Group:
    def __init__(self, id: str, body: Mapping[str, Any]) -> None:
        self.id = id
        self.body = body
        self.cancelled = False
        self.cursor: int | None = None
        self.sessions = [_Session(self, index) for index in range(body["n"])]

    def view(self, *, samples: bool = False) -> GroupView:
        return GroupView(
            id=self.id,
            state=GroupState.ACTIVE if self.cursor is None else GroupState.DONE,
            cancelled=self.cancelled,
            n=len(self.sessions),
            priority=self.body["priority"],
            created=0.0,
            finished=None,
            cursor=self.cursor,
            labels={},
            sessions=tuple(session.view() for session in self.sessions),
            samples=tuple(session.sample() for session in self.sessions if session.graded) if samples else None,
        )


class _Session:
    def __init__(self, group: _Group, index: int) -> None:
        self.id = f"{group.id}-{index}"
        self.group = group
        self.index = index
        self.version = 0
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.result: SessionResult | None = None

    @property
    def graded(self) -> bool:
        return self.result is not None and self.result.verdict is not None

    def view(self) -> SessionView:
        return SessionView(
            id=self.id,
            group_id=self.group.id,
            sample_index=self.index,
            state=SessionState.DONE if self.result else SessionState.RUNNING if self.timer else SessionState.QUEUED,
            attempt=1,
            node=None,
            created=0.0,
            updated=0.0,
            last_error=None,
            result=self.result,
        )

    def sample(self) -> Sample:
        """A training row with one sampled token."""
        assert self.result is not None
        assert self.result.verdict is not None
        return JsonSample(
            group_id=self.group.id,
            session_id=self.id,
            attempt=1,
            sample_index=self.index,
            row=0,
            rows=1,
            kind=BranchKind.MAIN,
            turns=(0,),
            ids=[1, 2],
            loss_mask=[0, 1],
            logprobs=[0.0, -0.5],
            versions=[-1, self.version],
            prompt_length=1,
            reward=self.result.verdict.reward,
            mode=TokenMode.TOKENS,
            logprob_kind=LogprobKind.RAW,
            stop_reason=self.result.stop_reason,
            min_version=self.version,
            max_version=self.version,
        ).sample()


def _now() -> float:
    return asyncio.get_running_loop().time()
