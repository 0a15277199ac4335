"""Manages the engines of one model. Engines are added, drained and removed one by one, or follow a router's list. Other
modules do parts of this work:

- `placement` assigns an engine to a session.
- `call` runs a call.
- `health` checks whether the engines work.
- `silence` detects engines that have stopped responding.
- `policy` pauses the engines while their weights change.

Invariant: the pool closes each engine that it has started, exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from outrider import plugins
from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.events import Feed
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import (
    AnyEngine,
    AwaitsWorkers,
    EngineHealth,
    EngineOptions,
    ListsEngines,
)
from outrider.engines.pool.call import EngineCalls
from outrider.engines.pool.health import EngineCheck, HealthChecks, MakesPolicy
from outrider.engines.pool.listed import LOOK_SECONDS, Listing
from outrider.engines.pool.placement import EngineRecord, EngineState, Placement, status_of
from outrider.engines.pool.policy import KnownPolicy, Policy
from outrider.engines.pool.silence import SilenceWatch
from outrider.engines.pool.waits import LIMITS, RememberedPace, SilenceLimits
from outrider.errors import Conflict, EngineUnavailable, NotFound
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import ANY_IDS, TextStream, Vocabulary

REMOVAL_SECONDS = 30.0
DEPARTURE_SECONDS = 600.0
"""When a router no longer lists an engine, the engine's generations in flight have this number of seconds to end."""

PROBING = RetryPolicy(first=0.25, longest=15.0)


class EnginePool:
    """The engines of one model. Enter the pool with `async with`. `calls` runs calls on the engines, and `placement`
    has the sessions that are assigned to each engine.

    - `serves`: the name of a frozen model, or None for the policy.
    - `claimed`: names in use. Pools that share this set never have two engines of the same name.
    - `tokenizer`: passed to engines that are made from a spec.
    - `vocabulary`: token ids outside of it are rejected.
    - `context_tokens`: the model's context from the settings, or None if not set.
    - `text`: creates a decoder of token ids. It is used to find stop strings in generations that were cut off and
      continued.
    - `check`: called when an engine joins or returns. It may refuse the engine by raising an EngineError, such as
      ModelMismatch.
    - `patience`: seconds that a request waits for an engine, so that no session fails while an engine restarts.
    - `probing`: the waits between probes of a failed engine.
    - `silence`: the limits for silent engines.
    - `look_seconds`: seconds between two readings of a list of engines.
    - `known`, `keep`: restore and store the policy's version (see `Policy`).
    - `paces`: what an earlier pool has measured, by engine name (see `paces()`).
    - `near`: engines that sessions of this process get first (see `Placement`).
    - `follows`: creates the policy if this pool follows a pool of another process (`follower.py`).
    - `failures`: records failures of the pool's background work.

    Pools of other processes may follow this pool (`leader.py`). `changes` announces that the state for these followers
    may have changed.
    """

    def __init__(
        self,
        *,
        serves: str | None = None,
        claimed: set[str] | None = None,
        tokenizer: str | None = None,
        vocabulary: Vocabulary = ANY_IDS,
        context_tokens: int | None = None,
        text: Callable[[], TextStream] | None = None,
        check: EngineCheck | None = None,
        patience: float = 60.0,
        probing: RetryPolicy = PROBING,
        silence: SilenceLimits = LIMITS,
        look_seconds: float = LOOK_SECONDS,
        known: KnownPolicy | None = None,
        keep: Callable[[KnownPolicy], Awaitable[None]] | None = None,
        paces: Mapping[str, RememberedPace] = {},
        follows: MakesPolicy | None = None,
        near: Sequence[str] = (),
        failures: Failures | None = None,
    ) -> None:
        self.changes = Feed[None]()
        self.vocabulary = vocabulary
        self.members: dict[str, EngineRecord] = {}
        self.placement = Placement(near)
        self._serves = serves
        self._tokenizer = tokenizer
        self._look_seconds = look_seconds
        self._remembered = dict(paces)
        self._listings: dict[str, Listing] = {}
        self._claimed = set() if claimed is None else claimed
        """Names of all engines and lists, including those that are still joining."""
        self._tasks = Chores(failures or Failures())
        self.health = HealthChecks(
            self.members,
            self.placement,
            self._tasks,
            self.changes,
            policy=follows or partial(Policy, known=known, keep=keep, changed=partial(self.changes.publish, None)),
            vocabulary=vocabulary,
            check=check,
            probing=probing,
        )
        self.policy = self.health.policy
        self._silence = SilenceWatch(silence, self.health)
        self.calls = EngineCalls(
            self.members,
            self.placement,
            self.health,
            self._silence.flights,
            serves=serves,
            vocabulary=vocabulary,
            context_tokens=context_tokens,
            text=text,
            patience=patience,
        )

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.begin(f"watch for silence of {self._serves or 'the policy'}", self._silence.look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members.values():
            member.removed = True
            self.placement.refresh(member)
        self._tasks.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            await shielded(lambda: self.policy.leave(tuple(self.members.values())))
            await shielded(self._close_all)

    async def add(self, spec: EngineSpec) -> EngineStatus:
        """Create, start and admit an engine, or all engines of a list. An engine whose workers connect to the service
        is admitted even if no worker has connected yet. Raises InvalidField for a bad spec, Conflict for a name in use,
        EngineUnavailable for an engine that does not respond or is not healthy, and the errors of `check`."""
        numbered = (f"{spec.kind}-{number}" for number in range(len(self._claimed) + 1))
        name = spec.name or next(free for free in numbered if free not in self._claimed)
        async with self._joining(name, spec) as engine:
            if isinstance(engine, ListsEngines):
                return await self._follow_list(engine, spec)
            try:
                health = await self.health.vet(engine)
            except EngineUnavailable as error:
                if not isinstance(engine, AwaitsWorkers):
                    raise
                health = EngineHealth(ok=False, detail=error.message)
            return self._admit(engine, health, kind=spec.kind, url=spec.url, owned=True, spec=spec)

    async def add_engine(self, engine: AnyEngine, *, kind: str = "in-process") -> EngineStatus:
        """Admit an engine that the caller has started and will close. Raises the errors of `add`."""
        self._claim(engine.name)
        try:
            return self._admit(engine, await self.health.vet(engine), kind=kind, url=None, owned=False)
        finally:
            self._unclaim(engine.name)

    async def adopt(self, state: EngineState, source: EngineSpec | AnyEngine) -> None:
        """Admit an engine that the leader has checked. The caller must call `apply_state` next. Raises Conflict if the
        name is in use, and InvalidField for a spec that works only in the leader's process."""
        async with self._joining(state.name, source) as engine:
            self._admit(engine, state.health, kind=state.kind, url=state.url, owned=True)

    def paces(self) -> dict[str, RememberedPace]:
        """Return the known paces of the engines, by engine name."""
        known = {name: (member, member.known_pace()) for name, member in self.members.items()}
        return {
            name: RememberedPace(kind=member.kind, url=member.url, pace=pace)
            for name, (member, pace) in known.items()
            if pace is not None
        }

    def __contains__(self, name: str) -> bool:
        """Return True if an engine or a list of engines has this name."""
        return self.engine(name) is not None or name in self._listings

    def engine(self, name: str) -> AnyEngine | None:
        """Return the engine with this name. Returns None if there is none, or if it is being removed."""
        member = self.members.get(name)
        return None if member is None or member.removed else member.engine

    def probe_now(self, name: str) -> None:
        """Probe a failed engine at once. Call this if there are signs that the engine is back, or when a worker of a
        relay can get work."""
        if (member := self.members.get(name)) is not None:
            member.probe_now.set()
            self.changes.publish(None)  # a relay's new worker may support other constraints

    def drain(self, name: str) -> EngineStatus:
        """Assign no new sessions to the engine, or to any engine of a list. Sessions that are already assigned stay. A
        drained list adds no engines. Raises NotFound for an unknown name."""
        if (listing := self._listings.get(name)) is not None:
            listing.drain()
            for engine in listing.engines.values():
                with suppress(NotFound):
                    self.drain(engine)
            return self._listing_status(listing)
        member = self._member(name)
        member.draining = True
        self.placement.refresh(member)
        self.changes.publish(None)
        return status_of(member)

    async def remove(self, name: str, *, seconds: float = REMOVAL_SECONDS) -> None:
        """Remove an engine, or a list with all its engines. Sessions move to other engines with their next turn.
        Generations in flight have `seconds` seconds to end. Then an engine that the pool owns is closed, which cuts off
        the generations still in flight. Raises NotFound for an unknown name."""
        if (listing := self._listings.pop(name, None)) is not None:
            try:
                await self._remove_any(await listing.end(), seconds)
            finally:
                self._unclaim(name)
                await shielded(listing.source.close)
            return
        member = self._member(name)
        member.remove(seconds)
        self.placement.refresh(member)
        self.changes.publish(None)
        member.cancel_tasks()
        try:
            async with asyncio.timeout(seconds):
                await member.idle.wait()
        except TimeoutError:
            member.detail = "removed with generations in flight"
        finally:
            if (pace := self.paces().get(name)) is not None:
                self._remembered[name] = pace
            self.members.pop(name, None)
            self._unclaim(name)
            await shielded(lambda: self.policy.leave((member,)))
            if member.owned:
                await shielded(member.engine.close)

    def status(self) -> list[EngineStatus]:
        """Return the status of every list of engines, and then of every engine. Each part is in the order of
        addition."""
        listings = [self._listing_status(listing) for listing in self._listings.values()]
        return listings + [status_of(member) for member in self.members.values()]

    @asynccontextmanager
    async def _joining(self, name: str, source: EngineSpec | AnyEngine) -> AsyncGenerator[Any, None]:
        """Reserve the name, and start an engine or a list of engines. The block must admit the engine or the list. If
        the block raises, the engine or the list is closed and the name is free again."""
        self._claim(name)
        try:
            engine: Any = source
            if isinstance(source, EngineSpec):
                make = plugins.resolve("engine", source.kind, field="kind")
                options = source.options
                engine = make(
                    EngineOptions(
                        name=name, url=source.url, model=source.model, tokenizer=self._tokenizer, options=options
                    )
                )
            try:
                await engine.start()
                yield engine
            except BaseException:  # also after a cancellation, because the engine must be closed
                await shielded(engine.close)
                raise
        finally:
            self._unclaim(name)

    async def _follow_list(self, source: ListsEngines, spec: EngineSpec) -> EngineStatus:
        def leave(name: str) -> None:
            self._tasks.create_task(self._remove_any([name], DEPARTURE_SECONDS), name=f"departure of {name}")

        listing = Listing(source, spec, self.add, leave, urls=lambda: [member.url for member in self.members.values()])
        try:
            await listing.begin()
        except BaseException:
            await shielded(lambda: self._remove_any(tuple(listing.engines.values()), 0))
            raise
        self._listings[source.name] = listing
        listing.task = self._tasks.create_task(listing.follow(self._look_seconds), name=f"list of {source.name}")
        return self._listing_status(listing)

    def _listing_status(self, listing: Listing) -> EngineStatus:
        serving = [member.name for member in self.members.values() if member.serves]
        return listing.status(serving, self._serves, self.policy.version)

    async def _remove_any(self, names: Sequence[str], seconds: float) -> None:
        """Remove engines concurrently. Names of engines that are not in the pool, or are being removed, are ignored."""
        there = [name for name in names if name in self.members and not self.members[name].removed]
        await asyncio.gather(*(self.remove(name, seconds=seconds) for name in there))

    def _admit(
        self,
        engine: AnyEngine,
        health: EngineHealth,
        *,
        kind: str,
        url: str | None,
        owned: bool,
        spec: EngineSpec | None = None,
    ) -> EngineStatus:
        member = EngineRecord(engine, health, kind=kind, url=url, owned=owned, model=self._serves, spec=spec)
        member.version = self.policy.version_of(engine, health)
        earlier = self._remembered.get(member.name)
        if earlier is not None and (earlier.kind, earlier.url) == (kind, url):
            member.pace.take_over(earlier.pace)
        self.members[member.name] = member
        if not health.ok:
            member.detail = health.detail
            self.health.keep_out(member)
        elif (outdated := self.policy.outdated(engine, health)) is not None:
            member.behind, member.detail = True, outdated.message
            self.health.keep_out(member)
        self.placement.welcome(member)
        self.changes.publish(None)
        return status_of(member)

    def _member(self, name: str) -> EngineRecord:
        if (member := self.members.get(name)) is None or member.removed:
            raise NotFound(f"no engine {name!r}", field="name")
        return member

    def _claim(self, name: str) -> None:
        if name in self._claimed:
            raise Conflict(f"there is an engine {name!r} already", field="name")
        self._claimed.add(name)

    def _unclaim(self, name: str) -> None:
        """Free a name, unless an engine or a list in the pool has it."""
        if name not in self.members and name not in self._listings:
            self._claimed.discard(name)

    async def _close_all(self) -> None:
        async with AsyncExitStack() as stack:
            for member in self.members.values():
                if member.owned:
                    stack.push_async_callback(member.engine.close)
            for listing in self._listings.values():
                stack.push_async_callback(listing.source.close)
        self.members.clear()
        self._listings.clear()
