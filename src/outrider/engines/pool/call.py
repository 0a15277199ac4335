"""Runs one call on the engines of a pool: chooses an engine, sends the request, checks each chunk, and retries after
failures.

Another engine takes over if the session's engine fails or misbehaves before the first chunk. A generation may be cut
off by a pause of the policy, or because its engine is silent. It then continues as a new request if possible
(`ContinuedGeneration`). Invariant: a generation that cannot continue is retried only if its consumer has received no
token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, Generic, Self, TypeVar, cast

import msgspec

from outrider.engines.base import AnyRequest, ChatChunk, ChatRequest, Chunk, GenerateRequest, chunks_of
from outrider.engines.pool.checks import (
    TokenCheck,
    check_ids,
    check_of,
    mistake_of,
    overflow_fault,
)
from outrider.engines.pool.continuation import ContinuedGeneration
from outrider.engines.pool.flights import CHARACTERS_PER_TOKEN, Flight, Flights
from outrider.engines.pool.health import HealthChecks
from outrider.engines.pool.placement import EngineRecord, Placement, ServingEngine, serving
from outrider.engines.pool.waits import Overdue, loop_time
from outrider.errors import (
    ContextOverflow,
    EngineMisbehaved,
    EngineSilent,
    EngineUnavailable,
    OutriderError,
)
from outrider.tokens.rendering.tokenizer import TextStream, Vocabulary
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan

T = TypeVar("T", bound=Chunk | ChatChunk)

FAILOVERS = 3
"""Maximum retries of a request. After more failures the request itself may be the cause. If engines are unavailable,
and the pool has more engines than this, the maximum is the number of engines."""


class EngineCalls:
    """Runs calls on the engines in `members`. `EnginePool` describes the arguments after `flights`."""

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        placement: Placement,
        health: HealthChecks,
        flights: Flights,
        *,
        serves: str | None,
        vocabulary: Vocabulary,
        context_tokens: int | None,
        text: Callable[[], TextStream] | None,
        patience: float,
    ) -> None:
        self.members = members
        self.placement = placement
        self.health = health
        self.flights = flights
        self.gate = health.policy.gate
        self.vocabulary = vocabulary
        self.context = context_tokens
        self.text = text
        self.patience = patience
        self._serves = serves

    async def select(self, session_key: str, overdue: Overdue | None = None) -> ServingEngine:
        """Return the session's engine, preferably an engine that takes tokens. The engine's mode shows whether
        `generate` or `chat` has to be called next. Raises EngineUnavailable if no engine serves within `patience`
        seconds.

        If the session's engine is overloaded, this call moves the session to the least loaded engine. Call it only
        between two generations of the session.
        """
        self.placement.rebalance(session_key)
        return serving(await self.engine_for(session_key, (True, False), overdue))

    def generate(self, request: GenerateRequest, overdue: Overdue | None = None) -> PoolReply[Chunk]:
        """Generate on the session's engine. Another engine takes over if this engine fails or misbehaves before the
        first chunk. A reply that is cut off later, by a pause of the policy or because its engine stops responding, is
        continued if the request's sampling allows it (`SamplingParams.continuable`). `overdue` counts the seconds by
        which the session's waits are too long.

        Raises the errors of `Engine.generate` and of `check_ids`, EngineUnavailable if no engine serves within
        `patience` seconds, and EngineMisbehaved for an impossible reply.
        """
        return PoolReply(self, request, overdue)

    def chat(self, request: ChatRequest, overdue: Overdue | None = None) -> PoolReply[ChatChunk]:
        """Generate on an engine that takes messages. Failover, `overdue` and errors are the same as for `generate`."""
        return PoolReply(self, request, overdue)

    async def engine_for(
        self, session_key: str, kinds: tuple[bool, ...], overdue: Overdue | None, avoid: str | None = None
    ) -> EngineRecord:
        """Return the session's engine (`Placement.pick`). Waits if no engine serves, and raises EngineUnavailable after
        the pool's patience."""
        if (member := self.placement.pick(session_key, kinds, avoid)) is not None:
            return member
        try:
            async with asyncio.timeout(self.patience):
                with nullcontext() if overdue is None else overdue.waiting("an engine that serves"):
                    while (member := self.placement.pick(session_key, kinds)) is None:
                        await self.placement.arrivals.next().wait()
                    return member
        except TimeoutError:
            # A pause does not use up the patience, because engines may be down during a pause.
            if self.gate.mode is not None:
                await self.gate_opened(overdue)
                return await self.engine_for(session_key, kinds, overdue, avoid)
            troubles = "; ".join(f"{known.name}: {known.detail}" for known in self.members.values() if known.detail)
            what = "this request" if self._serves is None else f"a request to the frozen model {self._serves!r}"
            raise EngineUnavailable(
                f"no engine to serve {what} within {self.patience:g} s" + (f" ({troubles})" if troubles else ""),
                hint="attach an engine, or look at the state of those attached",
            ) from None

    async def gate_opened(self, overdue: Overdue | None) -> None:
        with nullcontext() if overdue is None else overdue.held():
            await self.gate.opened()


class PoolReply(Generic[T]):
    """One call. The reply is an async iterator over checked chunks. The consumer must close it like a generator, with
    `contextlib.aclosing`. `serving` is the engine of the next chunks, None before an engine has been assigned."""

    def __init__(self, calls: EngineCalls, request: AnyRequest, overdue: Overdue | None) -> None:
        self.serving: ServingEngine | None = None
        self._calls = calls
        self._request = request
        self._overdue = overdue
        tokens = request if isinstance(request, GenerateRequest) else None
        self._cuttable = tokens if tokens is not None and tokens.sampling.continuable else None
        """The request if its reply can be continued after a cut, otherwise None."""
        self._continued: ContinuedGeneration | None = None
        """The reply over all its requests, None while there was no cut."""
        self._avoid: str | None = None
        self._give_up_at: float | None = None
        self._failed = self._dropped = 0
        self._chunks = self._run()

    @property
    def served(self) -> ServingEngine:
        """The engine that generates the chunks, available from the first chunk on. The value may change until the last
        chunk: another engine may take over, and a chat reply without ids in its last chunk gets the mode TEXT. Raises
        EngineUnavailable before an engine has been assigned."""
        if self.serving is None:
            raise EngineUnavailable("no engine has answered yet")
        return self.serving

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the first `length` tokens of a reply that has no last chunk, because it was ended
        early or given up."""
        earlier = () if self._continued is None else self._continued.versions
        spans = [span for span in earlier if span.end <= length]
        start = spans[-1].end if spans else 0
        if start < length:
            spans.append(VersionSpan(self.served.version, start, length))
        return tuple(spans)

    def __aiter__(self) -> Self:
        return self

    # `__anext__` and `aclose` return the generator's own awaitables, because a coroutine would add a frame per chunk.
    def __anext__(self) -> Awaitable[T]:
        return self._chunks.__anext__()

    def aclose(self) -> Awaitable[None]:
        return self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[Any, None]:
        """Yield the checked chunks of the whole reply. `EngineCalls.generate` describes the errors."""
        calls, asked = self._calls, self._request
        if isinstance(asked, GenerateRequest):
            check_ids(asked, calls.vocabulary)
        kinds = (isinstance(asked, GenerateRequest),)
        while True:
            member = await calls.engine_for(asked.session_key, kinds, self._overdue, self._avoid)
            if calls.gate.mode is not None:
                await calls.gate_opened(self._overdue)
                self._give_up_at = None
                continue
            self._check_same_kind(member)
            self.serving = serving(member)
            attempt = _Attempt(calls, member, asked, whole=self._cuttable is None)
            check, continued = attempt.check, self._continued
            cut: Chunk | None = None
            try:
                async with aclosing(chunks_of(member.engine, asked)) as chunks:
                    with Flight(
                        calls.flights, member, asked, attempt.prompt_tokens, attempt.new_tokens, chunks, self._overdue
                    ) as flight:
                        async for chunk in flight:  # this loop runs once per chunk, so its short steps are inlined
                            attempt.generated += check.take(chunk)
                            attempt.begun = True
                            if chunk.finish is not None and self._is_cut(attempt, chunk):
                                cut = chunk
                                break
                            if continued is None:
                                yield chunk
                                continue
                            given = continued.take(chunk, attempt.version)
                            yield given
                            if given.finish is not None:
                                return
                member.failed_probes = 0
                if cut is None:
                    return
                given = self._to_continue().take(
                    msgspec.structs.replace(cut, finish=None, versions=()), attempt.version
                )
                yield given
                if given.finish is not None:
                    return
                self._end_part(attempt, cut)
            # An error that is raised while a local variable refers to it forms a reference cycle. The cycle would keep
            # the call's request in memory until a garbage collection.
            except EngineUnavailable as error:
                if not self._note_failure(attempt, error):
                    raise
            except EngineMisbehaved as error:
                if not self._note_misbehaviour(attempt, error):
                    raise
            except ContextOverflow as error:
                context = calls.context or member.health.context_tokens
                fault = overflow_fault(member.name, asked, context, error)
                try:
                    if fault is None:  # the prompt is really too long
                        raise
                    if not self._note_misbehaviour(attempt, fault):
                        raise fault from error
                finally:
                    del fault
            except OutriderError:
                raise
            except Exception as error:  # an engine's code may raise any error
                raise self._mistake(member, error) from error
            finally:
                attempt.end()
            if self._continued is not None:
                if (end := self._continued.ended()) is not None:
                    yield end
                    return
                asked = self._continued.request()

    def _check_same_kind(self, member: EngineRecord) -> None:
        """Raise EngineUnavailable if the engine's kind of log-probabilities differs from that of the reply so far, or
        if the engine does not take the images of the request."""
        images = self._request.images if isinstance(self._request, GenerateRequest) else ()
        if images and (form := serving(member).image_form) is not images[0].form:
            takes = "no images" if form is None else f"images as {form}, and not as {images[0].form}"
            raise EngineUnavailable(f"engine {member.name!r} takes {takes}", hint="ask again")
        begun = self._continued is not None and self._continued.versions
        if begun and self.served.logprob_kind is not member.engine.logprob_kind:
            raise EngineUnavailable(
                f"engine {member.name!r} cannot go on with a reply: its log-probabilities are of another kind",
                hint="ask again",
            )

    def _is_cut(self, attempt: _Attempt, chunk: Any) -> bool:
        """Record the last chunk of an engine's reply. Returns True if the reply was cut off and continues as a new
        request."""
        # `ours` is True if this pool was paused during the generation. The chunk's version may then be old.
        ours = attempt.cuts != self._calls.gate.cuts
        if chunk.finish is FinishReason.ABORT and attempt.member.takes_tokens:
            # If something outside this pool has aborted the generation, it is repeated only if it had no token yet.
            again = self._cuttable is not None if ours else not attempt.generated and self._dropped < FAILOVERS
            if again:
                self._dropped += not ours
                return True
        if chunk.versions and not ours:
            attempt.member.version = chunk.versions[-1].version
        if isinstance(chunk, ChatChunk) and chunk.output_ids is None:
            self.serving = msgspec.structs.replace(self.served, mode=TokenMode.TEXT, logprob_kind=LogprobKind.NONE)
        return False

    def _to_continue(self) -> ContinuedGeneration:
        self._continued = self._continued or ContinuedGeneration(cast(GenerateRequest, self._request), self._calls.text)
        return self._continued

    def _end_part(self, attempt: _Attempt, last: Chunk | None) -> None:
        """Record the tokens of an engine whose reply continues as a new request. `last` is the engine's last chunk."""
        self._to_continue().cut(cast(TokenCheck, attempt.check).ids, last, attempt.version)

    def _note_failure(self, attempt: _Attempt, error: EngineUnavailable) -> bool:
        """Record the engine's failure. Returns True if another engine can take over."""
        calls, member, gate, now = self._calls, attempt.member, self._calls.gate, loop_time()
        silent = isinstance(error, EngineSilent)
        if silent:  # not marked as failed, because SilenceWatch does this if no call of the engine gets a chunk
            calls.placement.leave(self._request.session_key, member)
            self._avoid = member.name
        else:
            calls.health.mark_failed(member, error)
        self._failed += 1
        if attempt.begun or self._give_up_at is None:  # a chunk from this engine restarts the patience
            self._give_up_at = now + calls.patience
        ended_it = gate.mode is not None or attempt.cuts != gate.cuts
        if (ended_it or (silent and self._failed <= FAILOVERS)) and self._cuttable is not None:
            self._end_part(attempt, None)
            return True
        return not attempt.begun and now < self._give_up_at and self._failed <= max(FAILOVERS, len(calls.members))

    def _mistake(self, member: EngineRecord, error: Exception) -> EngineMisbehaved:
        """Mark an engine as suspect because its code raised an unexpected exception. Returns the EngineMisbehaved to
        raise instead."""
        mistake = mistake_of(member.name, error)
        self._calls.health.mark_suspect(member, mistake, self._request)
        return mistake

    def _note_misbehaviour(self, attempt: _Attempt, fault: EngineMisbehaved) -> bool:
        """Record the engine's misbehaviour. Returns True if another engine can take over."""
        calls, member = self._calls, attempt.member
        calls.health.mark_suspect(member, fault, self._request)
        self._failed += 1
        return not attempt.begun and self._failed <= FAILOVERS and calls.placement.has_unsuspected(member.takes_tokens)


class _Attempt:
    """One request of a call to one engine.

    - `generated`: number of tokens received.
    - `begun`: True once a chunk has passed the checks.
    - `new_tokens`: number of prompt tokens that are not in the session's context on this engine.
    - `version`, `cuts`: the engine's policy version and the gate's number of cuts when the request began."""

    def __init__(self, calls: EngineCalls, member: EngineRecord, asked: AnyRequest, *, whole: bool) -> None:
        self.member = member
        self.check = check_of(asked, member.name, calls.vocabulary)
        self.version = member.version
        self.cuts = calls.gate.cuts
        self.generated = 0
        self.begun = False
        self.prompt_tokens = (
            len(asked.input_ids)
            if isinstance(asked, GenerateRequest)
            else sum(len(message.content) for message in asked.messages) // CHARACTERS_PER_TOKEN
        )
        self.new_tokens = self.prompt_tokens - calls.placement.context(asked.session_key, member)
        self._calls = calls
        self._session_key = asked.session_key
        self._whole = whole
        member.enter()
        calls.gate.enter(whole=whole)
        self._note_context()

    def end(self) -> None:
        """Count the end of the generation, successful or not."""
        self.member.leave(self.generated)
        self._calls.gate.leave(whole=self._whole)
        self._note_context()

    def _note_context(self) -> None:
        placement = self._calls.placement
        placement.set_context(self._session_key, self.member, self.prompt_tokens + self.generated)
        placement.refresh(self.member)
