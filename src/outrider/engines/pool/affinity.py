"""The engines of a pool: the state and load of each, the engine of each session, and the choice for a new session.

A session stays on its engine because that engine has the session's prefix cached. The module handles no requests and
never waits. Invariants: an engine's `idle` is set exactly while the engine has nothing in flight and, if it is being
removed, no follower uses it. An engine's `sessions` is the number of sessions assigned to the engine, and its
`assigned_tokens` is the sum of their context tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass
from typing import Annotated

import msgspec

from outrider.concurrency.overdue import loop_time
from outrider.constraint import ConstraintKind
from outrider.engines.base import AnyRequest, AwaitsWorkers, ChatEngine, Engine, EngineHealth, TakesConstraints
from outrider.engines.pool.pace import Pace, PaceSummary
from outrider.engines.pool.reply_checks import MAX_COUNT
from outrider.redaction import redacted
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.trajectory import LogprobKind, TokenMode

TOKENS_PER_REQUEST = 16384
"""Assigned context of this many tokens weighs as much as one request in flight. A request in flight takes time of the
engine's steps. A session between two requests still takes memory of the engine's cache."""


Load = tuple[bool, float, int]
"""Sort key for placement: suspect engines last, then by load, then by number of sessions."""

OVERLOAD = 32.0
OVERLOAD_TIMES = 1.5
"""An engine is overloaded compared with another if its load is more than `OVERLOAD` above the other load and more than
`OVERLOAD_TIMES` times as high. On SWE-bench Pro over vllm-router 84 % of the prompts' tokens were cached with these
thresholds, and 65 % with 4 and 1.1 (NeMo Gym #3345): a session that moves has its context read again. `python -m bench
routing` compares both."""

SLACK = 64
"""The heap is rebuilt once it has more than this many entries, most of them outdated, for each name."""


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A session's engine: its name, its last known policy version, its kinds of ids and log-probabilities, and the
    constraints on replies that it supports."""

    engine: str
    mode: TokenMode
    logprob_kind: LogprobKind
    version: int
    context_tokens: int | None
    constraints: frozenset[ConstraintKind] = frozenset()


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One process's use of an engine, and what the process has observed of the engine. `EngineStatus` describes the
    fields."""

    in_flight: Count = 0
    sessions: Count = 0
    assigned_tokens: Count = 0
    generated_tokens: Count = 0
    failures: Count = 0
    misbehaved: Count = 0
    suspect: str | None = None
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    pace: PaceSummary | None = None
    """The engine's pace as measured by the process; None until the pace is known."""

    @property
    def load(self) -> float:
        return self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST


class EngineRecord:
    """The pool's record of one engine. The pool closes `owned` engines. `suspect` describes the impossible reply of a
    suspect engine, and is None for others. `misbehaved` counts impossible replies. `paused`: the engine was ordered to
    pause and not yet to resume. `behind`: the engine responds but serves no session, because its weights are older than
    the policy. `model` is the frozen model that the engine serves, None for the policy. `spec` is the engine's spec, if
    any. `uses` holds each follower's use of the engine. `load_elsewhere` is the load from other processes."""

    def __init__(
        self,
        engine: Engine | ChatEngine,
        health: EngineHealth,
        *,
        kind: str,
        url: str | None,
        owned: bool,
        model: str | None = None,
        spec: EngineSpec | None = None,
    ) -> None:
        self.engine = engine
        self.name = engine.name
        self.takes_tokens = engine.mode is TokenMode.TOKENS
        """True for an `Engine`, False for a `ChatEngine`."""
        self.health = health
        self.kind = kind
        self.url = url
        self.owned = owned
        self.model = model
        self.spec = spec
        self.uses: dict[str, EngineUse] = {}
        self.load_elsewhere = 0.0
        self.ok = True
        self.detail = ""
        self.draining = False
        self.removed = False
        self.removal_seconds = 0.0
        self.in_flight = 0
        self.sessions = 0
        self.assigned_tokens = 0
        self.generated_tokens = 0
        self.failures = 0
        self.suspect: str | None = None
        self.misbehaved = 0
        self.failed_probes = 0
        self.version = health.version
        self.looked_for = 0
        """The highest version that a follower has reported and for which the engine was then checked."""
        self.paused = False
        self.behind = False
        self.probe: asyncio.Task[None] | None = None
        self.probe_now = asyncio.Event()
        self.trial: asyncio.Task[None] | None = None
        self.check: asyncio.Task[None] | None = None
        """The running check of whether the engine still works. A follower's report or the engine's silence has caused
        it."""
        self.pace = Pace()
        self.last_sign = loop_time()
        """Time of the last chunk that the engine sent to any call of this process, by `loop_time`."""
        self.newest_answered = 0.0
        """Start time of the newest call that has received a chunk."""
        self.awaits_workers = isinstance(engine, AwaitsWorkers) and engine.awaits_workers
        self.silent: AnyRequest | None = None
        """The request for one token that an engine which fell silent must serve before it takes part again; None for
        any other engine."""
        self.read_constraints()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def serves(self) -> bool:
        """True if a session that is assigned to the engine may continue there."""
        return self.ok and not self.removed

    @property
    def busy(self) -> bool:
        """True while a generation is in flight, in this process or in a follower."""
        return bool(self.in_flight) or any(use.in_flight for use in self.uses.values())

    @property
    def takes_sessions(self) -> bool:
        return self.serves and not self.draining

    @property
    def load(self) -> Load:
        load = self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST + self.load_elsewhere
        return self.suspect is not None, load, self.sessions

    def read_constraints(self) -> None:
        """Cache the engine's constraints: an isinstance check on a protocol takes 30 microseconds, and every call would
        make two. This method is called again when an engine comes back: the constraints of a relay are known only once
        its first worker attaches."""
        self.constraints = self.engine.constraints if isinstance(self.engine, TakesConstraints) else frozenset()

    def enter(self) -> None:
        """Count a generation that begins."""
        self.in_flight += 1
        self.idle.clear()

    def leave(self, generated: int) -> None:
        """Count the end of a generation, successful or not, and the number of tokens that it generated."""
        self.in_flight -= 1
        self.generated_tokens += generated
        self._look_idle()

    def note_use(self, follower: str, use: EngineUse | None) -> None:
        """Record a follower's use; None if the follower is gone. The totals of a follower that is gone stay counted."""
        before = self.uses.pop(follower, None)
        if use is not None:
            self.uses[follower] = use
        elif before is not None:
            self.generated_tokens += before.generated_tokens
            self.failures += before.failures
            self.misbehaved += before.misbehaved
        self._look_idle()

    def _look_idle(self) -> None:
        # A follower reports a use of a removed engine until the follower's own generations on the engine have ended.
        if self.in_flight or (self.uses if self.removed else self.busy):
            self.idle.clear()
        else:
            self.idle.set()

    def remove(self, seconds: float) -> None:
        """Assign no more work to the engine. Generations in flight have `seconds` to end."""
        self.removed = self.draining = True
        self.removal_seconds = seconds
        self._look_idle()

    def serving(self) -> ServingEngine:
        return ServingEngine(
            engine=self.name,
            mode=self.engine.mode,
            logprob_kind=self.engine.logprob_kind,
            version=self.version,
            context_tokens=self.health.context_tokens,
            constraints=self.constraints,
        )

    def use(self) -> EngineUse:
        """Return this process's use of the engine."""
        return EngineUse(
            in_flight=self.in_flight,
            sessions=self.sessions,
            assigned_tokens=self.assigned_tokens,
            generated_tokens=self.generated_tokens,
            failures=self.failures,
            misbehaved=self.misbehaved,
            suspect=self.suspect,
            version=self.version,
            pace=self.pace.summary,
        )

    def known_pace(self) -> PaceSummary | None:
        """Return the engine's pace as measured over the most calls, here or in a follower; None if no pace is known
        yet."""
        all_paces = (self.pace.summary, *(use.pace for use in self.uses.values()))
        return max((pace for pace in all_paces if pace is not None), key=lambda pace: pace.calls, default=None)

    def status(self) -> EngineStatus:
        all_uses = (self.use(), *self.uses.values())

        def total(field: str) -> int:
            return sum(getattr(use, field) for use in all_uses)

        return EngineStatus(
            name=self.name,
            kind=self.kind,
            serves=self.model,
            url=self.url and redacted(self.url),
            mode=self.engine.mode,
            ok=self.ok,
            detail=redacted(self.detail),
            draining=self.draining,
            in_flight=total("in_flight"),
            sessions=total("sessions"),
            assigned_tokens=total("assigned_tokens"),
            generated_tokens=total("generated_tokens"),
            failures=total("failures"),
            suspect=next((use.suspect for use in all_uses if use.suspect), None),
            misbehaved=total("misbehaved"),
            advice=getattr(self.engine, "advice", ""),
            version=self.version,
            model=self.health.model,
            context_tokens=self.health.context_tokens,
        )


@dataclass
class _Assignment:
    """A session's engine, and the length in tokens of the session's context there."""

    member: EngineRecord
    tokens: int = 0


class Affinity:
    """The engines of one pool's sessions. Engines that take tokens and engines that take messages are kept apart:
    neither can serve the other's requests."""

    def __init__(self) -> None:
        self._places: dict[str, _Assignment] = {}
        self._members: dict[str, EngineRecord] = {}
        self._heaps = {True: LoadHeap(), False: LoadHeap()}

    def pick(self, session_key: str, kinds: tuple[bool, ...], avoid: str | None = None) -> EngineRecord | None:
        """Return the session's own engine while it serves, else assign the least loaded engine. A suspect engine, or
        the engine named `avoid`, is assigned only if there is no other of its kind.

        `kinds` has the acceptable values of `takes_tokens`, in order of preference. Returns None if there is no engine.
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
        """Release a session whose engine is overloaded compared with the least loaded engine. `pick` then assigns the
        least loaded engine.

        The other engine has to read the session's context once more, so the session's own load is added to the
        threshold. After a few moves the loads of two engines differ by less than the threshold, and no session moves
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

    def trusts(self, kind: bool) -> bool:
        """Return True if a new session would get an engine of that kind that is not suspect. `kind` is the value of
        `takes_tokens`."""
        name = self._heaps[kind].least()
        return name is not None and self._members[name].suspect is None

    def refresh(self, member: EngineRecord) -> None:
        """Update the heap. Call it after any change of the member's load or of `takes_sessions`."""
        heap = self._heaps[member.takes_tokens]
        if member.takes_sessions:
            self._members[member.name] = member
            heap.put(member.name, member.load)
        elif self._members.get(member.name) is member:  # a newer engine may have this name
            del self._members[member.name]
            heap.drop(member.name)

    def context(self, session_key: str, member: EngineRecord) -> int:
        """Return the session's tokens of context on that engine."""
        place = self._places.get(session_key)
        return place.tokens if place is not None and place.member is member else 0

    def set_context(self, session_key: str, member: EngineRecord, tokens: int) -> None:
        """Set the length of the session's context, in tokens, if the session is still assigned to that engine. The
        caller refreshes the member."""
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
        """End the session's assignment to that engine, if it is assigned there."""
        place = self._places.get(session_key)
        if place is not None and place.member is member:
            self.release(session_key)


class LoadHeap:
    """Names ordered by load: a min-heap whose entries may change. `least` returns the name with the smallest current
    load, and the oldest name among equals. A changed load leaves its old entry in the heap, to be skipped later."""

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
        """Remove a name, if it is there."""
        self._current.pop(name, None)

    def least(self, avoid: str | None = None) -> str | None:
        """Return the least loaded name without removing it. The name `avoid` is returned only if there is no other.
        None if the heap is empty."""
        if avoid is not None and len(self._current) > 1:
            return min((entry, name) for name, entry in self._current.items() if name != avoid)[1]
        while self._heap:
            load, order, name = self._heap[0]
            if self._current.get(name) == (load, order):
                return name
            heapq.heappop(self._heap)
        return None
