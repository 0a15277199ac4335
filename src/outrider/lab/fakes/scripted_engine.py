"""An engine that replies from a script, for tests, dry runs and benchmarks.

It implements all that engines must support: stops, limits, context overflow, pausing, aborting and versions. For tests,
it can also fail or stall at a chosen token, and records its requests. Invariant: token `id` at context position `p`
always has the log-probability `scripted_logprob(p, id)`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from outrider.constraint import ConstraintKind
from outrider.engines.adapters.options import read_options
from outrider.engines.base import (
    Capability,
    Chunk,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    PauseMode,
    SamplingParams,
)
from outrider.engines.gates import PauseGate
from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable, InvalidField
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan

TAIL_TOKENS = 1024
"""Number of tokens at the end of a prompt that are searched for `ScriptedReply.when`."""

REMEMBERED_REQUESTS = 1024
REMEMBERED_SESSIONS = 20_000
"""Maximum number of sessions whose position in the script is stored. The least recently used are removed. A limit is
needed, because no call informs an engine of the end of a session."""

FAILURES: dict[str, type[EngineError]] = {
    "unavailable": EngineUnavailable,
    "overflow": ContextOverflow,
    "rejected": EngineRejected,
}


def scripted_logprob(position: int, token_id: int) -> float:
    """Return a number in [-4, 0) that depends on the token and the position, and is exact in float32 and in JSON.

    `position` counts from the start of the context (prompt and output). So a training row can be checked by its ids
    alone.
    """
    return -((position * 2654435761 + int(token_id) * 40503) % 4096 + 1) / 1024


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reply of the script: `reply` (text that may contain special tokens) or token `ids`.

    - `when`: a text. If the end of a prompt contains this text, this reply is used. The replies without `when` are used
      in order, separately for each session.
    - `fail`, `after`: raise the error `fail` after `after` tokens, unless the request's token limit is lower.
    - `stall`: wait after this many tokens, until `release` is called.
    """

    reply: str = ""
    ids: tuple[int, ...] | None = None
    when: str | None = None
    fail: Literal["unavailable", "overflow", "rejected"] | None = None
    after: int = 0
    stall: int | None = None


class ScriptOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's options. `chunk_tokens` is the number of tokens per chunk. Each session gets the `replies` without
    `when` in order, and the last of them is repeated."""

    replies: list[str | ScriptedReply] = []
    chunk_tokens: int = 1
    context_tokens: int = 32768
    version: int = 0


class _Plan(msgspec.Struct, frozen=True):
    """A whole generation as planned: its tokens, its end, and the token after which it stalls. Either `finish` or
    `failure` is set. `script` is the scripted reply that is planned, with its ids."""

    ids: list[int]
    finish: FinishReason | None
    stop_match: int | str | None
    failure: str | None
    stall: int | None
    script: tuple[ScriptedReply, list[int]]


class ScriptedEngine:
    """An `Engine` with a script. It also implements `TokenizesText`, `SetsVersion` and `LoadsWeights`.

    If a pause aborts a reply, the session can request the rest: the new prompt is the old prompt followed by the ids
    sampled so far. Weights are not read, but their path must exist, and is stored in `weights`.

    For tests:

    - `requests`: the most recent requests.
    - `aborted`: the request ids of generations that the consumer closed or cancelled. Each of them sets `abort_seen`.
    - `stalled`: set when a generation stalls. `release` ends the stall.
    - `kill`: makes the engine unavailable, also for running generations, until `revive` is called.
    - `hang`: stops every response, including `health`, until `revive` is called.
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING
    # Constraints are not enforced. The author of a script must comply with them.
    constraints = frozenset(ConstraintKind)
    capabilities = frozenset({Capability.VERSIONED_CACHE})  # there is no cache that could be outdated

    def __init__(self, options: EngineOptions, *, remembered_sessions: int = REMEMBERED_SESSIONS) -> None:
        own = read_options(ScriptOptions, options.options)
        if own.chunk_tokens < 1:
            raise InvalidField("chunk_tokens must be at least 1", field="options")
        self.name = options.name
        self.version = own.version
        self.weights: str | None = None
        self.requests: deque[GenerateRequest] = deque(maxlen=REMEMBERED_REQUESTS)
        self.aborted: deque[str] = deque(maxlen=REMEMBERED_REQUESTS)
        self.abort_seen = asyncio.Event()
        self.stalled = asyncio.Event()
        self._model = options.model or "scripted"
        self._chunk_tokens = own.chunk_tokens
        self._context_tokens = own.context_tokens
        self._tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else None
        self._script = _Script(own.replies, self._tokenizer, remembered_sessions)
        self._gate = PauseGate()
        self._down = self._frozen = self._hung = self._released = False
        self._aborts = 0
        self._cut: OrderedDict[tuple[str, bytes], tuple[ScriptedReply, list[int]]] = OrderedDict()
        """The unsent part of each aborted reply, by session key and the bytes of the ids before this part."""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Do nothing, because the engine opens nothing."""

    async def close(self) -> None:
        self.kill()

    async def health(self) -> EngineHealth:
        while self._hung:
            await self._changed.wait()
        return EngineHealth(
            ok=not self._down,
            detail="killed" if self._down else "",
            model=self._model,
            context_tokens=self._context_tokens,
            version=self.version,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        try:
            self._check_up()
            plan = self._plan(request)
            async with self._gate.passage():
                run = _Run(len(request.input_ids), self._aborts)
                while not run.ended:
                    yield await self._next(plan, run)
                if run.aborted:
                    self._remember(request, plan, run.position)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.request_id)
            self.abort_seen.set()
            raise

    async def pause(self, mode: PauseMode) -> None:
        self._check_up()
        self._gate.close()
        if mode == "keep":
            self._frozen = True
        elif mode == "abort":
            self._aborts += 1
            self._notify()
        elif mode == "finish":
            await self._gate.drained()

    async def resume(self) -> None:
        self._frozen = False
        self._gate.open()
        self._notify()

    async def set_version(self, version: int) -> None:
        self._check_up()
        self.version = version

    async def update_weights(self, weights: str, version: int) -> None:
        self._check_up()
        if not await asyncio.to_thread(Path(weights).exists):
            raise EngineRejected(f"engine {self.name!r} finds no weights in {weights}")
        self.weights, self.version = weights, version

    async def token_check(self, text: str) -> list[int] | None:
        return self._tokenizer.encode(text) if self._tokenizer else None

    def release(self) -> None:
        """End all current stalls, and do not stall any later generation."""
        self._released = True
        self._notify()

    def kill(self) -> None:
        self._down = True
        self._notify()

    def hang(self) -> None:
        self._hung = True

    def revive(self) -> None:
        self._down = self._hung = False
        self._notify()

    def _check_up(self) -> None:
        if self._down:
            raise EngineUnavailable(f"engine {self.name!r} is down")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _plan(self, request: GenerateRequest) -> _Plan:
        asked = len(request.input_ids) + request.sampling.max_tokens
        if asked > self._context_tokens:
            raise ContextOverflow(
                f"the model's context length is {self._context_tokens} tokens, but {asked} were requested "
                f"({len(request.input_ids)} in the prompt, {request.sampling.max_tokens} for the output)"
            )
        script = self._cut.pop((request.session_key, request.input_ids.tobytes()), None) or self._script.next(request)
        reply, ids = script
        if reply.fail is not None and reply.after <= request.sampling.max_tokens:
            return _Plan(ids[: reply.after], None, None, reply.fail, reply.stall, script)
        end = _ending(ids, request.sampling, self._tokenizer)
        return _Plan(ids[: end.length], end.finish, end.match, None, reply.stall, script)

    def _remember(self, request: GenerateRequest, plan: _Plan, position: int) -> None:
        reply, ids = plan.script
        given = np.asarray(ids[:position], dtype=np.int32)
        stall = None if reply.stall is None or reply.stall < position else reply.stall - position
        rest = msgspec.structs.replace(reply, stall=stall, after=max(0, reply.after - position))
        self._cut[request.session_key, request.input_ids.tobytes() + given.tobytes()] = rest, ids[position:]
        if len(self._cut) > REMEMBERED_REQUESTS:
            self._cut.popitem(last=False)

    async def _next(self, plan: _Plan, run: _Run) -> Chunk:
        """Return the next chunk of a generation. Waits while the engine is paused or hangs, or the generation is
        stalled. An aborted generation ends with an empty chunk. Raises EngineUnavailable if the engine was killed, or
        the script's error."""
        if run.position:
            await asyncio.sleep(0)
        while (
            (stalled := plan.stall == run.position and not self._released) or self._frozen or self._hung or self._down
        ):
            if self._down:
                raise EngineUnavailable(f"engine {self.name!r} went down")
            if run.aborts != self._aborts:
                break
            if stalled:
                self.stalled.set()
            await self._changed.wait()
        if run.aborts != self._aborts:
            run.aborted = True
            return run.chunk([], self.version, FinishReason.ABORT)
        if plan.failure is not None and run.position == len(plan.ids):
            raise FAILURES[plan.failure](f"engine {self.name!r} fails here by its script")
        end = min(run.position + self._chunk_tokens, len(plan.ids))
        if plan.stall is not None and run.position < plan.stall:
            end = min(end, plan.stall)
        ids = plan.ids[run.position : end]
        last = end == len(plan.ids) and plan.failure is None
        return run.chunk(ids, self.version, plan.finish, plan.stop_match) if last else run.chunk(ids, self.version)


class _Run:
    """The progress of one generation. `aborts` is the engine's number of aborts at the start of this generation."""

    def __init__(self, prompt_length: int, aborts: int) -> None:
        self.position = 0
        self.ended = self.aborted = False
        self.aborts = aborts
        self._prompt_length = prompt_length
        self._starts: list[tuple[int, int]] = []

    def chunk(
        self, ids: list[int], version: int, finish: FinishReason | None = None, match: int | str | None = None
    ) -> Chunk:
        """Return a chunk with the next `ids`, sampled by the policy version `version`."""
        start = self._prompt_length + self.position
        logprobs = [scripted_logprob(start + offset, token_id) for offset, token_id in enumerate(ids)]
        if ids and (not self._starts or self._starts[-1][0] != version):
            self._starts.append((version, self.position))
        self.position += len(ids)
        if finish is None:
            return Chunk(ids=ids, logprobs=logprobs)
        self.ended = True
        return Chunk(
            ids=ids, logprobs=logprobs, finish=finish, stop_match=match, versions=self._spans(), cached_tokens=0
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        ends = [start for _, start in self._starts[1:]] + [self.position] * bool(self._starts)
        return tuple(VersionSpan(version, start, end) for (version, start), end in zip(self._starts, ends, strict=True))


class _Script:
    """Selects the scripted reply to each request."""

    def __init__(
        self, replies: list[str | ScriptedReply], tokenizer: Tokenizer | None, remembered_sessions: int
    ) -> None:
        entries = [ScriptedReply(reply=entry) if isinstance(entry, str) else entry for entry in replies]
        if tokenizer is None and any(entry.ids is None and (entry.reply or entry.when) for entry in entries):
            raise InvalidField("a script with texts needs a tokenizer folder", field="tokenizer")
        self._tokenizer = tokenizer
        encoded = [(entry, self._encode(entry)) for entry in entries]
        self._rules = [(entry.when, entry, ids) for entry, ids in encoded if entry.when is not None]
        self._lines = [(entry, ids) for entry, ids in encoded if entry.when is None]
        self._remembered_sessions = remembered_sessions
        self._turns: OrderedDict[str, int] = OrderedDict()

    def next(self, request: GenerateRequest) -> tuple[ScriptedReply, list[int]]:
        """Return the reply to a request. Raises EngineRejected if the script has no reply for it."""
        if self._rules and self._tokenizer is not None:
            tail = self._tokenizer.decode(request.input_ids[-TAIL_TOKENS:].tolist())
            for when, rule, ids in self._rules:
                if when in tail:
                    return rule, ids
        if not self._lines:
            raise EngineRejected("the script has no reply for this prompt")
        if len(self._lines) == 1:
            return self._lines[0]
        turn = self._turns.pop(request.session_key, 0)
        self._turns[request.session_key] = turn + 1
        if len(self._turns) > self._remembered_sessions:
            self._turns.popitem(last=False)
        return self._lines[min(turn, len(self._lines) - 1)]

    def _encode(self, entry: ScriptedReply) -> list[int]:
        if entry.ids is not None:
            return list(entry.ids)
        return self._tokenizer.encode(entry.reply) if self._tokenizer else []


class _Ending(msgspec.Struct, frozen=True):
    length: int
    finish: FinishReason
    match: int | str | None = None


def _ending(ids: list[int], sampling: SamplingParams, tokenizer: Tokenizer | None) -> _Ending:
    """Return where a reply ends: at the first stop id or stop string, at the request's token limit, or at the end of
    its ids."""
    stops = frozenset(sampling.stop_token_ids)
    if sampling.stop and tokenizer is None:
        raise EngineRejected("stop strings need a tokenizer folder")
    decoder = tokenizer.stream() if tokenizer and sampling.stop else None
    text = ""
    if stops or decoder:
        for length, token_id in enumerate(ids[: sampling.max_tokens], start=1):
            if token_id in stops:
                return _Ending(length, FinishReason.STOP, token_id)
            if decoder:
                text += decoder.push((token_id,))
                for stop in sampling.stop:
                    if stop in text:
                        return _Ending(length, FinishReason.STOP, stop)
    if len(ids) > sampling.max_tokens:
        return _Ending(sampling.max_tokens, FinishReason.LENGTH)
    return _Ending(len(ids), FinishReason.STOP)
