"""The engine pool: assigns each session the least loaded engine, keeps it there, and moves it when that engine fails.

The pool has no notion of a conversation. `reply_checks` checks every reply. A generation cut off by a pause of the
policy, or by the silence of its engine, continues as a new request if possible (`continuation`). Invariant: any other
generation is started again only if its consumer has received no token. An engine that has sent an impossible reply is
suspect until it has passed several trials.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast
from uuid import uuid4

import msgspec

from outrider import plugins
from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.events import Feed, wait_for_event
from outrider.concurrency.overdue import Overdue
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import (
    AnyRequest,
    AwaitsWorkers,
    ChatChunk,
    ChatEngine,
    ChatRequest,
    Chunk,
    Engine,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    ListsEngines,
)
from outrider.engines.pool.affinity import Affinity, EngineRecord, EngineUse, ServingEngine
from outrider.engines.pool.continuation import ContinuedGeneration, continuable
from outrider.engines.pool.listed import LOOK_SECONDS, Listing
from outrider.engines.pool.pace import LIMITS, RememberedPace, SilenceLimits
from outrider.engines.pool.policy import KnownPolicy, Policy
from outrider.engines.pool.reply_checks import (
    MAX_QUOTED,
    ChatCheck,
    TokenCheck,
    check_health,
    mistake_of,
    overflow_fault,
)
from outrider.engines.pool.request_checks import check_ids
from outrider.engines.pool.sharing import EngineState, PoolState, state_of
from outrider.engines.pool.silence import SilenceWatch
from outrider.errors import (
    Conflict,
    ContextOverflow,
    EngineError,
    EngineMisbehaved,
    EngineRejected,
    EngineSilent,
    EngineUnavailable,
    NotFound,
    OutriderError,
)
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import ANY_IDS, TextStream, Vocabulary
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan

AnyEngine = Engine | ChatEngine
EngineCheck = Callable[[AnyEngine], Awaitable[None]]
T = TypeVar("T", bound=Chunk | ChatChunk)

log = logging.getLogger("outrider.engine")

REMOVAL_SECONDS = 30.0
DEPARTURE_SECONDS = 600.0
"""Seconds that generations in flight have to end on an engine that has left its router's list."""

FAILOVERS = 3
"""A request that fails more often than this is not tried again, because the request itself may be the cause. If engines
are unavailable, a request may fail as often as there are engines in the pool, if that is more often."""

GOOD_REPLIES = 3
"""Consecutive good trial replies after which an engine is no longer suspect."""

HEALTH_SECONDS = 60.0
"""Timeout of an engine's health report and the pool's `check` together."""

TRIAL_SECONDS = 60.0
TRIAL_TOKENS = 16
"""Maximum tokens of a trial's reply."""

CHARACTERS_PER_TOKEN = 4
"""A rough conversion of a chat request's characters to tokens, for the engine's load and for the time that the reply
may take."""

PROBING = RetryPolicy(first=0.25, longest=15.0)


class MakesPolicy(Protocol):
    def __call__(
        self,
        members: Mapping[str, EngineRecord],
        *,
        lost: Callable[[EngineRecord, EngineError], None],
        found: Callable[[EngineRecord], None],
    ) -> Policy: ...


class PoolReply(Generic[T]):
    """The checked chunks of one generation, to be closed like a generator (`contextlib.aclosing`)."""

    def __init__(self, chunks: Callable[[PoolReply[T]], AsyncGenerator[T, None]]) -> None:
        self.serving: ServingEngine | None = None
        """Set by the pool."""
        self.earlier: tuple[VersionSpan, ...] = ()
        """Set by the pool: the version spans of the tokens that were sampled before the latest cut."""
        self._chunks = chunks(self)

    @property
    def served(self) -> ServingEngine:
        """The engine that generates the chunks, known from the first chunk on. The value may change until the last
        chunk: another engine may take over, and a chat reply that turns out to have no ids gets the mode TEXT. Raises
        EngineUnavailable before an engine has been assigned."""
        if self.serving is None:
            raise EngineUnavailable("no engine has answered yet")
        return self.serving

    def serve(self, member: EngineRecord) -> None:
        """Set the engine of the next chunks (called by the pool). Raises EngineUnavailable if the engine's
        log-probabilities differ in kind from those of the reply so far."""
        if self.earlier and self.served.logprob_kind is not member.engine.logprob_kind:
            raise EngineUnavailable(
                f"engine {member.name!r} cannot go on with a reply: its log-probabilities are of another kind",
                hint="ask again",
            )
        self.serving = member.serving()

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the first `length` tokens of a reply that was cut short or given up, and so has
        no last chunk."""
        spans = [span for span in self.earlier if span.end <= length]
        start = spans[-1].end if spans else 0
        if start < length:
            spans.append(VersionSpan(self.served.version, start, length))
        return tuple(spans)

    def __aiter__(self) -> Self:
        return self

    # These two return the generator's own awaitables: a coroutine around each would add a frame per chunk.
    def __anext__(self) -> Awaitable[T]:
        return self._chunks.__anext__()

    def aclose(self) -> Awaitable[None]:
        return self._chunks.aclose()


class EnginePool:
    """The engines of one model. Enter the pool with `async with`.

    `serves` is the name of a frozen model, None for the policy. Pools that share the set `claimed` never have two
    engines of the same name. `tokenizer` is passed to engines made from a spec. Token ids outside `vocabulary` are
    rejected. `context_tokens` is the model's context, if the settings give it. `text` makes a decoder of token ids, for
    stop strings in generations that were cut off and continued. `check` may refuse an engine (by raising an
    EngineError, such as ModelMismatch) whenever the engine joins or comes back. `patience` is how many seconds a
    request waits while no engine serves, so that no session fails while an engine restarts. `known` and `keep` let the
    policy's version outlive the pool (see `Policy`). `paces` are the paces of an earlier pool's engines, by engine name
    (see `paces()`).

    Pools of other processes may follow this pool (`follower.py`): `changes` publishes whenever `state` may have
    changed, and `note_uses` records a follower's load on the engines. A following pool is made with `follows`, which
    makes its policy.
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
    ) -> None:
        self.changes = Feed[None]()
        self._serves = serves
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context = context_tokens
        self._text = text
        self._check = check
        self._patience = patience
        self._probing = probing
        self._look_seconds = look_seconds
        self._remembered = dict(paces)
        self._members: dict[str, EngineRecord] = {}
        self._listings: dict[str, Listing] = {}
        self._departures: set[asyncio.Task[None]] = set()
        self._claimed = set() if claimed is None else claimed
        """Names of engines and lists, including those that are still joining."""
        self._affinity = Affinity()
        self._changed = asyncio.Event()
        self.failures = Failures()
        self._tasks = Chores(self.failures)
        make = follows or partial(Policy, known=known, keep=keep, changed=partial(self.changes.publish, None))
        self.policy = make(self._members, lost=self._mark_failed, found=self._mark_found)
        self._silence = SilenceWatch(
            silence,
            self.policy.gate,
            check=self._prove,
            ask=partial(self._prove, by_token=True),
            failed=self._mark_failed,
            elsewhere=self._has_another,
            start=lambda work, name: self._tasks.create_task(work, name=name),
        )

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.begin("watch for silence", self._silence.look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members.values():
            member.removed = True
            self._affinity.refresh(member)
            _stop_tasks(member.probe, member.trial, member.check, self._silence.stop(member.name))
        _stop_tasks(*(listing.task for listing in self._listings.values()), *self._departures)
        try:
            # Only a cancellation is passed on to the pool's tasks. Any other error is the caller's, and is raised by
            # the `async with` block unchanged.
            cancelled = isinstance(error, asyncio.CancelledError)
            await self._tasks.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))
        finally:
            await shielded(lambda: self.policy.leave(tuple(self._members.values())))
            await shielded(self._close_all)

    async def add(self, spec: EngineSpec) -> EngineStatus:
        """Make, start and admit an engine, or all engines of a list. Raises InvalidField for a bad spec, Conflict for a
        name in use, EngineUnavailable for an engine that does not respond or is not healthy, and the errors of `check`.
        An engine whose workers connect to the service is admitted before its first worker."""
        numbered = (f"{spec.kind}-{number}" for number in range(len(self._claimed) + 1))
        name = spec.name or next(free for free in numbered if free not in self._claimed)
        self._claim(name)
        try:
            engine = self._made(spec, name)
            try:
                await engine.start()
                if isinstance(engine, ListsEngines):
                    return await self._begin_listing(engine, spec)
                try:
                    health = await self._vet(engine)
                except EngineUnavailable as error:
                    if not isinstance(engine, AwaitsWorkers):
                        raise
                    health = EngineHealth(ok=False, detail=error.message)
                return self._admit(engine, health, kind=spec.kind, url=spec.url, owned=True, spec=spec)
            except BaseException:  # cancellation included: close the engine
                await shielded(engine.close)
                raise
        finally:
            self._unclaim(name)

    async def add_engine(self, engine: AnyEngine, *, kind: str = "in-process") -> EngineStatus:
        """Admit an engine that the caller has started and will close."""
        self._claim(engine.name)
        try:
            return self._admit(engine, await self._vet(engine), kind=kind, url=None, owned=False)
        finally:
            self._unclaim(engine.name)

    def _made(self, spec: EngineSpec, name: str) -> Any:
        """Make the engine, or the list of engines, that a spec describes, without starting it."""
        make = plugins.resolve("engine", spec.kind, field="kind")
        return make(
            EngineOptions(name=name, url=spec.url, model=spec.model, tokenizer=self._tokenizer, options=spec.options)
        )

    async def adopt(self, state: EngineState, source: EngineSpec | AnyEngine) -> None:
        """Admit an engine that the leader has checked; the caller must call `apply_state` next. Raises Conflict for a
        name in use, and InvalidField for a spec that works only in the leader's process."""
        self._claim(state.name)
        try:
            engine = self._made(source, state.name) if isinstance(source, EngineSpec) else source
            try:
                await engine.start()
                self._admit(engine, state.health, kind=state.kind, url=state.url, owned=True)
            except BaseException:
                await shielded(engine.close)
                raise
        finally:
            self._unclaim(state.name)

    def apply_state(self, state: EngineState) -> None:
        """Apply the leader's state of an engine to this pool's engine of that name."""
        member = self._members[state.name]
        member.health, member.draining = state.health, state.draining
        member.version = max(member.version, state.version)
        member.read_constraints()
        if state.pace is not None and not member.pace.known:
            member.pace.take_over(state.pace)
        if state.ok and not member.ok:
            member.probe_now.set()
        elif member.ok and not state.ok:
            member.detail = state.detail
            self._keep_out(member)
        self._affinity.refresh(member)

    def set_loads_elsewhere(self, loads: Mapping[str, float]) -> None:
        """Set the load that other processes put on each engine."""
        for name, load in loads.items():
            if (member := self._members.get(name)) is not None:
                member.load_elsewhere = load
                self._affinity.refresh(member)

    def uses(self) -> dict[str, EngineUse]:
        """Return this process's use of each engine, by engine name."""
        return {name: member.use() for name, member in self._members.items()}

    def state(self) -> PoolState:
        """Return the state that followers need."""
        gate = self.policy.gate
        return PoolState(
            closings=gate.closings,
            paused=gate.mode,
            policy_version=self.policy.known_version,
            engines=tuple(state_of(member) for member in self._members.values() if not member.removed),
            leaving={member.name: member.removal_seconds for member in self._members.values() if member.removed},
        )

    def note_uses(self, follower: str, uses: Mapping[str, EngineUse]) -> None:
        """Record a follower's current use of the engines. An empty `uses` means that the follower is gone.

        A newer version in `uses` is not adopted but triggers a check of the engine: versions do not go back, so a false
        version would stay.
        """
        for name, member in self._members.items():
            use = uses.get(name)
            member.note_use(follower, use)
            if use is not None and use.version > max(member.version, member.looked_for):
                member.looked_for = use.version
                self.check_engine(name)
            if use is not None and use.pace is not None and not member.pace.known:
                member.pace.take_over(use.pace)
                self.changes.publish(None)

    def paces(self) -> dict[str, RememberedPace]:
        """Return the known paces of the engines, by engine name."""
        known = {name: (member, member.known_pace()) for name, member in self._members.items()}
        return {
            name: RememberedPace(kind=member.kind, url=member.url, pace=pace)
            for name, (member, pace) in known.items()
            if pace is not None
        }

    def loads(self, followers: Sequence[str]) -> list[dict[str, float]]:
        """Return, for each of these followers, the load on each engine by all other followers."""
        all_loads = {name: sum(use.load for use in member.uses.values()) for name, member in self._members.items()}

        def own(name: str, follower: str) -> float:
            use = self._members[name].uses.get(follower)
            return 0.0 if use is None else use.load

        return [{name: load - own(name, follower) for name, load in all_loads.items()} for follower in followers]

    def check_engine(self, name: str) -> None:
        """Check an engine that a follower could not use, or for which a follower reports a newer version."""
        member = self._members.get(name)
        if member is None or not member.serves or member.check is not None:
            return

        async def look() -> None:
            try:
                health = await self._vet(member.engine)
                if (outdated := self.policy.outdated(member.engine, health)) is not None:
                    raise outdated
                if (version := self.policy.version_of(member.engine, health)) > member.version:
                    member.version = version
                    self.changes.publish(None)
            except EngineError as error:
                self._mark_failed(member, error)
            finally:
                member.check = None

        member.check = self._tasks.create_task(look(), name=f"look at {name}")

    async def forward(self, name: str, request: AnyRequest) -> AsyncGenerator[Chunk | ChatChunk, None]:
        """Run a generation for a follower on an engine that only this process has. The follower checks the reply.
        Raises the engine's errors, and EngineUnavailable if the engine was removed."""
        if (engine := self.engine(name)) is None:
            raise EngineUnavailable(f"engine {name!r} was removed")
        if isinstance(request, GenerateRequest):  # a follower's process may send anything
            check_ids(request, self._vocabulary)
        try:
            async with aclosing(_begun(engine, request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except OutriderError:
            raise
        except Exception as error:  # an engine's code may raise any error
            raise mistake_of(engine.name, error) from error

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def __contains__(self, name: str) -> bool:
        """Return True if an engine, or a list of engines, has this name."""
        return self.engine(name) is not None or name in self._listings

    def engine(self, name: str) -> AnyEngine | None:
        """Return the engine of that name, or None."""
        member = self._members.get(name)
        return None if member is None or member.removed else member.engine

    def probe_now(self, name: str) -> None:
        """Probe an engine that is down without further delay. The caller has a sign that the engine may be back."""
        if (member := self._members.get(name)) is not None:
            member.probe_now.set()

    async def check(self, engine: AnyEngine) -> None:
        """Run the pool's `check` on an engine, or on a worker of an engine, and raise the check's errors."""
        if self._check is not None:
            await self._check(engine)

    def drain(self, name: str) -> EngineStatus:
        """Assign no new session to the engine. Its present sessions stay. A drained list adds no new engine either.
        Raises NotFound."""
        if (listing := self._listings.get(name)) is not None:
            listing.draining = True
            _stop_tasks(listing.task)
            for engine in listing.engines.values():
                with suppress(NotFound):
                    self.drain(engine)
            return self._listing_status(listing)
        member = self._member(name)
        member.draining = True
        self._affinity.refresh(member)
        self.changes.publish(None)
        return member.status()

    async def remove(self, name: str, *, seconds: float = REMOVAL_SECONDS) -> None:
        """Remove an engine, or a list with all its engines. The sessions move to other engines with their next turn.
        Generations in flight have `seconds` to end. Then an engine that the pool owns is closed, which cuts them off.
        Raises NotFound."""
        if (listing := self._listings.pop(name, None)) is not None:
            try:
                await self._end_listing(listing, seconds=seconds)
            finally:
                self._unclaim(name)
            return
        member = self._member(name)
        member.remove(seconds)
        self._affinity.refresh(member)
        self.changes.publish(None)
        _stop_tasks(member.probe, member.trial, member.check, self._silence.stop(member.name))
        try:
            async with asyncio.timeout(seconds):
                await member.idle.wait()
        except TimeoutError:
            member.detail = "removed with generations in flight"
        finally:
            if (pace := self.paces().get(name)) is not None:
                self._remembered[name] = pace
            self._members.pop(name, None)
            self._unclaim(name)
            await shielded(lambda: self.policy.leave((member,)))
            if member.owned:
                await shielded(member.engine.close)

    def status(self) -> list[EngineStatus]:
        """Return the status of every list of engines and every engine, in the order they were added."""
        listings = [self._listing_status(listing) for listing in self._listings.values()]
        return listings + [member.status() for member in self._members.values()]

    async def select(self, session_key: str, overdue: Overdue | None = None) -> ServingEngine:
        """Return the session's engine, preferably an engine that takes tokens. The engine's mode shows whether
        `generate` or `chat` has to be called next. Raises EngineUnavailable if no engine serves within `patience`
        seconds.

        This call moves a session from an overloaded engine to the least loaded engine, so make the call between
        generations.
        """
        self._affinity.rebalance(session_key)
        return (await self._engine_for(session_key, (True, False), overdue)).serving()

    def generate(self, request: GenerateRequest, overdue: Overdue | None = None) -> PoolReply[Chunk]:
        """Generate on the session's engine. Another engine takes over if this engine fails or misbehaves before the
        first chunk. A reply that is cut off later, by a pause of the policy or by its engine's silence, is continued if
        the request's sampling allows that (`continuable`). `overdue` receives the seconds that the session waits longer
        than is due.

        Raises the errors of `Engine.generate` and of `check_ids`, EngineUnavailable if no engine serves within
        `patience` seconds, and EngineMisbehaved for an impossible reply.
        """
        return PoolReply(lambda reply: cast(AsyncGenerator[Chunk, None], self._chunks(reply, request, overdue)))

    def chat(self, request: ChatRequest, overdue: Overdue | None = None) -> PoolReply[ChatChunk]:
        """Generate like `generate`, on an engine that takes messages."""
        return PoolReply(lambda reply: cast(AsyncGenerator[ChatChunk, None], self._chunks(reply, request, overdue)))

    def release(self, session_key: str) -> None:
        """End the session, and take its load off its engine. Idempotent."""
        self._affinity.release(session_key)

    async def _chunks(
        self, reply: PoolReply[Any], request: AnyRequest, overdue: Overdue | None
    ) -> AsyncGenerator[Chunk | ChatChunk, None]:
        clock, gate = asyncio.get_running_loop().time, self.policy.gate
        session_key, takes_tokens = request.session_key, isinstance(request, GenerateRequest)
        if isinstance(request, GenerateRequest):
            check_ids(request, self._vocabulary)
            prompt_tokens = len(request.input_ids)
        else:
            prompt_tokens = sum(len(message.content) for message in request.messages) // CHARACTERS_PER_TOKEN
        cuttable = request if isinstance(request, GenerateRequest) and continuable(request.sampling) else None
        whole = cuttable is None
        asked = request
        earlier: ContinuedGeneration | None = None
        give_up_at: float | None = None
        avoid: str | None = None
        failed = dropped = 0
        while True:
            member = await self._engine_for(session_key, (takes_tokens,), overdue, avoid)
            if gate.mode is not None:
                await self._gate_opened(overdue)
                give_up_at = None
                continue
            reply.serve(member)
            generated, begun = 0, False
            cut: Chunk | None = None
            cuts, version = gate.cuts, member.version
            check = self._check_of(asked, member.name)
            new_tokens = prompt_tokens - self._affinity.context(session_key, member)
            member.enter()
            gate.enter(whole=whole)
            self._affinity.set_context(session_key, member, prompt_tokens)
            self._affinity.refresh(member)
            try:
                async with AsyncExitStack() as flying:
                    chunks = await flying.enter_async_context(aclosing(_begun(member.engine, asked)))
                    flight = self._silence.begin(member, asked, prompt_tokens, new_tokens, chunks, overdue)
                    flying.callback(self._silence.end, flight, overdue)
                    async for chunk in flight:
                        generated += check.take(chunk)
                        begun = True
                        if chunk.finish is not None:
                            ours = cuts != gate.cuts  # a pause came between: the version may be old
                            # If somebody else has paused the engine, the request is repeated only if no token would be
                            # lost.
                            again = cuttable is not None if ours else not generated and dropped < FAILOVERS
                            if chunk.finish is FinishReason.ABORT and takes_tokens and again:
                                dropped += not ours
                                cut = chunk
                                break
                            if chunk.versions and not ours:
                                member.version = chunk.versions[-1].version
                            if isinstance(chunk, ChatChunk) and chunk.output_ids is None:
                                reply.serving = msgspec.structs.replace(
                                    reply.served, mode=TokenMode.TEXT, logprob_kind=LogprobKind.NONE
                                )
                        if earlier is None:
                            yield chunk
                            continue
                        given = earlier.take(chunk, version)
                        yield given
                        if given.finish is not None:
                            return
                member.failed_probes = 0
                if cut is None:
                    return
                earlier = earlier or ContinuedGeneration(cast(GenerateRequest, request), self._text)
                given = earlier.take(msgspec.structs.replace(cut, finish=None, versions=()), version)
                yield given
                if given.finish is not None:
                    return
                earlier.cut(cast(TokenCheck, check).ids, cut, version)
            except EngineUnavailable as error:
                silent = isinstance(error, EngineSilent)
                if silent:  # the silence watch has marked the engine as failed, unless only this call was lost
                    self._affinity.leave(session_key, member)
                    avoid = member.name
                else:
                    self._mark_failed(member, error)
                failed += 1
                give_up_at = give_up_at or clock() + self._patience
                ended_it = gate.mode is not None or cuts != gate.cuts
                if (ended_it or (silent and failed <= FAILOVERS)) and cuttable is not None:
                    earlier = earlier or ContinuedGeneration(cuttable, self._text)
                    earlier.cut(cast(TokenCheck, check).ids, None, version)
                elif begun or clock() >= give_up_at or failed > max(FAILOVERS, len(self._members)):
                    raise
            except (EngineMisbehaved, ContextOverflow) as error:
                known = self._context or member.health.context_tokens
                fault = (
                    overflow_fault(member.name, asked, known, error) if isinstance(error, ContextOverflow) else error
                )
                if fault is None:
                    raise
                self._mark_suspect(member, fault, request)
                failed += 1
                if begun or failed > FAILOVERS or not self._affinity.trusts(takes_tokens):
                    raise fault from (None if fault is error else error)
            except OutriderError:
                raise
            except Exception as error:  # an engine's code may raise any error
                mistake = mistake_of(member.name, error)
                self._mark_suspect(member, mistake, request)
                raise mistake from error
            finally:
                member.leave(generated)
                gate.leave(whole=whole)
                self._affinity.set_context(session_key, member, prompt_tokens + generated)
                self._affinity.refresh(member)
            if earlier is not None:
                if (last := earlier.ended()) is not None:
                    yield last
                    return
                reply.earlier = earlier.versions
                asked = earlier.request()
                prompt_tokens = len(asked.input_ids)

    def _check_of(self, request: AnyRequest, engine: str) -> TokenCheck | ChatCheck:
        kind = TokenCheck if isinstance(request, GenerateRequest) else ChatCheck
        return kind(engine, request.sampling, self._vocabulary)

    async def _engine_for(
        self, session_key: str, kinds: tuple[bool, ...], overdue: Overdue | None, avoid: str | None = None
    ) -> EngineRecord:
        member = self._affinity.pick(session_key, kinds, avoid)
        if member is not None:
            return member
        try:
            async with asyncio.timeout(self._patience):
                with nullcontext() if overdue is None else overdue.waiting("an engine that serves"):
                    return await self._next_engine(session_key, kinds)
        except TimeoutError:
            if self.policy.gate.mode is not None:  # engines may be down for as long as the policy is paused
                await self._gate_opened(overdue)
                return await self._engine_for(session_key, kinds, overdue, avoid)
            troubles = "; ".join(f"{known.name}: {known.detail}" for known in self._members.values() if known.detail)
            what = "this request" if self._serves is None else f"a request to the frozen model {self._serves!r}"
            raise EngineUnavailable(
                f"no engine to serve {what} within {self._patience:g} s" + (f" ({troubles})" if troubles else ""),
                hint="attach an engine, or look at the state of those attached",
            ) from None

    async def _gate_opened(self, overdue: Overdue | None) -> None:
        with nullcontext() if overdue is None else overdue.held():
            await self.policy.gate.opened()

    def _has_another(self, member: EngineRecord) -> bool:
        """Return True if another engine could take this engine's calls."""
        return any(
            other is not member
            and other.takes_tokens == member.takes_tokens
            and other.takes_sessions
            and other.suspect is None
            for other in self._members.values()
        )

    async def _next_engine(self, session_key: str, kinds: tuple[bool, ...]) -> EngineRecord:
        """Wait until an engine serves, and return the session's engine."""
        while (member := self._affinity.pick(session_key, kinds)) is None:
            await self._changed.wait()
        return member

    async def _begin_listing(self, source: ListsEngines, spec: EngineSpec) -> EngineStatus:
        def leave(name: str) -> None:
            departure = self._tasks.create_task(
                self._remove_any([name], DEPARTURE_SECONDS), name=f"departure of {name}"
            )
            self._departures.add(departure)
            departure.add_done_callback(self._departures.discard)

        listing = Listing(
            source,
            kind=spec.kind,
            url=spec.url,
            serves=self._serves,
            add=self.add,
            leave=leave,
            urls=lambda: [member.url for member in self._members.values()],
        )
        try:
            await listing.begin()
        except BaseException:
            await shielded(lambda: self._remove_any(tuple(listing.engines.values()), 0))
            raise
        self._listings[source.name] = listing
        listing.task = self._tasks.create_task(listing.follow(self._look_seconds), name=f"list of {source.name}")
        return self._listing_status(listing)

    async def _end_listing(self, listing: Listing, *, seconds: float) -> None:
        try:
            if listing.task is not None:
                listing.task.cancel()
                await asyncio.wait([listing.task])
            await self._remove_any(tuple(listing.engines.values()), seconds)
        finally:
            await shielded(listing.source.close)

    def _listing_status(self, listing: Listing) -> EngineStatus:
        return listing.status([member.name for member in self._members.values() if member.serves], self.policy.version)

    async def _remove_any(self, names: Sequence[str], seconds: float) -> None:
        """Remove the named engines that are in the pool, concurrently."""
        there = [name for name in names if name in self._members and not self._members[name].removed]
        await asyncio.gather(*(self.remove(name, seconds=seconds) for name in there))

    async def _vet(self, engine: AnyEngine) -> EngineHealth:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                health = await engine.health()
            if not health.ok:
                raise EngineUnavailable(
                    f"engine {engine.name!r} is not healthy: {health.detail[:MAX_QUOTED]}", field="url"
                )
            await self.check(engine)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"engine {engine.name!r} does not say how it is ({HEALTH_SECONDS:.0f} s)", field="url"
            ) from error
        except OutriderError:
            raise
        except Exception as error:  # an engine's code may raise any error
            raise mistake_of(engine.name, error) from error
        check_health(engine.name, health)
        return health

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
        self._members[member.name] = member
        if not health.ok:
            member.detail = health.detail
            self._keep_out(member)
        elif (outdated := self.policy.outdated(engine, health)) is not None:
            member.behind, member.detail = True, outdated.message
            self._keep_out(member)
        self._affinity.refresh(member)
        self._notify()
        return member.status()

    async def _prove(
        self, member: EngineRecord, request: AnyRequest, seconds: float, *, by_token: bool = False
    ) -> EngineHealth | None:
        """Check that an engine generates a token within `seconds`, and return its health. For an engine whose workers
        connect to the service, the connection suffices unless `by_token` is set: the workers' model may be slow.
        Returns None if the policy is, or becomes, paused: a pause does not wait for this check. Raises EngineError."""
        gate = self.policy.gate
        closings, engine = gate.closings, member.engine
        if gate.mode is not None:
            return None
        try:
            async with asyncio.timeout(seconds) as clock:
                with gate.ended_by_closing(clock):
                    health = await self._vet(engine)
                    if by_token or not member.awaits_workers:
                        with suppress(EngineRejected, ContextOverflow):  # a refusal shows that the engine works
                            await self._read_small_reply(engine, request, whole=False)
                    return health
        except TimeoutError:
            if gate.mode is not None or gate.closings != closings:
                return None
            raise EngineUnavailable(f"engine {engine.name!r} did not give one token within {seconds:.0f} s") from None
        except EngineError:
            raise
        except Exception as error:  # an engine's code may raise any error
            raise mistake_of(engine.name, error) from error

    def _mark_failed(self, member: EngineRecord, error: EngineError) -> None:
        """Assign no more work to the engine, and probe it until it is back."""
        member.failures += 1
        member.detail = error.message
        if member.serves:
            self._keep_out(member)
            self.policy.note_failure(member)

    def _keep_out(self, member: EngineRecord) -> None:
        member.ok = False
        self._affinity.refresh(member)
        self.changes.publish(None)
        if member.probe is not None:  # an earlier probe may still run, although the engine was found meanwhile
            member.probe.cancel()
        member.probe = self._tasks.until_done(f"probe {member.name}", lambda: self._probe(member))

    async def _probe(self, member: EngineRecord) -> None:
        while not member.ok:
            await wait_for_event(member.probe_now, self._probing.wait(member.failed_probes))
            member.probe_now.clear()
            member.failed_probes += 1
            try:
                if member.silent is None:
                    member.health = await self._vet(member.engine)
                else:
                    await self.policy.gate.opened()
                    if (health := await self._prove(member, member.silent, TRIAL_SECONDS)) is None:
                        member.probe_now.set()
                        continue
                    member.health = health
            except EngineError as error:
                member.behind, member.detail = False, error.message
                continue
            try:
                version = await self.policy.catch_up(member, member.health)
            except EngineError as error:
                member.detail = error.message
            else:
                member.version = version
                self._mark_found(member)

    def _mark_found(self, member: EngineRecord) -> None:
        """Mark the engine as serving again."""
        member.ok, member.behind, member.detail, member.silent = True, False, "", None
        member.read_constraints()
        self._affinity.refresh(member)
        self._notify()

    def _mark_suspect(self, member: EngineRecord, error: EngineMisbehaved, request: AnyRequest) -> None:
        """Assign new sessions to the engine only if there is no better engine, and start trials to clear it. The
        session of the impossible reply loses its engine, and may be assigned another."""
        self._affinity.leave(request.session_key, member)
        member.misbehaved += 1
        if member.suspect is None:
            log.warning("engine %s is suspect: %s", member.name, error.message)
        member.suspect = error.message
        self._affinity.refresh(member)
        if member.trial is None and not member.removed:
            member.trial = self._tasks.create_task(self._run_trials(member, request), name=f"trial {member.name}")

    async def _run_trials(self, member: EngineRecord, request: AnyRequest) -> None:
        """Clear a suspect engine after `GOOD_REPLIES` passed trials in a row. The engine passes a trial if it is
        healthy, sends a good short reply to the request that made it suspect, and misbehaves to no session
        meanwhile."""
        good = failed = 0
        while good < GOOD_REPLIES:
            before = member.misbehaved
            await asyncio.sleep(self._probing.wait(before - 1 + failed))
            await self.policy.gate.opened()
            try:
                async with asyncio.timeout(TRIAL_SECONDS):
                    await self._vet(member.engine)
                    await self._read_small_reply(member.engine, request)
            except EngineMisbehaved as error:
                good = 0
                member.misbehaved += 1
                member.suspect = error.message
            except Exception:  # an engine may be down or slow, and its code may raise any error
                good, failed = 0, failed + 1
            else:
                good = good + 1 if member.misbehaved == before else 0
        log.warning("engine %s is trusted again", member.name)
        member.suspect, member.trial = None, None
        self._affinity.refresh(member)

    async def _read_small_reply(self, engine: AnyEngine, request: AnyRequest, *, whole: bool = True) -> None:
        """Read and check a whole reply of few tokens to a copy of the request. Raises the errors of the engine and of
        the check. Unless `whole`, any first chunk suffices: it shows that the engine is not silent."""
        name = uuid4().hex
        few = msgspec.structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, TRIAL_TOKENS))
        trial = msgspec.structs.replace(request, request_id=name, session_key=name, sampling=few)
        check, finished = self._check_of(trial, engine.name), False
        await self.policy.gate.opened()
        self.policy.gate.enter(whole=True)
        try:
            async with aclosing(_begun(engine, trial)) as chunks:
                async for chunk in chunks:
                    if not whole:
                        return
                    check.take(chunk)
                    finished = chunk.finish is not None
        finally:
            self.policy.gate.leave(whole=True)
        if not finished:
            raise EngineUnavailable(f"engine {engine.name!r} ended its stream before the reply's end")

    def _member(self, name: str) -> EngineRecord:
        if (member := self._members.get(name)) is None or member.removed:
            raise NotFound(f"no engine {name!r}", field="name")
        return member

    def _claim(self, name: str) -> None:
        if name in self._claimed:
            raise Conflict(f"there is an engine {name!r} already", field="name")
        self._claimed.add(name)

    def _unclaim(self, name: str) -> None:
        """Free a name, unless an engine or list of that name is in the pool."""
        if name not in self._members and name not in self._listings:
            self._claimed.discard(name)

    def _notify(self) -> None:
        """Wake every request that waits for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.changes.publish(None)

    async def _close_all(self) -> None:
        async with AsyncExitStack() as stack:
            for member in self._members.values():
                if member.owned:
                    stack.push_async_callback(member.engine.close)
            for listing in self._listings.values():
                stack.push_async_callback(listing.source.close)
        self._members.clear()
        self._listings.clear()


def _begun(engine: AnyEngine, request: AnyRequest) -> AsyncGenerator[Any, None]:
    """Return the engine's own stream of chunks for a request of either kind."""
    if isinstance(request, GenerateRequest):
        return cast(Engine, engine).generate(request)
    return cast(ChatEngine, engine).chat(request)


def _stop_tasks(*tasks: asyncio.Task[None] | None) -> None:
    for task in tasks:
        if task is not None:
            task.cancel()
