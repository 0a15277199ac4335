"""The store is compared with a simple model in memory, over random sequences of legal and illegal calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.errors import Conflict
from outrider.lifecycle import MOVES, GroupState, SessionState, StopReason
from outrider.store.database import Database
from outrider.store.postgresql import PostgresqlDatabase
from outrider.store.rows import EventKind
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from support.postgresql import PostgresqlServer

from .world import FAILURE, group_row, result, start, submit, turn

T = TypeVar("T")

NODES = ("n0", "n1")
WITH_A_METHOD = (SessionState.QUEUED, SessionState.INITIALIZING, SessionState.DONE)


@dataclass
class ModelSession:
    id: str
    group: ModelGroup
    state: SessionState = SessionState.QUEUED
    attempt: int = 0
    node: str | None = None
    lease: float | None = None
    ending: StopReason | None = None
    turns: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class ModelGroup:
    id: str
    priority: int
    key: str | None
    spec: bytes
    min_usable: int | None
    cancelled: bool = False
    usable: int = 0
    sessions: list[ModelSession] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return not self.open

    @property
    def open(self) -> list[ModelSession]:
        return [session for session in self.sessions if session.state is not SessionState.DONE]

    def end_others(self, reason: StopReason) -> bool:
        """Set `ending` to `reason` for all open sessions that have no ending. Returns True if there are any."""
        others = [session for session in self.open if session.ending is None]
        for session in others:
            session.ending = reason
        return bool(others)


class StoreMachine(RuleBasedStateMachine):
    """Each rule makes one call to the store and to the model. The store must refuse the calls that the model does not
    allow."""

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.store = Store(self.database())
        self.groups: list[ModelGroup] = []
        self.done: list[ModelGroup] = []
        self.counted: dict[EventKind, int] = dict.fromkeys(EventKind, 0)
        self.run(self.store.__aenter__())

    def database(self) -> Database:
        return SqliteDatabase(None)

    def teardown(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def expect(self, allowed: bool, call: Coroutine[Any, Any, T]) -> T | None:
        """Make the call and return its value. If the call is not allowed, check that it raises Conflict."""
        if allowed:
            return self.run(call)
        with pytest.raises(Conflict):
            self.run(call)
        return None

    @property
    def sessions(self) -> list[ModelSession]:
        return [session for group in self.groups for session in group.sessions]

    def pick(self, number: int) -> ModelSession:
        return self.sessions[number % len(self.sessions)]

    @rule(
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        key=st.sampled_from([None, "k1", "k2"]),
        spec=st.sampled_from([b"a", b"b"]),
        min_usable=st.sampled_from([None, 1, 2]),
    )
    def submit(self, n: int, priority: int, key: str | None, spec: bytes, min_usable: int | None) -> None:
        id = f"g{len(self.groups):03}"
        created = float(len(self.groups))
        row = group_row(id, n, priority=priority, key=key, created=created, min_usable=min_usable)
        known = next((group for group in self.groups if key is not None and group.key == key), None)
        stored = self.expect(known is None or known.spec == spec, submit(self.store, row, spec))
        if known is not None:
            assert stored is None or stored.id == known.id
            return
        group = ModelGroup(id, priority, key, spec, min_usable)
        group.sessions = [ModelSession(f"{id}.{index}", group) for index in range(n)]
        self.groups.append(group)
        self.counted[EventKind.GROUP_CREATED] += 1

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), node=st.sampled_from(NODES), lease=st.integers(0, 9))
    def start(self, number: int, node: str, lease: int) -> None:
        session = self.pick(number)
        allowed = session.state is SessionState.QUEUED and session.ending is None
        attempt = self.expect(allowed, start(self.store, session.id, node=node, lease_until=lease))
        if allowed:
            session.attempt += 1
            session.state, session.node, session.lease = SessionState.INITIALIZING, node, lease
            self.counted[EventKind.SESSION_STATE] += 1
            assert attempt == session.attempt

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), behind=st.sampled_from([0, 0, 0, 1]), state=st.sampled_from(SessionState))
    def move(self, number: int, behind: int, state: SessionState) -> None:
        session = self.pick(number)
        allowed = behind == 0 and state not in WITH_A_METHOD and state in MOVES[session.state]
        self.expect(allowed, self.store.set_state(session.id, session.attempt - behind, state))
        if allowed:
            session.state = state
            self.counted[EventKind.SESSION_STATE] += 1

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), behind=st.sampled_from([0, 0, 0, 1]), index=st.integers(0, 3))
    def add_turn(self, number: int, behind: int, index: int) -> None:
        session = self.pick(number)
        stored = session.turns.setdefault(session.attempt, [])
        allowed = behind == 0 and session.lease is not None and index not in stored
        self.expect(allowed, self.store.add_turn(session.id, session.attempt - behind, turn(index)))
        if allowed:
            stored.append(index)

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), behind=st.sampled_from([0, 0, 0, 1]))
    def requeue(self, number: int, behind: int) -> None:
        session = self.pick(number)
        allowed = behind == 0 and session.lease is not None
        self.expect(allowed, self.store.requeue(session.id, session.attempt - behind, FAILURE))
        if allowed:
            self._requeued(session)

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), behind=st.sampled_from([0, 0, 0, 1]), under_way=st.booleans())
    def finish(self, number: int, behind: int, under_way: bool) -> None:
        session = self.pick(number)
        attempt = session.attempt - behind
        allowed = behind == 0 and (session.lease is not None if under_way else session.state is not SessionState.DONE)
        finished = self.store.finish(session.id, attempt, result(session.id, attempt), under_way=under_way)
        last = self.expect(allowed, finished)
        if allowed:
            session.state, session.lease = SessionState.DONE, None
            self.counted[EventKind.SESSION_DONE] += 1
            assert last is session.group.done
            group = session.group
            group.usable += 1
            if group.min_usable is not None and group.usable >= group.min_usable:
                self.counted[EventKind.GROUP_ENOUGH] += group.end_others(StopReason.EARLY_STOP)
            if last:
                self.done.append(session.group)
                self.counted[EventKind.GROUP_DONE] += 1

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        group = self.groups[number % len(self.groups)]
        left = self.run(self.store.cancel_group(group.id))
        assert [row.id for row in left] == [session.id for session in group.open]
        if not group.cancelled and not group.done:
            group.cancelled = True
            group.end_others(StopReason.CANCELLED)
            self.counted[EventKind.GROUP_CANCELLED] += 1

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99))
    def cancel_one(self, number: int) -> None:
        session = self.pick(number)
        if session.state is not SessionState.DONE and session.ending is None:
            session.ending = StopReason.CANCELLED
            self.counted[EventKind.SESSION_CANCELLED] += 1
        row = self.run(self.store.cancel_session(session.id))
        assert (row.id, row.ending) == (session.id, session.ending)

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0, 99), behind=st.sampled_from([0, 0, 0, 1]), lease=st.integers(0, 9))
    def renew(self, number: int, behind: int, lease: int) -> None:
        session = self.pick(number)
        self.run(self.store.renew_leases({session.id: session.attempt - behind}, lease))
        if session.lease is not None and not behind:
            session.lease = lease

    @rule(now=st.integers(0, 10), held=st.integers(0, 99))
    def recover(self, now: int, held: int) -> None:
        holding = {self.pick(held).id} if self.groups else set()
        lost = [session for session in self.sessions if session.lease is not None and session.lease < now]
        lost = [session for session in lost if session.id not in holding]
        recovered = self.run(self.store.recover(now=now, held=holding))
        assert {row.id for row in recovered} == {session.id for session in lost}
        for session in lost:
            self._requeued(session)

    def _requeued(self, session: ModelSession) -> None:
        session.state, session.lease = SessionState.QUEUED, None
        self.counted[EventKind.SESSION_RETRY] += 1

    @invariant()
    def same_sessions(self) -> None:
        for group in self.groups:
            rows = self.run(self.store.sessions(group.id))
            assert [(row.id, row.state, row.attempt, row.node, row.lease_until) for row in rows] == [
                (session.id, session.state, session.attempt, session.node, session.lease) for session in group.sessions
            ]
            assert [row.result is not None for row in rows] == [
                session.state is SessionState.DONE for session in group.sessions
            ]
            assert [row.ending for row in rows] == [session.ending for session in group.sessions]
            assert [row.id for row in self.run(self.store.to_end(group.id))] == [
                session.id for session in group.open if session.ending
            ]
        for session in self.sessions:
            for attempt, indexes in session.turns.items():
                assert self.run(self.store.count_turns(session.id, attempt)) == len(indexes)
                # Each turn's parent is the turn before. A turn whose parent is missing is not read.
                first_missing = next(index for index in count() if index not in indexes)
                turns = self.run(self.store.turns(session.id, attempt))
                assert [stored.index for stored in turns] == list(range(first_missing))

    @invariant()
    def same_groups(self) -> None:
        rows = self.run(self.store.groups(limit=1000))
        assert [(row.id, row.cancelled, row.state is GroupState.DONE) for row in rows] == [
            (group.id, group.cancelled, group.done) for group in reversed(self.groups)
        ]
        ended = self.run(self.store.results(after=0, limit=1000))
        assert [(row.id, row.cursor) for row in ended] == [
            (group.id, place) for place, group in enumerate(self.done, start=1)
        ]

    @invariant()
    def same_queue(self) -> None:
        waiting = [
            session
            for group in sorted(self.groups, key=lambda group: (-group.priority, group.id))
            for session in group.sessions
            if session.state is SessionState.QUEUED and session.ending is None
        ]
        assert [row.id for row in self.run(self.store.queued(1000))] == [session.id for session in waiting]
        counts = {state: sum(session.state is state for session in self.sessions) for state in SessionState}
        assert self.run(self.store.counts()) == counts

    @invariant()
    def same_events(self) -> None:
        events = self.run(self.store.events(after=0, limit=10_000))
        assert [event.cursor for event in events] == list(range(1, len(events) + 1))
        assert {kind: sum(event.kind == kind for event in events) for kind in EventKind} == self.counted


StoreMachine.TestCase.settings = settings(
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # Phase.explain takes minutes here
)
TestStoreAgainstModel = pytest.mark.deep(StoreMachine.TestCase)


@pytest.mark.deep
def test_postgresql_against_model(postgresql: PostgresqlServer) -> None:
    class OnPostgresql(StoreMachine):
        def database(self) -> Database:
            return PostgresqlDatabase(self.runner.run(postgresql.new_database()), sole=True)

    run_state_machine_as_test(OnPostgresql, settings=settings(StoreMachine.TestCase.settings, max_examples=12))
