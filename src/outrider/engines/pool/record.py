"""The pool's record of an engine, and each view of the record: for a session, for other processes, and for the status.

`EngineRecord` is the only place where the state of an engine is kept. A view is a struct that a function makes of the
record: `serving` for a session, `use_of` for the leading pool, `state_of` for following pools, `status_of` for the
status. Invariant: an engine's `idle` is set exactly while the engine has nothing in flight and, if it is being removed,
no follower uses it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from outrider.concurrency.overdue import loop_time
from outrider.constraint import ConstraintKind
from outrider.engines.base import (
    AnyEngine,
    AnyRequest,
    AwaitsWorkers,
    EngineHealth,
    KnownVersions,
    RemembersVersions,
    TakesConstraints,
)
from outrider.engines.pool.checks import MAX_COUNT
from outrider.engines.pool.pace import Pace, PaceSummary
from outrider.redaction import redacted
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.trajectory import LogprobKind, TokenMode

T = TypeVar("T", bound=msgspec.Struct)

TOKENS_PER_REQUEST = 16384
"""Assigned context of this many tokens weighs as much as one request in flight. A request in flight takes time of the
engine's steps. A session between two requests still takes memory of the engine's cache."""

Load = tuple[bool, float, int]
"""Sort key for placement: suspect engines last, then by load, then by number of sessions."""

EngineTask = Literal["probe", "trial", "check", "question"]
"""The kinds of background work on an engine. `probe`: until an engine that failed is back. `trial`: until a suspect
engine has sent good replies. `check`: whether an engine still works that is silent, or that failed in a follower.
`question`: how long an engine needs for one token after a client has given its call up. Each kind is a task of its own:
a probe waits up to 15 s between two tries, and a trial up to a minute for its reply, which must delay no check."""


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


LASTING = ("generated_tokens", "failures", "misbehaved")
"""Counts of a process that stay counted when the process is gone."""
COUNTS = ("in_flight", "sessions", "assigned_tokens", *LASTING)
"""The fields of `EngineUse` that the status sums up over all processes."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the leading pool. `spec` is the JSON of its EngineSpec if followers connect to the engine
    themselves, and None if only the leader's process has it. `versions` is the leader's value of
    `RemembersVersions.versions`."""

    name: str
    kind: str
    url: str | None
    spec: bytes | None
    mode: TokenMode
    logprob_kind: LogprobKind
    constraints: frozenset[ConstraintKind]
    health: EngineHealth
    ok: bool
    detail: str
    draining: bool
    version: int
    versions: KnownVersions | None
    awaits_workers: bool = False
    """See `AwaitsWorkers`."""
    pace: PaceSummary | None = None
    """The engine's pace, for followers that have not measured it yet."""


@dataclass(eq=False)
class EngineRecord:
    """The pool's record of one engine. Fields that `EngineStatus` also has are described there."""

    engine: AnyEngine
    health: EngineHealth
    """The engine's latest report."""
    kind: str
    url: str | None
    owned: bool
    """True if the pool closes the engine."""
    model: str | None = None
    """The frozen model that the engine serves, None for the policy."""
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
    """Describes the impossible reply of a suspect engine, None for any other engine."""
    uses: dict[str, EngineUse] = field(default_factory=dict)
    """Each follower's use of the engine."""
    load_elsewhere: float = 0.0
    """The load from other processes, in a follower."""
    paused: bool = False
    """True if the engine was ordered to pause and not yet to resume."""
    behind: bool = False
    """True if the engine responds but serves no session, because its weights are older than the policy."""
    looked_for: int = 0
    """The highest version that a follower has reported and for which the engine was then checked."""
    failed_probes: int = 0
    silent: AnyRequest | None = None
    """Set if the engine fell silent: a request for one token, which the engine must answer before it serves again. None
    for any other engine."""
    newest_answered: float = 0.0
    """Start time of the newest call that has received a chunk."""
    pace: Pace = field(default_factory=Pace)
    last_sign: float = field(default_factory=loop_time)
    """Time of the last chunk that the engine sent to any call of this process, by `loop_time`."""
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict[EngineTask, asyncio.Task[None]] = field(default_factory=dict)
    """The latest background work of each kind, which may have ended."""

    def __post_init__(self) -> None:
        self.name = self.engine.name
        self.takes_tokens = self.engine.mode is TokenMode.TOKENS
        """True for an `Engine`, False for a `ChatEngine`."""
        self.version = self.health.version
        self.awaits_workers = isinstance(self.engine, AwaitsWorkers) and self.engine.awaits_workers
        self.idle.set()
        self.read_constraints()

    @property
    def serves(self) -> bool:
        """True if a session that is assigned to the engine may continue there."""
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
        """Record a follower's use; None if the follower is gone."""
        before = self.uses.pop(follower, None)
        if use is not None:
            self.uses[follower] = use
        elif before is not None:
            for name in LASTING:
                setattr(self, name, getattr(self, name) + getattr(before, name))
        self._look_idle()

    def remove(self, seconds: float) -> None:
        """Assign no more work to the engine. Generations in flight have `seconds` to end."""
        self.removed = self.draining = True
        self.removal_seconds = seconds
        self._look_idle()

    def runs(self, what: EngineTask) -> bool:
        """Return True while background work of this kind runs."""
        return (task := self.tasks.get(what)) is not None and not task.done()

    def cancel_tasks(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def known_pace(self) -> PaceSummary | None:
        """Return the engine's pace as measured over the most calls, here or in a follower; None if no pace is known
        yet."""
        all_paces = (self.pace.summary, *(use.pace for use in self.uses.values()))
        return max((pace for pace in all_paces if pace is not None), key=lambda pace: pace.calls, default=None)

    def _look_idle(self) -> None:
        # A follower reports a use of a removed engine until the follower's own generations on the engine have ended.
        if self.in_flight or (self.uses if self.removed else self.busy):
            self.idle.clear()
        else:
            self.idle.set()


def serving(record: EngineRecord) -> ServingEngine:
    return ServingEngine(
        engine=record.name,
        mode=record.engine.mode,
        logprob_kind=record.engine.logprob_kind,
        version=record.version,
        context_tokens=record.health.context_tokens,
        constraints=record.constraints,
    )


def use_of(record: EngineRecord) -> EngineUse:
    """Return this process's use of the engine."""
    return _view(EngineUse, record, pace=record.pace.summary)


def state_of(record: EngineRecord) -> EngineState:
    engine, spec = record.engine, record.spec
    return _view(
        EngineState,
        record,
        spec=spec.model_dump_json().encode() if spec is not None and spec.url else None,
        mode=engine.mode,
        logprob_kind=engine.logprob_kind,
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
    """Make a struct of the attributes of the record that have the names of its fields, and of `others`."""
    own = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**own, **others)
