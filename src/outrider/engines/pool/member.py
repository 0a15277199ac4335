"""One engine of a pool: what it is, what it carries, and how it fares.

It knows neither the other engines nor sessions by name. Invariant: `idle` is set exactly while nothing is in
flight.
"""

from __future__ import annotations

import asyncio

import msgspec

from outrider.constraint import ConstraintKind
from outrider.engines.base import ChatEngine, Engine, EngineHealth, TakesConstraints
from outrider.schemas import EngineStatus
from outrider.trajectory import LogprobKind, TokenMode

TOKENS_PER_REQUEST = 16384
"""Tokens of assigned context that weigh as much as one request in flight: a waiting session costs its engine cache
memory, a running one costs it steps."""

Load = tuple[bool, float, int]
"""By what engines are compared: whether it is suspect, so that it comes after all that are not; its load; and the
number of its sessions, which decides between equal loads."""


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine serves a session, its policy version as last known, what its ids and log-probabilities are, and
    which constraints on replies it can keep."""

    engine: str
    mode: TokenMode
    logprob_kind: LogprobKind
    version: int
    context_tokens: int | None
    constraints: frozenset[ConstraintKind] = frozenset()


class Member:
    """The pool's record of one engine. `owned` engines are closed by the pool. `suspect` says what the engine sent that
    cannot be true, and is None while it is trusted; `misbehaved` counts how often that happened."""

    def __init__(
        self, engine: Engine | ChatEngine, health: EngineHealth, *, kind: str, url: str | None, owned: bool
    ) -> None:
        self.engine = engine
        self.name = engine.name
        self.takes_tokens = engine.mode is TokenMode.TOKENS
        """Whether it is an `Engine`; else it is a `ChatEngine`."""
        self.health = health
        self.kind = kind
        self.url = url
        self.owned = owned
        self.ok = True
        self.detail = ""
        self.draining = False
        self.removed = False
        self.in_flight = 0
        self.sessions = 0
        self.assigned_tokens = 0
        self.generated_tokens = 0
        self.failures = 0
        self.suspect: str | None = None
        self.misbehaved = 0
        self.failed_probes = 0
        self.version = health.version
        self.probe: asyncio.Task[None] | None = None
        self.trial: asyncio.Task[None] | None = None
        # Kept, because an isinstance check on a protocol takes 30 microseconds and every call would make two.
        self._constraints = engine.constraints if isinstance(engine, TakesConstraints) else frozenset()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def serves(self) -> bool:
        """Whether a session that keeps to it may go on there."""
        return self.ok and not self.removed

    @property
    def takes_sessions(self) -> bool:
        return self.serves and not self.draining

    @property
    def load(self) -> Load:
        return self.suspect is not None, self.in_flight + self.assigned_tokens / TOKENS_PER_REQUEST, self.sessions

    def enter(self) -> None:
        """A generation begins."""
        self.in_flight += 1
        self.idle.clear()

    def leave(self, generated: int) -> None:
        """A generation ended, however it did, having brought so many tokens."""
        self.in_flight -= 1
        self.generated_tokens += generated
        if not self.in_flight:
            self.idle.set()

    def serving(self) -> ServingEngine:
        return ServingEngine(
            engine=self.name,
            mode=self.engine.mode,
            logprob_kind=self.engine.logprob_kind,
            version=self.version,
            context_tokens=self.health.context_tokens,
            constraints=self._constraints,
        )

    def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            kind=self.kind,
            url=self.url,
            mode=self.engine.mode,
            ok=self.ok,
            detail=self.detail,
            draining=self.draining,
            in_flight=self.in_flight,
            sessions=self.sessions,
            assigned_tokens=self.assigned_tokens,
            generated_tokens=self.generated_tokens,
            failures=self.failures,
            suspect=self.suspect,
            misbehaved=self.misbehaved,
            version=self.version,
            model=self.health.model,
            context_tokens=self.health.context_tokens,
        )
