"""Assigns an engine to each session. A new session gets the least loaded engine.

A session stays on its engine, because this engine has the session's prefix cached. Invariant: an engine's `sessions` is
the number of sessions assigned to the engine, and its `assigned_tokens` is the sum of these sessions' context tokens.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from outrider.concurrency.events import Broadcast
from outrider.engines.pool.record import TOKENS_PER_REQUEST, EngineRecord, Load

OVERLOAD = 32.0
OVERLOAD_TIMES = 1.5
"""An engine is overloaded compared with another engine if its load is more than `OVERLOAD` above the other load, and
more than `OVERLOAD_TIMES` times as high. The thresholds are high, because the context of a session that moves must be
computed again: on SWE-bench Pro over vllm-router, 84 % of the prompts' tokens were cached with these thresholds, and
65 % with 4 and 1.1 (NeMo Gym #3345). `python -m bench routing` compares both pairs of thresholds."""

SLACK = 64
"""The heap is rebuilt, without outdated entries, once it has more than this number of entries per name."""


@dataclass
class _Assignment:
    """A session's engine, and the length of the session's context on this engine in tokens."""

    member: EngineRecord
    tokens: int = 0


class Placement:
    """The assignments of one pool's sessions to engines. Engines that take tokens and engines that take messages have
    separate heaps, because an engine of one kind cannot serve requests of the other kind."""

    def __init__(self) -> None:
        self._places: dict[str, _Assignment] = {}
        self._members: dict[str, EngineRecord] = {}
        self._heaps = {True: LoadHeap(), False: LoadHeap()}
        self.arrivals = Broadcast()
        """Sent whenever an engine begins to serve."""

    def pick(self, session_key: str, kinds: tuple[bool, ...], avoid: str | None = None) -> EngineRecord | None:
        """Return the session's engine. If the session has no engine that serves, assigns the least loaded engine. A
        suspect engine, or the engine named `avoid`, is assigned only if there is no other engine of the same kind.

        `kinds` has the acceptable values of `takes_tokens`, in order of preference. Returns None if no engine can be
        assigned.
        """
        place = self._places.get(session_key)
        if place is not None and place.member.serves and place.member.takes_tokens in kinds:
            return place.member
        for kind in kinds:
            if (name := self._heaps[kind].least(avoid)) is not None:
                member = self._members[name]
                self.release(session_key)
                self._places[session_key] = _Assignment(member)
                member.sessions += 1
                self.refresh(member)
                return member
        return None

    def rebalance(self, session_key: str) -> None:
        """Release the session if its engine is overloaded compared with the least loaded engine. The next `pick` then
        assigns the least loaded engine.

        The session's own load is added to the threshold, because the other engine has to compute the session's context
        again. After a few moves the loads of the two engines differ by less than the threshold, so no session moves
        back.
        """
        place = self._places.get(session_key)
        if place is None or not place.member.serves:
            return
        name = self._heaps[place.member.takes_tokens].least()
        if name is None or (other := self._members[name]) is place.member or other.suspect is not None:
            return
        own, least = place.member.load[1], other.load[1]
        if own - least > OVERLOAD + place.tokens / TOKENS_PER_REQUEST and own > OVERLOAD_TIMES * least:
            self.release(session_key)

    def welcome(self, member: EngineRecord) -> None:
        """Add an engine that has begun to serve, and wake the requests that wait for an engine."""
        self.refresh(member)
        self.arrivals.send()

    def has_unsuspected(self, kind: bool) -> bool:
        """Return True if there is an engine for new sessions that is not suspect and whose `takes_tokens` is `kind`."""
        name = self._heaps[kind].least()
        return name is not None and self._members[name].suspect is None

    def refresh(self, member: EngineRecord) -> None:
        """Update the member's entry in its heap. Call this after any change of the member's `load` or
        `takes_sessions`."""
        heap = self._heaps[member.takes_tokens]
        if member.takes_sessions:
            self._members[member.name] = member
            heap.put(member.name, member.load)
        elif self._members.get(member.name) is member:  # the name may already belong to a newer engine
            del self._members[member.name]
            heap.drop(member.name)

    def context(self, session_key: str, member: EngineRecord) -> int:
        """Return the length of the session's context on this engine in tokens, 0 for a session of another engine."""
        place = self._places.get(session_key)
        return place.tokens if place is not None and place.member is member else 0

    def set_context(self, session_key: str, member: EngineRecord, tokens: int) -> None:
        """Set the length of the session's context in tokens, if the session is still assigned to this engine. The
        caller must call `refresh` afterwards."""
        place = self._places.get(session_key)
        if place is not None and place.member is member:
            member.assigned_tokens += tokens - place.tokens
            place.tokens = tokens

    def release(self, session_key: str) -> None:
        """End the session's assignment. Idempotent."""
        place = self._places.pop(session_key, None)
        if place is not None:
            place.member.sessions -= 1
            place.member.assigned_tokens -= place.tokens
            self.refresh(place.member)

    def leave(self, session_key: str, member: EngineRecord) -> None:
        """End the session's assignment if the session is assigned to this engine."""
        place = self._places.get(session_key)
        if place is not None and place.member is member:
            self.release(session_key)


class LoadHeap:
    """A min-heap of names, ordered by load. `least` returns the name with the smallest current load, and among equal
    loads the name that was added first. When a load changes, the old entry stays in the heap, and `least` skips it."""

    def __init__(self) -> None:
        self._heap: list[tuple[Load, int, str]] = []
        self._current: dict[str, tuple[Load, int]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def put(self, name: str, load: Load) -> None:
        """Add a name, or change its load."""
        known = self._current.get(name)
        if known is not None and known[0] == load:
            return
        order = next(self._order) if known is None else known[1]
        self._current[name] = (load, order)
        heapq.heappush(self._heap, (load, order, name))
        if len(self._heap) > SLACK * len(self._current):
            self._heap = [(load, order, name) for name, (load, order) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Remove a name. Does nothing for an unknown name."""
        self._current.pop(name, None)

    def least(self, avoid: str | None = None) -> str | None:
        """Return the least loaded name, which stays in the heap. The name `avoid` is returned only if there is no other
        name. Returns None if the heap is empty."""
        if avoid is not None and len(self._current) > 1:
            return min((entry, name) for name, entry in self._current.items() if name != avoid)[1]
        while self._heap:
            load, order, name = self._heap[0]
            if self._current.get(name) == (load, order):
                return name
            heapq.heappop(self._heap)
        return None
