"""The engines of a pool (`EngineRecord`), and the assignment of sessions to them (`Placement`).

Only `EngineRecord` stores the state of an engine. Functions turn it into structs for different readers: `serving` for a
session, `use_of` for the leading pool, `state_of` for following pools, `status_of` for the status. `Placement` assigns
a new session to the least loaded engine. The session stays there, because this engine has cached the session's prefix.
Invariants of an engine:

- `sessions` is the number of sessions assigned to it, and `assigned_tokens` the sum of their context tokens.
- `idle` is set exactly while no process has a generation in flight on it. During its removal, `idle` is set only after
  the last follower has stopped using it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from outrider.concurrency.events import Broadcast
from outrider.constraint import ConstraintKind
from outrider.engines.base import (
    MAX_COUNT,
    AnyEngine,
    AnyRequest,
    AwaitsWorkers,
    Capability,
    EngineHealth,
    KnownVersions,
    RemembersVersions,
    TakesConstraints,
    capabilities_of,
    image_form_of,
)
from outrider.engines.pool.waits import Pace, PaceSummary, loop_time
from outrider.redaction import redacted
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec, PolicyPause
from outrider.tokens.rendering.image_grids import ImageForm
from outrider.trajectory import LogprobKind, TokenMode

T = TypeVar("T", bound=msgspec.Struct)

TOKENS_PER_REQUEST = 16384
"""In an engine's load, this number of context tokens of assigned sessions counts as one request in flight. The tokens
count because a session between two requests still uses memory of the engine's cache."""

OVERLOAD = 32.0
OVERLOAD_TIMES = 1.5
"""An engine is overloaded compared with another one if its load is higher by more than OVERLOAD, and more than
OVERLOAD_TIMES times as high. These thresholds are high, because a session that moves needs its context computed again.
On SWE-bench Pro over vllm-router, 84 % of the prompts' tokens were cached with these thresholds, and 65 % with
thresholds of 4 and 1.1 (NeMo Gym #3345). `python -m bench routing` compares both pairs."""

SLACK = 64
"""A `LoadHeap` with more than this number of entries per name is rebuilt without the outdated entries."""

Load = tuple[bool, float, int]
"""Sort key for the choice of an engine: suspect engines last, then load, then number of sessions."""

EngineTask = Literal["probe", "trial", "check", "question"]
"""The kinds of background work on an engine.

- `probe`: probes a failed engine until it works again.
- `trial`: sends requests to a suspect engine until it has sent good replies.
- `check`: checks an engine that is silent, or that a follower has reported.
- `question`: measures how long an engine needs for one token, after a client has given up a call.

Each kind has its own task, so that a check does not wait for a probe (up to 15 s between two tries) or a trial (up to a
minute)."""


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the engine of a session.

    - `engine`: its name.
    - `version`: its last known policy version.
    - `context_tokens`: the length of its context, or None if unknown.
    - `constraints`: the kinds of constraints that it supports.
    - `keeps_ids`: True if it has the capability KEEPS_IDS.
    - `image_form`: the form in which it takes images."""

    engine: str
    mode: TokenMode
    logprob_kind: LogprobKind
    version: int
    context_tokens: int | None
    constraints: frozenset[ConstraintKind] = frozenset()
    keeps_ids: bool = False
    image_form: ImageForm | None = None


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One process's use of an engine, and its observations of the engine. `EngineStatus` explains the fields except
    `pace`."""

    in_flight: Count = 0
    sessions: Count = 0
    assigned_tokens: Count = 0
    generated_tokens: Count = 0
    failures: Count = 0
    misbehaved: Count = 0
    suspect: str | None = None
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    pace: PaceSummary | None = None
    """The engine's usual speed (pace) as measured by this process, or None until it is known."""

    @property
    def load(self) -> float:
        return self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST


LASTING = ("generated_tokens", "failures", "misbehaved")
"""Counts that outlast a follower: when a follower ends, the leader adds the follower's values to the leader's own."""
COUNTS = ("in_flight", "sessions", "assigned_tokens", *LASTING)
"""The fields of `EngineUse` that the status adds up over all processes."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the leading pool, as sent to followers. `spec` is its EngineSpec as JSON if followers connect to the
    engine directly, or None if only the leader's process has the engine. `versions` is the value of
    `RemembersVersions.versions` in the leader, or None if the engine has no such attribute."""

    name: str
    kind: str
    url: str | None
    spec: bytes | None
    mode: TokenMode
    logprob_kind: LogprobKind
    constraints: frozenset[ConstraintKind]
    capabilities: frozenset[Capability] = frozenset()
    health: EngineHealth
    ok: bool
    detail: str
    draining: bool
    version: int
    versions: KnownVersions | None
    awaits_workers: bool = False
    """True if the engine may join before its first worker has connected (`AwaitsWorkers`)."""
    pace: PaceSummary | None = None
    """The engine's usual speed (pace), for followers that have not measured it yet."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the leading pool, as sent to followers.

    `mode_changes`: how often the mode of the leader's gate has changed.
    `paused`: the gate's current mode.
    `policy_version`: None until a trainer has set a version.
    `leaving`: the names of the engines that are being removed, each with the seconds after which its generations are
    cut off."""

    mode_changes: int
    paused: PolicyPause | None
    policy_version: int | None
    engines: tuple[EngineState, ...]
    leaving: dict[str, float] = {}


@dataclass(eq=False)
class EngineRecord:
    """The pool's record of one engine. `EngineStatus` explains most of the fields that have no text here."""

    engine: AnyEngine
    health: EngineHealth
    """The engine's latest health report."""
    kind: str
    url: str | None
    owned: bool
    """True if the pool must close the engine."""
    model: str | None = None
    """The name of the frozen model that the engine serves, or None for the policy."""
    spec: EngineSpec | None = None
    ok: bool = True
    detail: str = ""
    draining: bool = False
    removed: bool = False
    removal_seconds: float = 0.0
    in_flight: int = 0
    sessions: int = 0
    assigned_tokens: int = 0
    generated_tokens: int = 0
    failures: int = 0
    misbehaved: int = 0
    suspect: str | None = None
    """The defect of the reply that made the engine suspect, or None if the engine is not suspect."""
    uses: dict[str, EngineUse] = field(default_factory=dict)
    """Each follower's use of the engine, by the follower's name."""
    load_elsewhere: float = 0.0
    """The load that other processes put on the engine. Set only in a follower."""
    paused: bool = False
    """True if the engine was ordered to pause and has not been resumed since."""
    behind: bool = False
    """True if the engine responds but serves no session, because its weights are older than the policy."""
    looked_for: int = 0
    """The highest version that a follower has reported for the engine and that has led to a check of the engine."""
    failed_probes: int = 0
    silent: AnyRequest | None = None
    """If the engine has fallen silent, the request for one token that it must answer before it serves again. Otherwise
    None."""
    newest_answered: float = 0.0
    """The beginning (`loop_time`) of the newest call that has received a chunk."""
    pace: Pace = field(default_factory=Pace)
    last_chunk_at: float = field(default_factory=loop_time)
    """When the engine last sent a chunk to any call of this process (`loop_time`)."""
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict[EngineTask, asyncio.Task[None]] = field(default_factory=dict)
    """The latest background work of each kind. It may have ended."""

    def __post_init__(self) -> None:
        self.name = self.engine.name
        self.takes_tokens = self.engine.mode is TokenMode.TOKENS
        """True if the engine is an `Engine`, False if it is a `ChatEngine`."""
        self.version = self.health.version
        self.awaits_workers = isinstance(self.engine, AwaitsWorkers) and self.engine.awaits_workers
        self.idle.set()
        # The engine if it takes constraints, else None. Checked once: an isinstance check on a protocol takes 30
        # microseconds, and every call would make two such checks.
        self._constraining = self.engine if isinstance(self.engine, TakesConstraints) else None

    @property
    def serves(self) -> bool:
        """True if sessions that are already assigned to the engine can use it."""
        return self.ok and not self.removed

    @property
    def takes_sessions(self) -> bool:
        return self.serves and not self.draining

    @property
    def busy(self) -> bool:
        """True while a generation is in flight, in this process or in a follower."""
        return bool(self.in_flight) or any(use.in_flight for use in self.uses.values())

    @property
    def load(self) -> Load:
        load = self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST + self.load_elsewhere
        return self.suspect is not None, load, self.sessions

    @property
    def constraints(self) -> frozenset[ConstraintKind]:
        """The kinds of constraints that the engine supports now. The kinds of a relay engine change with its
        workers."""
        return frozenset() if self._constraining is None else self._constraining.constraints

    def enter(self) -> None:
        """Count a generation that begins."""
        self.in_flight += 1
        self.idle.clear()

    def leave(self, generated: int) -> None:
        """Count the end of a generation, successful or not, and its `generated` tokens."""
        self.in_flight -= 1
        self.generated_tokens += generated
        self._look_idle()

    def note_use(self, follower: str, use: EngineUse | None) -> None:
        """Record a follower's use of the engine. None means that the follower is gone or no longer has the engine."""
        before = self.uses.pop(follower, None)
        if use is not None:
            self.uses[follower] = use
        elif before is not None:
            for name in LASTING:
                setattr(self, name, getattr(self, name) + getattr(before, name))
        self._look_idle()

    def remove(self, seconds: float) -> None:
        """Mark the engine as being removed: it gets no more work, and generations in flight have `seconds` seconds to
        end."""
        self.removed = self.draining = True
        self.removal_seconds = seconds
        self._look_idle()

    def runs(self, what: EngineTask) -> bool:
        """Return True while background work of this kind is running."""
        return (task := self.tasks.get(what)) is not None and not task.done()

    def cancel_tasks(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def known_pace(self) -> PaceSummary | None:
        """Return the engine's usual speed (pace), or None if no process has measured it. If this process and followers
        have measured it, return the pace that was measured over the most calls."""
        all_paces = (self.pace.summary, *(use.pace for use in self.uses.values()))
        return max((pace for pace in all_paces if pace is not None), key=lambda pace: pace.calls, default=None)

    def _look_idle(self) -> None:
        # A follower reports its use until its generations have ended. So a removed engine is idle only if no follower
        # reports any use.
        if self.in_flight or (self.uses if self.removed else self.busy):
            self.idle.clear()
        else:
            self.idle.set()


@dataclass
class _Assignment:
    """The engine of a session, and the number of tokens of the session's context on this engine."""

    member: EngineRecord
    tokens: int = 0


class Placement:
    """The assignment of a pool's sessions to engines. Engines that take token ids and engines that take messages are in
    separate heaps, because an engine of one kind cannot serve requests for the other kind.

    `near` are `fnmatch` patterns for the names of engines near the machine of this process. A session gets the least
    loaded near engine, unless that engine is overloaded."""

    def __init__(self, near: Sequence[str] = ()) -> None:
        self._near = tuple(near)
        self._places: dict[str, _Assignment] = {}
        self._members: dict[str, EngineRecord] = {}
        self._heaps = {True: LoadHeap(), False: LoadHeap()}
        self.arrivals = Broadcast()
        """Wakes the requests that wait for an engine, whenever an engine begins to serve."""

    def pick(self, session_key: str, kinds: tuple[bool, ...], avoid: str | None = None) -> EngineRecord | None:
        """Return the session's engine. If the session has no engine that serves, assign the first of these:

        1. The least loaded near engine, unless it is overloaded compared with the engine of rule 2.
        2. The least loaded engine of all.

        `kinds` are the accepted values of `takes_tokens`, in order of preference. A suspect engine, or the engine named
        `avoid`, is assigned only if no other engine has the same value of `takes_tokens`. Returns None if no engine can
        be assigned.
        """
        place = self._places.get(session_key)
        if place is not None and place.member.serves and place.member.takes_tokens in kinds:
            return place.member
        for kind in kinds:
            if (name := self._heaps[kind].least(avoid)) is not None:
                member = self._near_member(kind, avoid, self._members[name])
                self.release(session_key)
                self._places[session_key] = _Assignment(member)
                member.sessions += 1
                self.refresh(member)
                return member
        return None

    def _near_member(self, kind: bool, avoid: str | None, least: EngineRecord) -> EngineRecord:
        """Return the least loaded near engine that is not suspect. If there is none, or if it is overloaded compared
        with `least`, return `least`, the least loaded engine of all."""
        if not self._near:
            return least
        near = [
            member
            for name, member in self._members.items()
            if member.takes_tokens is kind
            and member.suspect is None
            and name != avoid
            and any(fnmatchcase(name, pattern) for pattern in self._near)
        ]
        best = min(near, key=lambda member: member.load, default=least)
        return least if _overloaded(best.load[1], least.load[1]) else best

    def rebalance(self, session_key: str) -> None:
        """Release the session if its engine is overloaded compared with the least loaded engine. The next `pick` then
        assigns the least loaded one.

        The session's own load is added to OVERLOAD: the longer the context that the other engine must compute again,
        the more the loads must differ. After a few moves the loads differ by less than this sum, so sessions do not
        move back.
        """
        place = self._places.get(session_key)
        if place is None or not place.member.serves:
            return
        name = self._heaps[place.member.takes_tokens].least()
        if name is None or (other := self._members[name]) is place.member or other.suspect is not None:
            return
        if _overloaded(place.member.load[1], other.load[1], place.tokens / TOKENS_PER_REQUEST):
            self.release(session_key)

    def welcome(self, member: EngineRecord) -> None:
        """Add an engine that has begun to serve, and wake the requests that wait for an engine."""
        self.refresh(member)
        self.arrivals.send()

    def has_unsuspected(self, kind: bool) -> bool:
        """Return True if an engine with this value of `takes_tokens` takes new sessions and is not suspect."""
        name = self._heaps[kind].least()
        return name is not None and self._members[name].suspect is None

    def refresh(self, member: EngineRecord) -> None:
        """Update the engine's entry in its heap. Must be called after each change of its `load` or `takes_sessions`."""
        heap = self._heaps[member.takes_tokens]
        if member.takes_sessions:
            self._members[member.name] = member
            heap.put(member.name, member.load)
        elif self._members.get(member.name) is member:  # another engine may have the same name by now
            del self._members[member.name]
            heap.drop(member.name)

    def context(self, session_key: str, member: EngineRecord) -> int:
        """Return the length in tokens of the session's context on this engine, or 0 if the session is assigned to
        another one."""
        place = self._places.get(session_key)
        return place.tokens if place is not None and place.member is member else 0

    def set_context(self, session_key: str, member: EngineRecord, tokens: int) -> None:
        """Set the length in tokens of the session's context, if the session is still assigned to this engine. The
        caller must then call `refresh`."""
        place = self._places.get(session_key)
        if place is not None and place.member is member:
            member.assigned_tokens += tokens - place.tokens
            place.tokens = tokens

    def release(self, session_key: str) -> None:
        """End the session's assignment, if it has one."""
        place = self._places.pop(session_key, None)
        if place is not None:
            place.member.sessions -= 1
            place.member.assigned_tokens -= place.tokens
            self.refresh(place.member)

    def leave(self, session_key: str, member: EngineRecord) -> None:
        """End the session's assignment if it is assigned to this engine."""
        place = self._places.get(session_key)
        if place is not None and place.member is member:
            self.release(session_key)


def _overloaded(own: float, least: float, margin: float = 0.0) -> bool:
    """Return True if the load `own` makes an engine overloaded compared with another engine's load `least`."""
    return own - least > OVERLOAD + margin and own > OVERLOAD_TIMES * least


class LoadHeap:
    """A min-heap of names, ordered by load. `least` returns the name with the smallest load; of equal loads, the name
    that was added first. When a load changes, the old entry stays in the heap, and `least` skips it."""

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
        """Remove a name. Unknown names are ignored."""
        self._current.pop(name, None)

    def least(self, avoid: str | None = None) -> str | None:
        """Return the least loaded name, without removing it. `avoid` is returned only if there is no other name.
        Returns None if the heap is empty."""
        if avoid is not None and len(self._current) > 1:
            return min((entry, name) for name, entry in self._current.items() if name != avoid)[1]
        while self._heap:
            load, order, name = self._heap[0]
            if self._current.get(name) == (load, order):
                return name
            heapq.heappop(self._heap)
        return None


def serving(record: EngineRecord) -> ServingEngine:
    return ServingEngine(
        engine=record.name,
        mode=record.engine.mode,
        logprob_kind=record.engine.logprob_kind,
        version=record.version,
        context_tokens=record.health.context_tokens,
        constraints=record.constraints,
        keeps_ids=Capability.KEEPS_IDS in capabilities_of(record.engine),
        image_form=image_form_of(record.engine),
    )


def use_of(record: EngineRecord) -> EngineUse:
    """Return how this process uses the engine."""
    return _view(EngineUse, record, pace=record.pace.summary)


def state_of(record: EngineRecord) -> EngineState:
    engine, spec = record.engine, record.spec
    return _view(
        EngineState,
        record,
        spec=spec.model_dump_json().encode() if spec is not None and spec.url else None,
        mode=engine.mode,
        logprob_kind=engine.logprob_kind,
        capabilities=capabilities_of(engine),
        versions=engine.versions if isinstance(engine, RemembersVersions) else None,
        pace=record.known_pace(),
    )


def status_of(record: EngineRecord) -> EngineStatus:
    uses = (use_of(record), *record.uses.values())
    return _view(
        EngineStatus,
        record,
        serves=record.model,
        url=record.url and redacted(record.url),
        mode=record.engine.mode,
        detail=redacted(record.detail),
        suspect=next((use.suspect for use in uses if use.suspect), None),
        advice=getattr(record.engine, "advice", ""),
        model=record.health.model,
        context_tokens=record.health.context_tokens,
        **{name: sum(getattr(use, name) for use in uses) for name in COUNTS},
    )


def _view(kind: type[T], record: EngineRecord, **others: Any) -> T:
    """Create a struct of type `kind`. Each field is taken from `others`, or else from the record's attribute of the
    same name."""
    own = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**own, **others)
