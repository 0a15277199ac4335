"""The pool's record of an engine, and the views of the record: for a session, for other processes, and for the status.

`EngineRecord` is the only place that stores the state of an engine. A view is a struct that a function makes from the
record: `serving` for a session, `use_of` for the leading pool, `state_of` for following pools, `status_of` for the
status. Invariant: an engine's `idle` is set exactly while the engine has nothing in flight. During the removal of an
engine, `idle` is set only once no follower uses the engine.
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
from outrider.spec import EngineSpec, PolicyPause
from outrider.trajectory import LogprobKind, TokenMode

T = TypeVar("T", bound=msgspec.Struct)

TOKENS_PER_REQUEST = 16384
"""In the load of an engine, this number of assigned context tokens counts as much as one request in flight. A request
in flight uses computing time, and a session between two requests still uses memory of the engine's cache."""

Load = tuple[bool, float, int]
"""Sort key for placement: suspect engines last, then by load, then by number of sessions."""

EngineTask = Literal["probe", "trial", "check", "question"]
"""The kinds of background work on an engine.

- `probe`: probes a failed engine until it works again.
- `trial`: sends requests to a suspect engine until it has sent good replies.
- `check`: checks an engine that is silent, or that a follower reported.
- `question`: measures how long an engine needs for one token after a client has given up a call.

Each kind has its own task, because a probe waits up to 15 s between two tries, a trial waits up to a minute for its
reply, and neither may delay a check."""


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a session's engine. `engine` is the name, `version` the last known policy version,
    `context_tokens` the context (None if unknown), and `constraints` the supported kinds of constraints on replies."""

    engine: str
    mode: TokenMode
    logprob_kind: LogprobKind
    version: int
    context_tokens: int | None
    constraints: frozenset[ConstraintKind] = frozenset()


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One process's use of an engine, and this process's observations of the engine. `EngineStatus` describes the
    fields except `pace`."""

    in_flight: Count = 0
    sessions: Count = 0
    assigned_tokens: Count = 0
    generated_tokens: Count = 0
    failures: Count = 0
    misbehaved: Count = 0
    suspect: str | None = None
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    pace: PaceSummary | None = None
    """The engine's pace as measured by this process, None until it is known."""

    @property
    def load(self) -> float:
        return self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST


LASTING = ("generated_tokens", "failures", "misbehaved")
"""The counts that the leader adds to its own counts when a follower ends, so that they are not lost."""
COUNTS = ("in_flight", "sessions", "assigned_tokens", *LASTING)
"""The fields of `EngineUse` that the status adds up over all processes."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the leading pool, as sent to followers. `spec` is the JSON of its EngineSpec if followers connect to
    the engine directly, and None if only the leader's process has the engine. `versions` is the leader's value of
    `RemembersVersions.versions`, None for other engines."""

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
    """True if the engine may join before its first worker is connected (`AwaitsWorkers`)."""
    pace: PaceSummary | None = None
    """The engine's pace, for followers that have not measured it yet."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The leading pool's state, as sent to followers. `closings` counts the changes of the leader's gate, and `paused`
    is the gate's current mode. `policy_version` is None until a trainer has set a version. `leaving` maps the name of
    each engine under removal to the time limit, in seconds, for its generations."""

    closings: int
    paused: PolicyPause | None
    policy_version: int | None
    engines: tuple[EngineState, ...]
    leaving: dict[str, float] = {}


@dataclass(eq=False)
class EngineRecord:
    """The pool's record of one engine. Fields that `EngineStatus` also has are described there."""

    engine: AnyEngine
    health: EngineHealth
    """The engine's latest health report."""
    kind: str
    url: str | None
    owned: bool
    """True if the pool closes the engine."""
    model: str | None = None
    """The name of the frozen model that the engine serves, None for the policy."""
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
    """A description of the impossible reply that made the engine suspect, None for any other engine."""
    uses: dict[str, EngineUse] = field(default_factory=dict)
    """Each follower's use of the engine, by follower name."""
    load_elsewhere: float = 0.0
    """The load on the engine by other processes. Set only in a follower."""
    paused: bool = False
    """True if the engine was ordered to pause and has not been resumed since."""
    behind: bool = False
    """True if the engine responds but serves no session, because its weights are older than the policy."""
    looked_for: int = 0
    """The highest version reported by a follower that has triggered a check of the engine."""
    failed_probes: int = 0
    silent: AnyRequest | None = None
    """A request for one token, which an engine that fell silent must answer before it serves again. None for any other
    engine."""
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
        """True if the engine is an `Engine`, False if it is a `ChatEngine`."""
        self.version = self.health.version
        self.awaits_workers = isinstance(self.engine, AwaitsWorkers) and self.engine.awaits_workers
        self.idle.set()
        self.read_constraints()

    @property
    def serves(self) -> bool:
        """True if sessions that are already assigned to the engine may use it."""
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
        """Cache the engine's constraints, because an isinstance check on a protocol takes 30 microseconds and every
        call would make two. Call this again when an engine returns, because the constraints of a relay are known only
        once its first worker attaches."""
        self.constraints = self.engine.constraints if isinstance(self.engine, TakesConstraints) else frozenset()

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
        """Record a follower's use of the engine. `use` is None if the follower is gone or no longer has the engine."""
        before = self.uses.pop(follower, None)
        if use is not None:
            self.uses[follower] = use
        elif before is not None:
            for name in LASTING:
                setattr(self, name, getattr(self, name) + getattr(before, name))
        self._look_idle()

    def remove(self, seconds: float) -> None:
        """Mark the engine as being removed, so that it gets no more work. Generations in flight have `seconds` to
        end."""
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
        """Return the pace measured over the most calls, by this process or a follower. Returns None if none of these
        processes has measured a pace."""
        all_paces = (self.pace.summary, *(use.pace for use in self.uses.values()))
        return max((pace for pace in all_paces if pace is not None), key=lambda pace: pace.calls, default=None)

    def _look_idle(self) -> None:
        # For a removed engine any use counts, because a follower reports its use until its generations on the engine
        # have ended.
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
    """Make a struct of type `kind`. Fields in `others` get their value from there, all other fields from the record's
    attribute of the same name."""
    own = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**own, **others)
