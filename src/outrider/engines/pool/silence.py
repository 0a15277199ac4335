"""Detects engines that have fallen silent, and calls that an engine has lost.

Every generation in flight is a `Flight` (`flights.py`). A flight measures how long its consumer waits for the engine,
and compares the wait with recent calls to the engine (`Pace`). A `SilenceWatch` checks all flights a few times a
second. If a wait is overdue and the engine sends no chunk to any call, the watch sends the engine a request for one
token. If no token arrives, the engine is marked as failed, and its generations continue on other engines. The overdue
seconds are recorded in the session's `Overdue`.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from outrider.engines.base import AnyRequest, GenerateRequest, SamplingParams
from outrider.engines.pool.flights import Flight, Flights
from outrider.engines.pool.health import HealthChecks
from outrider.engines.pool.placement import EngineRecord
from outrider.engines.pool.waits import (
    LIMITS,
    MUCH_SLOWER,
    SLOW_PREFILL_TOKENS_PER_SECOND,
    SilenceLimits,
    loop_time,
)
from outrider.errors import EngineError, EngineSilent, EngineUnavailable
from outrider.messages import Message, Role

UNANSWERED_SECONDS = 1.0
"""If a client gives up a call after fewer seconds than this, the engine is not blamed."""
SLOWER = 2.0
"""A wait that a client gives up is a long wait if it lasted at least this multiple of the usual seconds. Long waits
that a session gives up in a row are added up, because together they are as unlikely as one wait of their total
length."""


class SilenceWatch:
    """Checks all flights of a pool. The pool calls `look` repeatedly in the background."""

    def __init__(self, limits: SilenceLimits, health: HealthChecks) -> None:
        self.limits = limits
        self.flights = Flights(limits, self._note_given_up)
        self._health = health
        self._gate = health.policy.gate
        self._deaf_until = 0.0
        """Silence before this time is not counted, because the policy was paused or the event loop was blocked."""
        self._token_probes: dict[EngineRecord, TokenProbe] = {}
        """The token probes in progress, by engine."""

    def _note_given_up(self, flight: Flight) -> None:
        """Record that a consumer has given up a wait: add a check of this wait to the session's `pending_checks`. If
        the engine has sent no chunk since the wait began, also send the engine a request for one token. The request
        measures how much longer the engine stays silent, so it must be sent now and not when the session's outcome is
        decided."""
        member, overdue = flight.member, flight.overdue
        given_up = given_up_wait(flight)
        if overdue is None or given_up.waited < UNANSWERED_SECONDS:
            return
        token_probe: TokenProbe | None = None
        if member.last_chunk_at <= given_up.began and not member.removed:
            token_probe = self._token_probes.get(member)
            if token_probe is None and member.serves:
                token_probe = self._token_probes[member] = TokenProbe(member, loop_time())
                asking = self._request_token(token_probe, member, probe_request(flight.request))
                token_probe.task = self._health.run(member, "question", asking)
                token_probe.task.add_done_callback(lambda _: self._token_probes.pop(member, None))
            elif token_probe is None:
                token_probe = TokenProbe(member, loop_time())
                token_probe.error = EngineUnavailable(f"engine {member.name!r} failed during a call: {member.detail}")
        overdue.pending_checks.append(
            partial(_raise_if_engine_to_blame, member.name, given_up, token_probe, overdue.given_up_seconds)
        )
        if given_up.usual is None or given_up.waited >= SLOWER * given_up.usual:
            overdue.given_up_seconds += given_up.waited

    async def look(self) -> None:
        """Wait until there is a flight, and then check all flights and token probes once."""
        await self.flights.some.wait()
        before = loop_time()
        await asyncio.sleep(self.limits.tick)
        now = loop_time()
        if self._gate.mode is not None or now - before > 2 * self.limits.tick + 0.5:
            self._deaf_until = now
        for flight in list(self.flights.all):
            self._look(flight, now)
        for token_probe in self._token_probes.values():
            token_probe.note_sign()
        if not self.flights.all:
            self.flights.some.clear()

    def _look(self, flight: Flight, now: float) -> None:
        member, wait = flight.member, flight.wait
        if wait.since is None or member.removed or now < wait.due() + flight.grace:
            return
        overdue = wait.overdue_by(now) - flight.forgiven - flight.grace
        if self._gate.mode is not None and overdue > self.limits.slow:
            # The pause may be waiting for this call, so cut the call off. The call can continue after the pause. The
            # engine is not checked first, because no engine may be probed during a pause.
            flight.cut(EngineSilent(f"engine {member.name!r} has kept a pause of the policy waiting for a call"))
        since = max(wait.since, self._deaf_until)
        silent = now - since
        if silent < self.limits.least:
            return
        # This call may just be waiting in a queue behind earlier calls, as long as no later call has received a chunk.
        # So the call is not cut off as lost in this case: a repeated call would have to queue again.
        overtaken = member.newest_answered > flight.began
        lost = silent > max(0.0, flight.longest_wait - wait.waited) + self.limits.lost
        if member.last_chunk_at <= since or (lost and not overtaken and not member.awaits_workers):
            if not member.serves:
                flight.cut(EngineSilent(f"engine {member.name!r} has failed during a call: {member.detail}"))
            elif not member.runs("check"):
                self._health.run(member, "check", self._check_silent(member, probe_request(flight.request), since))
        elif lost and overtaken:
            flight.cut(
                EngineSilent(
                    f"engine {member.name!r} has sent nothing to a call for {silent:.0f} s, but tokens to later calls"
                )
            )
        goes = (flight.begun or overtaken) and self._health.has_another(member)
        if overdue > (self.limits.slow if goes else MUCH_SLOWER * self.limits.slow):
            flight.cut(
                EngineSilent(f"engine {member.name!r} has kept a call waiting {overdue:.0f} s longer than usual")
            )

    async def _check_silent(self, member: EngineRecord, request: AnyRequest, since: float) -> None:
        """Check an engine that sends no chunk to any of its calls, or that may have lost a call. If the engine fails
        the check, it is marked as failed and its flights are cut off. `since` is the time when the silence began."""
        requested_at = loop_time()
        try:
            proof = await self._health.prove(member, request, self._check_seconds(member))
        except EngineError as error:
            if member.last_chunk_at > since:
                return
            silent = loop_time() - since
            failure = EngineSilent(
                f"engine {member.name!r} has been silent for {silent:.0f} s: {error.message}",
                hint="see whether it hangs, and whether the network to it drops packets",
            )
            member.silent = request
            self._health.mark_failed(member, failure)
            for flight in list(self.flights.all):
                if flight.member is member:
                    flight.cut(failure)
        else:
            if proof is not None:
                member.last_chunk_at = loop_time()
                if not member.awaits_workers:
                    member.newest_answered = max(member.newest_answered, requested_at)

    def _check_seconds(self, member: EngineRecord) -> float:
        """Return how many seconds the engine has for one token. The time is long enough to read the longest prompt of
        the waiting calls (at most `longest_check`), or to compile or load a model if the engine has sent no chunk
        yet."""
        known = member.pace.known or member.newest_answered
        seconds = self.limits.check if known else self.limits.first_check
        waiting = [flight.new_tokens for flight in self.flights.all if flight.member is member and not flight.begun]
        reading = min(max(waiting, default=0) / SLOW_PREFILL_TOKENS_PER_SECOND, self.limits.longest_check)
        due = member.pace.first_due(self.limits, 0, 1) if member.pace.known else self.limits.unknown
        return max(seconds, reading, due)

    async def _request_token(self, token_probe: TokenProbe, member: EngineRecord, request: AnyRequest) -> None:
        """Request one token from an engine. A client has given up a wait for this engine, and the engine has sent no
        chunk since the wait began. Record in `token_probe` how long the token takes, or the error."""
        try:
            while await self._health.prove(member, request, self._check_seconds(member), by_token=True) is None:
                await self._gate.opened()
                token_probe.requested_at = loop_time()
            now = loop_time()
            token_probe.answered = now - token_probe.requested_at
            member.last_chunk_at = now
        except EngineError as error:
            token_probe.note_sign()
            token_probe.error = error


class TokenProbe:
    """A request for one token, sent to an engine at `requested_at`. A client has given up a wait for this engine, and
    the engine had sent no chunk since the wait began.

    `answered`: seconds until the token arrived.
    `sign`: seconds until another call received a chunk, if this happened first.
    `error`: the error, if no token arrived.

    Each is None until known.
    """

    def __init__(self, member: EngineRecord, requested_at: float) -> None:
        self.requested_at = requested_at
        self.answered: float | None = None
        self.sign: float | None = None
        self.error: EngineError | None = None
        self.task: asyncio.Task[None] | None = None
        self._member = member

    def note_sign(self) -> None:
        if self.sign is None and self._member.last_chunk_at > self.requested_at:
            self.sign = self._member.last_chunk_at - self.requested_at


class GivenUp(msgspec.Struct, frozen=True):
    """The wait that the consumer of a call has given up.

    `began`: when the wait for the missing chunk began.
    `waited`: the number of seconds that the consumer has waited.
    `usual`: the number of seconds that the engine usually takes, or None if unknown.

    `waited` and `usual` are for the missing chunk alone, or for all chunks of the reply up to this chunk.
    `given_up_wait` decides which of the two.
    """

    began: float
    waited: float
    usual: float | None


def given_up_wait(flight: Flight) -> GivenUp:
    """Return the wait that the consumer of a generation has given up."""
    assert flight.given_up is not None
    began, now = flight.given_up
    pace, stretch = flight.member.pace, now - began
    if not pace.known:
        return GivenUp(began, stretch, None)
    first = pace.usual_first(flight.prompt_tokens, flight.request.sampling.max_tokens)
    if not flight.tokens:
        return GivenUp(began, stretch, first)
    token = pace.usual_token
    whole, waited = first + token * (flight.tokens + 1), flight.wait.waited
    late = stretch < UNANSWERED_SECONDS or waited * token > stretch * whole
    # Count the whole reply only if the wait for this chunk was long, too. Otherwise the client gave up for another
    # reason, such as the text of the reply.
    if late and stretch >= SLOWER * token:
        return GivenUp(began, waited, whole)
    return GivenUp(began, stretch, token)


async def _raise_if_engine_to_blame(
    engine: str, given_up: GivenUp, token_probe: TokenProbe | None, before: float
) -> None:
    """Raise EngineUnavailable if the engine is to blame for a call that a client gave up. `before` is the total length,
    in seconds, of the calls that the session gave up directly before this one."""
    silent = given_up.waited
    if token_probe is not None:
        if token_probe.task is not None:
            await asyncio.wait([token_probe.task])  # unlike `await`, this does not raise the task's error
        if token_probe.sign is not None:
            silent += token_probe.sign
        elif token_probe.answered is not None:
            silent += token_probe.answered
        else:
            raise token_probe.error or EngineUnavailable(f"engine {engine!r} sent nothing more after a call")
    if too_long(silent, given_up.usual, before):
        others = f", and for {before:.1f} s during the calls given up before" if before else ""
        raise EngineSilent(
            f"engine {engine!r} sent nothing for {silent:.1f} s during a call that was then given up{others}"
        )


def too_long(silent: float, usual: float | None, before: float = 0.0) -> bool:
    """Return True if the engine is to blame for a call that a client gave up after `silent` seconds. `usual` is the
    number of seconds that the engine usually takes. If `usual` is None, the engine is blamed after only a few seconds:
    in doubt, the agent is not to blame. `before` is the total length of the calls that the session gave up directly
    before this one."""
    if usual is None:
        return silent + before > LIMITS.least
    return silent + (before if silent >= SLOWER * usual else 0.0) > MUCH_SLOWER * usual


def probe_request(request: AnyRequest) -> AnyRequest:
    """Return a request for one token, of the same type as `request`. A prompt of ids is cut to its first 16 ids or
    fewer. Messages are replaced by one short message."""
    sampling = SamplingParams(max_tokens=1)
    if isinstance(request, GenerateRequest):
        # images are left out, so their placeholders must be left out, too
        end = min([16, *(image.span.start for image in request.images[:1])])
        return msgspec.structs.replace(request, input_ids=request.input_ids[:end], sampling=sampling, images=())
    message = Message(role=Role.USER, content="Say one word.")
    return msgspec.structs.replace(request, messages=(message,), tools=(), sampling=sampling)
