"""Runs one model call on the engines of a pool: chooses an engine, sends the request, checks each chunk, and tries
again after failures.

If the session's engine fails or misbehaves before the first chunk, another engine takes over. A generation may be cut
off by a pause of the policy, or because its engine is silent. If possible, the generation then continues as a new
request (`ContinuedGeneration`). Invariant: a generation that cannot continue is tried again only if its consumer has
received no token.
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
"""Maximum number of retries of a call: after more failures, the request itself may be the cause. A call that fails
because engines are unavailable may be retried as often as there are engines in the pool, if this number is larger."""


class EngineCalls:
    """Runs calls on the engines in `members`. The arguments after `flights` are explained in `EnginePool`."""

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
        """Return the session's engine, preferably one that takes token ids. Its `mode` shows whether to call `generate`
        or `chat` next. Raises EngineUnavailable if no engine serves within `patience` seconds.

        If the session's engine is overloaded, the session moves to the least loaded engine. So call this method only
        between two generations of the session.
        """
        self.placement.rebalance(session_key)
        return serving(await self.engine_for(session_key, (True, False), overdue))

    def generate(self, request: GenerateRequest, overdue: Overdue | None = None) -> PoolReply[Chunk]:
        """Generate on the session's engine. If it fails or misbehaves before the first chunk, another engine takes
        over. A reply that is cut off later, by a pause of the policy or because the engine stops responding, continues
        if the request's sampling allows it (`SamplingParams.continuable`). `overdue` counts the seconds by which the
        session waits too long.

        Raises the errors of `Engine.generate` and of `check_ids`, EngineUnavailable if no engine serves within
        `patience` seconds, and EngineMisbehaved for an impossible reply.
        """
        return PoolReply(self, request, overdue)

    def chat(self, request: ChatRequest, overdue: Overdue | None = None) -> PoolReply[ChatChunk]:
        """Generate on an engine that takes messages. Otherwise the same as `generate`."""
        return PoolReply(self, request, overdue)

    async def engine_for(
        self, session_key: str, kinds: tuple[bool, ...], overdue: Overdue | None, avoid: str | None = None
    ) -> EngineRecord:
        """Return the session's engine (`Placement.pick`). If no engine serves, waits for one for `patience` seconds,
        and then raises EngineUnavailable."""
        if (member := self.placement.pick(session_key, kinds, avoid)) is not None:
            return member
        try:
            async with asyncio.timeout(self.patience):
                with nullcontext() if overdue is None else overdue.waiting("an engine that serves"):
                    while (member := self.placement.pick(session_key, kinds)) is None:
                        await self.placement.arrivals.next().wait()
                    return member
        except TimeoutError:
            # During a pause, engines may be unavailable. So after a pause, the wait starts again.
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
    """The reply to a call, as an async iterator over checked chunks. The consumer must close it with
    `contextlib.aclosing`. `serving` describes the engine of the next chunks. `serving` is None until an engine has been
    assigned."""

    def __init__(self, calls: EngineCalls, request: AnyRequest, overdue: Overdue | None) -> None:
        self.serving: ServingEngine | None = None
        self._calls = calls
        self._request = request
        self._overdue = overdue
        tokens = request if isinstance(request, GenerateRequest) else None
        self._cuttable = tokens if tokens is not None and tokens.sampling.continuable else None
        """The request, if its reply can be continued after a cut. Otherwise None."""
        self._continued: ContinuedGeneration | None = None
        """The reply over all its requests, or None if it was never cut off."""
        self._avoid: str | None = None
        self._give_up_at: float | None = None
        self._failed = self._dropped = 0
        self._chunks = self._run()

    @property
    def served(self) -> ServingEngine:
        """The engine that generates the chunks, known from the first chunk on. It can change until the last chunk,
        because another engine may take over. A chat reply whose last chunk has no ids gets the mode TEXT. Raises
        EngineUnavailable before an engine has been assigned."""
        if self.serving is None:
            raise EngineUnavailable("no engine has answered yet")
        return self.serving

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the first `length` tokens. Used for a reply that was ended early or given up, and
        so has no last chunk."""
        earlier = () if self._continued is None else self._continued.versions
        spans = [span for span in earlier if span.end <= length]
        start = spans[-1].end if spans else 0
        if start < length:
            spans.append(VersionSpan(self.served.version, start, length))
        return tuple(spans)

    def __aiter__(self) -> Self:
        return self

    # `__anext__` and `aclose` are not coroutines, because a coroutine would cost one more frame for each chunk.
    def __anext__(self) -> Awaitable[T]:
        return self._chunks.__anext__()

    def aclose(self) -> Awaitable[None]:
        return self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[Any, None]:
        """Yield the checked chunks of the whole reply. Raises the errors of `EngineCalls.generate`."""
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
            # No local variable may refer to an error that is raised. Otherwise the error and this frame would form a
            # reference cycle, which keeps the request in memory until a garbage collection.
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
        """Raise EngineUnavailable if the engine cannot continue the reply: its log-probabilities are of another kind
        than those of the reply so far, or it does not take the images of the request."""
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
        """Handle the last chunk of an engine's reply. Returns True if the engine has cut the reply off and the reply
        continues as a new request."""
        # `ours` is True if a pause of this pool has cut generations off since this generation began. In this case, the
        # engine may already have a newer version than the chunk's.
        ours = attempt.cuts != self._calls.gate.cuts
        if chunk.finish is FinishReason.ABORT and attempt.member.takes_tokens:
            # If something other than this pool has aborted the generation, it starts again only if it has no token yet,
            # and at most FAILOVERS times in a call.
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
        """Record the tokens from an engine before the reply continues as a new request. `last` is the last chunk of
        this engine."""
        self._to_continue().cut(cast(TokenCheck, attempt.check).ids, last, attempt.version)

    def _note_failure(self, attempt: _Attempt, error: EngineUnavailable) -> bool:
        """Record that the engine has failed. Returns True if another engine can take over."""
        calls, member, gate, now = self._calls, attempt.member, self._calls.gate, loop_time()
        silent = isinstance(error, EngineSilent)
        if silent:  # the engine may still answer other calls; if not, SilenceWatch marks it as failed
            calls.placement.leave(self._request.session_key, member)
            self._avoid = member.name
        else:
            calls.health.mark_failed(member, error)
        self._failed += 1
        # if this engine has sent a chunk, the `patience` seconds start again
        if attempt.begun or self._give_up_at is None:
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
        """Record that the engine has misbehaved. Returns True if another engine can take over."""
        calls, member = self._calls, attempt.member
        calls.health.mark_suspect(member, fault, self._request)
        self._failed += 1
        return not attempt.begun and self._failed <= FAILOVERS and calls.placement.has_unsuspected(member.takes_tokens)


class _Attempt:
    """One request to one engine, as part of a call.

    - `generated`: the number of tokens received.
    - `begun`: True once a chunk has passed the checks.
    - `new_tokens`: the number of prompt tokens that this engine has not read in an earlier call of the session.
    - `version`, `cuts`: the engine's policy version and the gate's `cuts` when the request began."""

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
