"""Detects engines that have fallen silent, and calls that an engine has lost.

Every generation in flight is a `Flight`. A flight measures how long its consumer waits for the engine, and compares the
wait with the engine's recent calls (`Pace`). A `SilenceWatch` checks all flights a few times a second. If an engine
sends no chunk to any call and a wait is overdue, the watch sends the engine a request for one token. If no token
arrives, the engine counts as failed, and its generations continue on other engines. Overdue seconds are recorded in the
session's `Overdue`. Invariant: a generation is cut off only while its consumer waits for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from outrider.concurrency.overdue import Overdue, SessionWait, loop_time
from outrider.engines.base import AnyRequest, ChatChunk, GenerateRequest, SamplingParams
from outrider.engines.pool.health import HealthChecks
from outrider.engines.pool.pace import (
    LIMITS,
    MUCH_SLOWER,
    PREFILL_TOKENS_PER_SECOND,
    SLOW_PREFILL_TOKENS_PER_SECOND,
    SilenceLimits,
)
from outrider.engines.pool.record import EngineRecord
from outrider.errors import EngineError, EngineSilent, EngineUnavailable
from outrider.messages import Message, Role

UNANSWERED_SECONDS = 1.0
"""If a client gives up a call after a shorter wait, the engine is not blamed."""
SLOWER = 2.0
"""If a session gives up several waits in a row, waits of at least this multiple of the usual seconds are added up,
because several such waits are as unlikely as one wait of their total length."""


class Flight:
    """One generation on one engine. The consumer iterates over the chunks with `async for`, then calls `land` once.

    `new_tokens` is the number of prompt tokens that are not in the session's context on this engine. Iteration raises
    the engine's errors, and EngineSilent if the watch has cut the generation off.
    """

    def __init__(
        self,
        member: EngineRecord,
        request: AnyRequest,
        prompt_tokens: int,
        new_tokens: int,
        chunks: AsyncGenerator[Any, None],
        limits: SilenceLimits,
        overdue: Overdue | None,
    ) -> None:
        self.member = member
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.error: EngineSilent | None = None
        first_due = member.pace.first_due(limits, prompt_tokens, request.sampling.max_tokens)
        self.wait = SessionWait(f"engine {member.name!r}", first_due, queued=True)
        self.began = loop_time()
        self._limits, self._least = limits, limits.least
        self._loop = asyncio.get_running_loop()
        self._token_due = 0.0
        self._next = chunks.__anext__
        self._overdue = overdue
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._first: float | None = None
        self._first_tokens = 0
        self._tokens = 0
        self._finished: float | None = None
        """Time of the reply's last chunk, None before it has arrived."""
        self._known = member.pace.known
        self.forgiven = 0.0
        """Overdue seconds of the wait for the first chunk, if the engine's pace is unknown. The generation is not cut
        off because of these seconds."""
        self.given_up: GivenUp | None = None
        """The wait that the consumer has given up, None if it has given up no wait."""
        if overdue is not None:
            overdue.add(self.wait)

    def __aiter__(self) -> Flight:
        return self

    async def __anext__(self) -> Any:
        # This method runs once per chunk, so short steps are inlined.
        wait, loop = self.wait, self._loop
        wait.since = began = loop.time()
        self._task = task = asyncio.current_task(loop)
        if task is not None:
            self._cancelling = task.cancelling()
        try:
            chunk = await self._next()
        except BaseException as error:
            now = loop.time()
            self._end_stretch(now)
            self._raise_if_cut()
            if isinstance(error, asyncio.CancelledError):
                # The wait begins only after the last chunk of the session's earlier calls, which the engine serves
                # first.
                began = max(began, 0.0 if self._overdue is None else self._overdue.behind(wait))
                self.given_up = self._given_up(began, now)
            raise
        now = loop.time()
        seconds = now - began
        # The session's `Overdue` is updated if this stretch is overdue, or if it was so long that a later call of the
        # session, queued behind this call, may be overdue. A later call cannot be overdue within `least` seconds after
        # a chunk of this call.
        if seconds > self._least or seconds > wait.allowance - wait.waited:
            self._end_stretch(now)
        else:
            wait.since = None
            wait.waited += seconds
        if self.error is not None:  # true if the engine's code has suppressed the cancellation
            self._raise_if_cut()
        member = self.member
        member.last_sign = wait.last = now
        tokens = len(chunk.ids) if member.takes_tokens else _about_tokens(chunk)
        if self._first is None:
            member.newest_answered = max(member.newest_answered, self.began)
            self._first, self._first_tokens = wait.waited, tokens
            self._token_due = member.pace.token_due()
            self.forgiven = 0.0 if self._known else wait.overdue
            wait.allowance = wait.waited + self._least  # an early first chunk gives later chunks no additional time
        self._tokens += tokens
        wait.allowance += tokens * self._token_due
        if chunk.finish is not None:
            self._finished = now
            if self._overdue is not None:
                self._overdue.given_up_seconds = 0.0
        return chunk

    def cut(self, error: EngineSilent) -> None:
        """Cut the generation off. Does nothing if the consumer does not wait for the engine, or is being cancelled."""
        task = self._task
        if self.wait.since is None or self.error is not None or task is None or task.cancelling() > self._cancelling:
            return
        self.error = error
        # The task is cancelled directly and not by a timer, because when a timer fires, the consumer may no longer wait
        # for the engine and would be cancelled elsewhere.
        task.cancel()

    def _raise_if_cut(self) -> None:
        """Raise EngineSilent if the generation was cut off and nothing else has cancelled the consumer."""
        if self.error is not None and self._task is not None and self._task.uncancel() <= self._cancelling:
            raise self.error from None

    def land(self) -> None:
        """End the flight, after a success or a failure, and record the measurements in the engine's pace."""
        if self._overdue is not None:
            self._overdue.remove(self.wait)
        # Calls without a finish and calls with a slow consumer are not recorded, because their times do not show the
        # engine's pace.
        if self._first is not None and self._finished is not None and self._read_at_once(self._finished):
            self.member.pace.note(
                self._finished,
                overdue=self.wait.overdue > 0,
                first=self._first,
                prompt_tokens=self.prompt_tokens,
                first_tokens=self._first_tokens,
                rest=self.wait.waited - self._first,
                rest_tokens=self._tokens - self._first_tokens,
            )

    def _read_at_once(self, end: float) -> bool:
        """Return True if the consumer read the chunks promptly: the consumer spent at least about half of the time
        until `end` waiting for the engine."""
        return end - self.began <= 2 * self.wait.waited + 1.0

    def _given_up(self, began: float, now: float) -> GivenUp:
        """Return the wait that the consumer has given up at the time `now`, after waiting for a chunk since `began`."""
        pace, stretch = self.member.pace, now - began
        if not pace.known:
            return GivenUp(began, stretch, None)
        first = pace.usual_first(self.prompt_tokens, self.request.sampling.max_tokens)
        if not self._tokens:
            return GivenUp(began, stretch, first)
        token = pace.usual_token
        whole, waited = first + token * (self._tokens + 1), self.wait.waited
        late = stretch < UNANSWERED_SECONDS or waited * token > stretch * whole
        if late and stretch >= SLOWER * token:  # a consumer that gives up sooner does so because of the reply's content
            return GivenUp(began, waited, whole)
        return GivenUp(began, stretch, token)

    @property
    def longest_wait(self) -> float:
        """Seconds of the consumer's whole wait after which the call may count as lost."""
        if self.begun:
            return self.wait.allowance + self.grace
        whole = self.member.pace.whole_reply(self.request.sampling.max_tokens)
        return max(self.wait.allowance, 2 * whole) + self.grace

    @property
    def grace(self) -> float:
        """Additional seconds before the engine is checked if its pace is unknown; 0 if the pace is known."""
        if self._known:
            return 0.0
        if self.begun:
            return self._limits.unknown_token * self._tokens
        return self._limits.unknown + 9 * self.prompt_tokens / PREFILL_TOKENS_PER_SECOND

    @property
    def begun(self) -> bool:
        """True once the first chunk has arrived."""
        return self._first is not None

    def _end_stretch(self, now: float) -> None:
        if self._overdue is not None:
            self._overdue.before_end(self.wait, now)
        self.wait.end(now)


class SilenceWatch:
    """Checks all flights of a pool. The pool runs `look` repeatedly in the background."""

    def __init__(self, limits: SilenceLimits, health: HealthChecks) -> None:
        self.limits = limits
        self._health = health
        self._gate = health.policy.gate
        self._flights: set[Flight] = set()
        self._flying = asyncio.Event()
        self._deaf_until = 0.0
        """Silence before this time is not counted, because the policy was paused or the event loop was blocked."""
        self._questions: dict[EngineRecord, TokenProbe] = {}
        """The token probes in progress, by engine."""

    @contextmanager
    def flight(
        self,
        member: EngineRecord,
        request: AnyRequest,
        prompt_tokens: int,
        new_tokens: int,
        chunks: AsyncGenerator[Any, None],
        overdue: Overdue | None,
    ) -> Iterator[Flight]:
        """Watch a generation during the block. The block must read the chunks from the returned flight."""
        flight = Flight(member, request, prompt_tokens, new_tokens, chunks, self.limits, overdue)
        self._flights.add(flight)
        self._flying.set()
        try:
            yield flight
        finally:
            self._flights.discard(flight)
            flight.land()
            if overdue is not None and (given_up := flight.given_up) and given_up.waited >= UNANSWERED_SECONDS:
                self._note_given_up(flight, given_up, overdue)

    def _note_given_up(self, flight: Flight, given_up: GivenUp, overdue: Overdue) -> None:
        """Add a check of the wait to the session's `pending_checks`. If the engine has sent no chunk since the wait
        began, a request for one token is sent to the engine immediately, because the length of the silence cannot be
        measured when the run is judged."""
        member = flight.member
        question: TokenProbe | None = None
        if member.last_sign <= given_up.began and not member.removed:
            question = self._questions.get(member)
            if question is None and member.serves:
                question = self._questions[member] = TokenProbe(member, loop_time())
                asking = self._request_token(question, member, probe_request(flight.request))
                question.task = self._health.run(member, "question", asking)
                question.task.add_done_callback(lambda _: self._questions.pop(member, None))
            elif question is None:
                question = TokenProbe(member, loop_time())
                question.error = EngineUnavailable(f"engine {member.name!r} failed during a call: {member.detail}")
        overdue.pending_checks.append(partial(_vouch, member.name, given_up, question, overdue.given_up_seconds))
        if given_up.usual is None or given_up.waited >= SLOWER * given_up.usual:
            overdue.given_up_seconds += given_up.waited

    async def look(self) -> None:
        """Wait until there is a flight, then check all flights and token probes once."""
        await self._flying.wait()
        before = loop_time()
        await asyncio.sleep(self.limits.tick)
        now = loop_time()
        if self._gate.mode is not None or now - before > 2 * self.limits.tick + 0.5:
            self._deaf_until = now
        for flight in list(self._flights):
            self._look(flight, now)
        for question in self._questions.values():
            question.note_sign()
        if not self._flights:
            self._flying.clear()

    def _look(self, flight: Flight, now: float) -> None:
        member, wait = flight.member, flight.wait
        if wait.since is None or member.removed or now < wait.due() + flight.grace:
            return
        overdue = wait.overdue_by(now) - flight.forgiven - flight.grace
        if self._gate.mode is not None and overdue > self.limits.slow:
            # The engine is not checked first, because no engine may be probed during a pause. The call is cut off,
            # because the pause may be waiting for it, and the call can continue after the pause.
            flight.cut(EngineSilent(f"engine {member.name!r} has kept a pause of the policy waiting for a call"))
        since = max(wait.since, self._deaf_until)
        silent = now - since
        if silent < self.limits.least:
            return
        # Until a later call has received a chunk, this call may be queued behind earlier calls, and does not count as
        # lost: a repeated call would only move to the end of the queue.
        overtaken = member.newest_answered > flight.began
        lost = silent > max(0.0, flight.longest_wait - wait.waited) + self.limits.lost
        if member.last_sign <= since or (lost and not overtaken and not member.awaits_workers):
            if not member.serves:
                flight.cut(EngineSilent(f"engine {member.name!r} has failed during a call: {member.detail}"))
            elif not member.runs("check"):
                self._health.run(member, "check", self._check_silent(member, probe_request(flight.request), since))
        elif lost and overtaken:
            flight.cut(
                EngineSilent(
                    f"engine {member.name!r} has given a call nothing for {silent:.0f} s, and later calls tokens"
                )
            )
        goes = (flight.begun or overtaken) and self._health.has_another(member)
        if overdue > (self.limits.slow if goes else MUCH_SLOWER * self.limits.slow):
            flight.cut(
                EngineSilent(f"engine {member.name!r} has kept a call waiting {overdue:.0f} s longer than usual")
            )

    async def _check_silent(self, member: EngineRecord, request: AnyRequest, since: float) -> None:
        """Check an engine that sends no chunk to any call, or no chunk to a call that may be lost. If the check fails,
        the engine is marked as failed and its flights are cut off. `since` is the start time of the silence."""
        requested_at = loop_time()
        try:
            proof = await self._health.prove(member, request, self._check_seconds(member))
        except EngineError as error:
            if member.last_sign > since:
                return
            silent = loop_time() - since
            failure = EngineSilent(
                f"engine {member.name!r} has been silent for {silent:.0f} s: {error.message}",
                hint="see whether it hangs, and whether the network to it drops packets",
            )
            member.silent = request
            self._health.mark_failed(member, failure)
            for flight in list(self._flights):
                if flight.member is member:
                    flight.cut(failure)
        else:
            if proof is not None:
                member.last_sign = loop_time()
                if not member.awaits_workers:
                    member.newest_answered = max(member.newest_answered, requested_at)

    def _check_seconds(self, member: EngineRecord) -> float:
        """Return the time limit in seconds for one token from the engine. The limit allows for prompts that the engine
        has to read first, and for compiling or loading a model if the engine has sent no chunk yet."""
        known = member.pace.known or member.newest_answered
        seconds = self.limits.check if known else self.limits.first_check
        waiting = [flight.new_tokens for flight in self._flights if flight.member is member and not flight.begun]
        reading = min(max(waiting, default=0) / SLOW_PREFILL_TOKENS_PER_SECOND, self.limits.longest_check)
        due = member.pace.first_due(self.limits, 0, 1) if member.pace.known else self.limits.unknown
        return max(seconds, reading, due)

    async def _request_token(self, question: TokenProbe, member: EngineRecord, request: AnyRequest) -> None:
        """Request one token from an engine that was silent until a call was given up. Records the time that the token
        takes, or the error, in `question`."""
        try:
            while await self._health.prove(member, request, self._check_seconds(member), by_token=True) is None:
                await self._gate.opened()
                question.requested_at = loop_time()
            now = loop_time()
            question.answered = now - question.requested_at
            member.last_sign = now
        except EngineError as error:
            question.note_sign()
            question.error = error


class TokenProbe:
    """A request for one token, sent at the time `requested_at` to an engine that was silent until a call was given up.

    `answered` is the number of seconds until the token arrived. `sign` is the number of seconds until another call
    received a chunk, if this happened first. `error` is the error if no token arrived. Each is None until known.
    """

    def __init__(self, member: EngineRecord, requested_at: float) -> None:
        self.requested_at = requested_at
        self.answered: float | None = None
        self.sign: float | None = None
        self.error: EngineError | None = None
        self.task: asyncio.Task[None] | None = None
        self._member = member

    def note_sign(self) -> None:
        if self.sign is None and self._member.last_sign > self.requested_at:
            self.sign = self._member.last_sign - self.requested_at


class GivenUp(msgspec.Struct, frozen=True):
    """A wait that a call's consumer gave up.

    `began` is the start time of the wait for the chunk that did not arrive. `waited` is the number of seconds waited,
    and `usual` the number of seconds that the engine usually takes, None if unknown. Both are for this chunk alone or,
    if the reply as a whole is later than this chunk in relation to the usual seconds, for all chunks of the reply.
    """

    began: float
    waited: float
    usual: float | None


async def _vouch(engine: str, given_up: GivenUp, question: TokenProbe | None, before: float) -> None:
    """Raise EngineUnavailable if the engine was at fault when a client gave up a call. `before` is the total number of
    seconds of the calls that were given up directly before this call."""
    silent = given_up.waited
    if question is not None:
        if question.task is not None:
            await asyncio.wait([question.task])  # `wait` does not raise the task's error
        if question.sign is not None:
            silent += question.sign
        elif question.answered is not None:
            silent += question.answered
        else:
            raise question.error or EngineUnavailable(f"engine {engine!r} was not heard again after a call")
    if too_long(silent, given_up.usual, before):
        others = f", and {before:.1f} s while others did before it" if before else ""
        raise EngineSilent(
            f"engine {engine!r} gave nothing for {silent:.1f} s while a call waited that was then given up{others}"
        )


def too_long(silent: float, usual: float | None, before: float = 0.0) -> bool:
    """Return True if the engine is at fault for a call that its client gave up after `silent` seconds. `usual` is the
    number of seconds that the engine usually takes. If `usual` is None (unknown), the engine is blamed rather than the
    agent. `before` is the total number of seconds of the calls that were given up directly before this call."""
    if usual is None:
        return silent + before > LIMITS.least
    return silent + (before if silent >= SLOWER * usual else 0.0) > MUCH_SLOWER * usual


def _about_tokens(chunk: ChatChunk) -> int:
    """Estimate the number of tokens of a text chunk, at four characters per token."""
    return -(-(len(chunk.text) + len(chunk.reasoning)) // 4)


def probe_request(request: AnyRequest) -> AnyRequest:
    """Return a request for one token, of the same type as `request`. The prompt is at most 16 ids of the original
    prompt, or one short message."""
    sampling = SamplingParams(max_tokens=1)
    if isinstance(request, GenerateRequest):
        return msgspec.structs.replace(request, input_ids=request.input_ids[:16], sampling=sampling)
    said = Message(role=Role.USER, content="Say one word.")
    return msgspec.structs.replace(request, messages=(said,), tools=(), sampling=sampling)
