"""Runs one call on the engines of a pool: chooses an engine, sends the request, checks each chunk, and retries after
failures.

Another engine takes over if the session's engine fails or misbehaves before the first chunk. A generation that is cut
off by a pause of the policy, or because its engine is silent, continues as a new request if possible
(`ContinuedGeneration`). Invariant: a generation that cannot continue is retried only if its consumer has received no
token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, Generic, Self, TypeVar, cast

import msgspec

from outrider.concurrency.overdue import Overdue
from outrider.engines.base import AnyRequest, ChatChunk, Chunk, GenerateRequest, chunks_of
from outrider.engines.pool.checks import (
    ContinuedGeneration,
    TokenCheck,
    check_ids,
    check_of,
    continuable,
    mistake_of,
    overflow_fault,
)
from outrider.engines.pool.health import HealthChecks
from outrider.engines.pool.placement import Placement
from outrider.engines.pool.record import EngineRecord, ServingEngine, serving
from outrider.engines.pool.silence import SilenceWatch
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
the maximum is the number of engines in the pool, if that number is larger."""

CHARACTERS_PER_TOKEN = 4
"""A rough ratio for estimating the tokens of a chat request. The estimate is used for the engine's load and for the
time that the reply may take."""


class PoolReply(Generic[T]):
    """An async iterator over the checked chunks of one generation. The consumer must close it like a generator, with
    `contextlib.aclosing`."""

    def __init__(self, chunks: Callable[[PoolReply[T]], AsyncGenerator[T, None]]) -> None:
        self.serving: ServingEngine | None = None
        """The engine of the next chunks, set by the pool. None before an engine has been assigned."""
        self.earlier: tuple[VersionSpan, ...] = ()
        """The version spans of the tokens that were sampled before the latest cut, set by the pool."""
        self._chunks = chunks(self)

    @property
    def served(self) -> ServingEngine:
        """The engine that generates the chunks, available from the first chunk on. The value may change until the last
        chunk, because another engine may take over, and because a chat reply whose last chunk has no ids gets the mode
        TEXT. Raises EngineUnavailable before an engine has been assigned."""
        if self.serving is None:
            raise EngineUnavailable("no engine has answered yet")
        return self.serving

    def serve(self, member: EngineRecord) -> None:
        """Set the engine of the next chunks. Only the pool calls this. Raises EngineUnavailable if the reply so far has
        log-probabilities of another kind than the engine's."""
        if self.earlier and self.served.logprob_kind is not member.engine.logprob_kind:
            raise EngineUnavailable(
                f"engine {member.name!r} cannot go on with a reply: its log-probabilities are of another kind",
                hint="ask again",
            )
        self.serving = serving(member)

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the first `length` tokens of a reply that has no last chunk, because it was ended
        early or given up."""
        spans = [span for span in self.earlier if span.end <= length]
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


class EngineCalls:
    """Runs calls on the engines in `members`. `EnginePool` describes the arguments after `silence`."""

    def __init__(
        self,
        members: Mapping[str, EngineRecord],
        placement: Placement,
        health: HealthChecks,
        silence: SilenceWatch,
        *,
        serves: str | None,
        vocabulary: Vocabulary,
        context_tokens: int | None,
        text: Callable[[], TextStream] | None,
        patience: float,
    ) -> None:
        self._members = members
        self._placement = placement
        self._health = health
        self._silence = silence
        self._gate = health.policy.gate
        self._serves = serves
        self._vocabulary = vocabulary
        self._context = context_tokens
        self._text = text
        self._patience = patience

    async def engine_for(
        self, session_key: str, kinds: tuple[bool, ...], overdue: Overdue | None, avoid: str | None = None
    ) -> EngineRecord:
        """Return the session's engine (`Placement.pick`), waiting for an engine if none serves. Raises
        EngineUnavailable if no engine serves within the pool's patience."""
        if (member := self._placement.pick(session_key, kinds, avoid)) is not None:
            return member
        try:
            async with asyncio.timeout(self._patience):
                with nullcontext() if overdue is None else overdue.waiting("an engine that serves"):
                    while (member := self._placement.pick(session_key, kinds)) is None:
                        await self._placement.arrivals.next().wait()
                    return member
        except TimeoutError:
            if self._gate.mode is not None:  # time during a pause does not count, because engines may be down then
                await self._gate_opened(overdue)
                return await self.engine_for(session_key, kinds, overdue, avoid)
            troubles = "; ".join(f"{known.name}: {known.detail}" for known in self._members.values() if known.detail)
            what = "this request" if self._serves is None else f"a request to the frozen model {self._serves!r}"
            raise EngineUnavailable(
                f"no engine to serve {what} within {self._patience:g} s" + (f" ({troubles})" if troubles else ""),
                hint="attach an engine, or look at the state of those attached",
            ) from None

    async def chunks(
        self, reply: PoolReply[Any], request: AnyRequest, overdue: Overdue | None
    ) -> AsyncGenerator[Chunk | ChatChunk, None]:
        """Run a call and yield its checked chunks. `EnginePool.generate` describes the errors."""
        clock, gate, placement = asyncio.get_running_loop().time, self._gate, self._placement
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
            member = await self.engine_for(session_key, (takes_tokens,), overdue, avoid)
            if gate.mode is not None:
                await self._gate_opened(overdue)
                give_up_at = None
                continue
            reply.serve(member)
            generated, begun = 0, False
            cut: Chunk | None = None
            cuts, version = gate.cuts, member.version
            check = check_of(asked, member.name, self._vocabulary)
            new_tokens = prompt_tokens - placement.context(session_key, member)
            member.enter()
            gate.enter(whole=whole)
            placement.set_context(session_key, member, prompt_tokens)
            placement.refresh(member)
            try:
                async with aclosing(chunks_of(member.engine, asked)) as chunks:
                    with self._silence.flight(member, asked, prompt_tokens, new_tokens, chunks, overdue) as flight:
                        async for chunk in flight:
                            generated += check.take(chunk)
                            begun = True
                            if chunk.finish is not None:
                                ours = cuts != gate.cuts  # a pause of this pool: the chunk's version may be old
                                # If something other than this pool has aborted the generation, the request is repeated
                                # only if no token is lost.
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
                if silent:  # not marked as failed here: the silence watch does this, unless only this call was lost
                    placement.leave(session_key, member)
                    avoid = member.name
                else:
                    self._health.mark_failed(member, error)
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
                self._health.mark_suspect(member, fault, request)
                failed += 1
                if begun or failed > FAILOVERS or not placement.has_unsuspected(takes_tokens):
                    raise fault from (None if fault is error else error)
            except OutriderError:
                raise
            except Exception as error:  # an engine's code may raise any error
                mistake = mistake_of(member.name, error)
                self._health.mark_suspect(member, mistake, request)
                raise mistake from error
            finally:
                member.leave(generated)
                gate.leave(whole=whole)
                placement.set_context(session_key, member, prompt_tokens + generated)
                placement.refresh(member)
            if earlier is not None:
                if (last := earlier.ended()) is not None:
                    yield last
                    return
                reply.earlier = earlier.versions
                asked = earlier.request()
                prompt_tokens = len(asked.input_ids)

    async def _gate_opened(self, overdue: Overdue | None) -> None:
        with nullcontext() if overdue is None else overdue.held():
            await self._gate.opened()
