"""Finds engines that have fallen silent, and calls that an engine has lost.

Every generation in flight is a `Flight`, which measures how long its engine lets it wait and compares that with what
the same engine took lately (`Pace`). A watch looks at all flights a few times a second. An engine that gives nothing to
anybody for longer than is due is asked for one token; if none comes, it has failed, and its generations go on
elsewhere. The module knows no session's clocks: overdue seconds go to the session's `Overdue`. Invariant: a generation
is cut off only while its consumer waits for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.concurrency.overdue import Overdue, Wait, loop_time
from outrider.engines.base import AnyRequest, ChatChunk, Chunk, GenerateRequest, SamplingParams
from outrider.engines.pool.affinity import Member
from outrider.engines.pool.pace import LIMITS, MUCH_SLOWER, SilenceLimits
from outrider.errors import EngineError, EngineSilent, EngineUnavailable
from outrider.messages import Message, Role

if TYPE_CHECKING:
    from outrider.engines.pool.policy import PolicyGate

UNANSWERED_SECONDS = 1.0
"""A client that gives a call up sooner has not waited for the engine."""


class Flight:
    """The chunks of one generation on one engine: `async for chunk in flight`, then `land` once.

    Raises what the engine raises, and EngineSilent where the watch has cut the generation off.
    """

    def __init__(
        self,
        member: Member,
        request: AnyRequest,
        prompt_tokens: int,
        chunks: AsyncGenerator[Any, None],
        limits: SilenceLimits,
        overdue: Overdue | None,
    ) -> None:
        self.member = member
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.error: EngineSilent | None = None
        first_due = member.pace.first_due(limits, prompt_tokens, request.sampling.max_tokens)
        self.wait = Wait(f"engine {member.name!r}", first_due)
        self._least = limits.least
        self._next = chunks.__anext__
        self._overdue = overdue
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._first: float | None = None
        self._first_tokens = 0
        self._tokens = 0
        self.given_up: GivenUp | None = None
        """The wait that the consumer has given up, if it gave one up."""
        if overdue is not None:
            overdue.add(self.wait)

    def __aiter__(self) -> Flight:
        return self

    async def __anext__(self) -> Any:
        wait = self.wait
        began = loop_time()
        wait.begin(began)
        self._task = asyncio.current_task()
        try:
            chunk = await self._next()
        except BaseException as error:
            seconds = self._end_stretch(loop_time())
            if self.error is not None and self._task is not None and self._task.uncancel() <= self._cancelling:
                raise self.error from None
            if isinstance(error, asyncio.CancelledError):
                self.given_up = GivenUp(began, seconds, self._usual())
            raise
        now = loop_time()
        self._end_stretch(now)
        self.member.last_sign = now
        tokens = _tokens_in(chunk)
        if self._first is None:
            self._first, self._first_tokens = wait.waited, tokens
            wait.allowance = wait.waited + self._least  # what the first chunk was early is not lent to the others
        self._tokens += tokens
        wait.allowance += tokens * self.member.pace.token_due()
        return chunk

    def cut(self, error: EngineSilent) -> None:
        """Cut the generation off, if its consumer waits for the engine now."""
        if self.wait.since is not None and self.error is None and self._task is not None:
            self.error = error
            self._cancelling = self._task.cancelling()
            # At once, and not by a timer: the consumer cannot be past the wait by then, and be cancelled elsewhere.
            self._task.cancel()

    def land(self) -> None:
        """The generation is over, however it ended."""
        if self._overdue is not None:
            self._overdue.remove(self.wait)
        if self._first is not None:
            self.member.pace.note(
                first=self._first,
                prompt_tokens=self.prompt_tokens,
                first_tokens=self._first_tokens,
                rest=self.wait.waited - self._first,
                rest_tokens=self._tokens - self._first_tokens,
            )

    def _usual(self) -> float | None:
        """Seconds that the engine usually takes for what the consumer waits for."""
        pace = self.member.pace
        if not pace.known:
            return None
        return (
            pace.usual_token if self._tokens else pace.usual_first(self.prompt_tokens, self.request.sampling.max_tokens)
        )

    def _end_stretch(self, now: float) -> float:
        if self._overdue is not None and now > self.wait.due():
            self._overdue.before_end(self.wait, now)
        return self.wait.end(now)


class SilenceWatch:
    """Looks at all flights of a pool: `look` is a turn of its chore. `check` asks an engine for one token within some
    seconds and raises EngineError; `failed` is called with an engine that has not answered; `start` runs something in
    the background, under a name."""

    def __init__(
        self,
        limits: SilenceLimits,
        gate: PolicyGate,
        *,
        check: Callable[[Member, AnyRequest, float], Awaitable[object]],
        failed: Callable[[Member, EngineError], None],
        start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self.limits = limits
        self._gate = gate
        self._check = check
        self._failed = failed
        self._flights: set[Flight] = set()
        self._flying = asyncio.Event()
        self._deaf_until = 0.0
        """Before this time nothing could be heard: the policy was paused, or the event loop stood still."""
        self._start = start

    def begin(
        self,
        member: Member,
        request: AnyRequest,
        prompt_tokens: int,
        chunks: AsyncGenerator[Any, None],
        overdue: Overdue | None,
    ) -> Flight:
        flight = Flight(member, request, prompt_tokens, chunks, self.limits, overdue)
        self._flights.add(flight)
        self._flying.set()
        return flight

    def end(self, flight: Flight, overdue: Overdue | None) -> None:
        """The flight is over. A call whose client gave it up unanswered is a doubt of the session."""
        self._flights.discard(flight)
        flight.land()
        if overdue is not None and flight.given_up is not None and flight.given_up.waited >= UNANSWERED_SECONDS:
            overdue.doubts.append(partial(self._vouch, flight.member, probe_request(flight.request), flight.given_up))

    async def look(self) -> None:
        """Wait for a flight, and look at all of them once."""
        await self._flying.wait()
        before = loop_time()
        await asyncio.sleep(self.limits.tick)
        now = loop_time()
        if self._gate.mode is not None or now - before > 2 * self.limits.tick + 0.5:
            self._deaf_until = now
        for flight in list(self._flights):
            self._look(flight, now)
        if not self._flights:
            self._flying.clear()

    def _look(self, flight: Flight, now: float) -> None:
        member, wait = flight.member, flight.wait
        if wait.since is None or member.removed or now < wait.due():
            return
        since = max(wait.since, self._deaf_until)
        silent = now - since
        if silent < self.limits.least:
            return
        if member.last_sign <= since:
            if member.serves and member.check is None:
                request = probe_request(flight.request)
                member.check = self._start(self._check_silent(member, request, since), f"look at {member.name}")
        elif silent > wait.allowance - wait.waited + self.limits.lost:
            flight.cut(
                EngineSilent(
                    f"engine {member.name!r} has given a call nothing for {silent:.0f} s, and other calls tokens"
                )
            )
        if (overdue := wait.overdue_by(now)) > self.limits.slow:
            flight.cut(
                EngineSilent(f"engine {member.name!r} has kept a call waiting {overdue:.0f} s longer than usual")
            )

    async def _check_silent(self, member: Member, request: AnyRequest, since: float) -> None:
        """Find out whether an engine still works that gives nothing to anybody."""
        try:
            await self._check(member, request, self._check_seconds(member))
        except EngineError as error:
            if member.last_sign > since:
                return
            silent = loop_time() - since
            failure = EngineSilent(
                f"engine {member.name!r} has been silent for {silent:.0f} s: {error.message}",
                hint="see whether it hangs, and whether the network to it drops packets",
            )
            member.silent = request
            self._failed(member, failure)
            for flight in list(self._flights):
                if flight.member is member:
                    flight.cut(failure)
        else:
            member.last_sign = loop_time()
        finally:
            member.check = None

    def _check_seconds(self, member: Member) -> float:
        return max(self.limits.check, member.pace.first_due(self.limits, 0, 1))

    async def _vouch(self, member: Member, request: AnyRequest, given_up: GivenUp) -> None:
        """Raises EngineUnavailable if the engine was at fault when a client gave its call up."""
        until = given_up.began + given_up.waited
        answered: float | None = None
        if member.last_sign <= given_up.began:
            if not member.serves:
                raise EngineUnavailable(f"engine {member.name!r} failed during a call: {member.detail or 'removed'}")
            asked = loop_time()
            await self._check(member, request, self._check_seconds(member))
            until = member.last_sign = loop_time()
            answered = until - asked
        silent = until - given_up.began
        if too_long(silent, given_up.usual, answered):
            raise EngineSilent(
                f"engine {member.name!r} gave nothing for {silent:.1f} s while a call waited that was then given up"
            )


class GivenUp(msgspec.Struct, frozen=True):
    """A wait that a call's consumer gave up: when it began, its seconds, and the seconds that its engine usually takes;
    None while these are not known."""

    began: float
    waited: float
    usual: float | None


def too_long(silent: float, usual: float | None, answered: float | None) -> bool:
    """Whether an engine that was silent for so many seconds, to a call that was given up, was at fault. `answered` is
    how many seconds it took for one token afterwards, if it was asked."""
    if usual is not None:
        return silent > MUCH_SLOWER * usual
    if answered is not None:
        return silent - answered > LIMITS.least + MUCH_SLOWER * answered
    return False


def _tokens_in(chunk: Chunk | ChatChunk) -> int:
    """Sampled tokens of a chunk; about as many where only their text is known."""
    return len(chunk.ids) if isinstance(chunk, Chunk) else -(-(len(chunk.text) + len(chunk.reasoning)) // 4)


def probe_request(request: AnyRequest) -> AnyRequest:
    """A request for one token, of the kind of another."""
    sampling = SamplingParams(max_tokens=1)
    if isinstance(request, GenerateRequest):
        return msgspec.structs.replace(request, input_ids=request.input_ids[:16], sampling=sampling)
    said = Message(role=Role.USER, content="Say one word.")
    return msgspec.structs.replace(request, messages=(said,), tools=(), sampling=sampling)
