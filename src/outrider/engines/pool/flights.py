"""The generations in flight of a pool. Measures how long each consumer waits for its engine, and can cut a generation
off.

`call.py` chooses engines and sends requests; `silence.py` decides which engine is silent. Invariant: a generation is
cut off only while its consumer waits for the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from outrider.engines.base import AnyRequest
from outrider.engines.pool.placement import EngineRecord
from outrider.engines.pool.waits import PREFILL_TOKENS_PER_SECOND, Overdue, SessionWait, SilenceLimits, loop_time
from outrider.errors import EngineSilent

CHARACTERS_PER_TOKEN = 4
"""Rough number of characters per token. It is used to estimate the load of an engine, and the time that a reply may
take."""


class Flights:
    """The generations in flight of a pool (`all`). `SilenceWatch` checks them while the event `some` is set. `given_up`
    is called when a generation ends because its consumer no longer waits for a chunk."""

    def __init__(self, limits: SilenceLimits, given_up: Callable[[Flight], None]) -> None:
        self.limits = limits
        self.given_up = given_up
        self.all: set[Flight] = set()
        self.some = asyncio.Event()


class Flight:
    """One generation on one engine. Measures how long the consumer waits for the engine.

    The consumer reads the chunks with `async for`, inside `with flight:`. `new_tokens` is the number of prompt tokens
    that the engine has not read in an earlier call of the session. Iteration raises the engine's errors. It raises
    EngineSilent if `SilenceWatch` has cut the generation off.
    """

    def __init__(
        self,
        flights: Flights,
        member: EngineRecord,
        request: AnyRequest,
        prompt_tokens: int,
        new_tokens: int,
        chunks: AsyncGenerator[Any, None],
        overdue: Overdue | None,
    ) -> None:
        self.member = member
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.overdue = overdue
        self.error: EngineSilent | None = None
        limits = flights.limits
        first_due = member.pace.first_due(limits, prompt_tokens, request.sampling.max_tokens)
        self.wait = SessionWait(f"engine {member.name!r}", first_due, queued=True)
        self.began = loop_time()
        self._flights, self._limits, self._least = flights, limits, limits.least
        self._loop = asyncio.get_running_loop()
        self._token_due = 0.0
        self._next = chunks.__anext__
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._first: float | None = None
        self._first_tokens = 0
        self.tokens = 0
        self._finished: float | None = None
        """When the last chunk of the reply arrived, or None before that."""
        self._known = member.pace.known
        self.forgiven = 0.0
        """Overdue seconds of the wait for the first chunk, if the engine's pace is unknown. The decision whether to cut
        the generation off ignores these seconds."""
        self.given_up: tuple[float, float] | None = None
        """The wait that the consumer has given up, as (begin, end); None if it has given up none."""
        if overdue is not None:
            overdue.add(self.wait)

    def __enter__(self) -> Self:
        self._flights.all.add(self)
        self._flights.some.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._flights.all.discard(self)
        self.land()
        if self.given_up is not None:
            self._flights.given_up(self)

    def __aiter__(self) -> Self:
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
                # The engine first serves earlier calls of the session. So this wait begins only after their last chunk.
                began = max(began, 0.0 if self.overdue is None else self.overdue.behind(wait))
                self.given_up = began, now
            raise
        now = loop.time()
        seconds = now - began
        # `Overdue` sums up the session's overdue seconds. Update it if this wait for a chunk was overdue. Also update
        # it after a wait of more than `least` seconds, because a later call that is queued behind this call may then be
        # overdue.
        if seconds > self._least or seconds > wait.allowance - wait.waited:
            self._end_stretch(now)
        else:
            wait.since = None
            wait.waited += seconds
        if self.error is not None:  # the engine's code has suppressed the cancellation
            self._raise_if_cut()
        member = self.member
        member.last_chunk_at = wait.last = now
        tokens = (
            len(chunk.ids)
            if member.takes_tokens
            else -(-(len(chunk.text) + len(chunk.reasoning)) // CHARACTERS_PER_TOKEN)
        )
        if self._first is None:
            member.newest_answered = max(member.newest_answered, self.began)
            self._first, self._first_tokens = wait.waited, tokens
            self._token_due = member.pace.token_due()
            self.forgiven = 0.0 if self._known else wait.overdue
            # seconds that are left over by a fast first chunk are not added to the allowance of later chunks
            wait.allowance = wait.waited + self._least
        self.tokens += tokens
        wait.allowance += tokens * self._token_due
        if chunk.finish is not None:
            self._finished = now
            if self.overdue is not None:
                self.overdue.given_up_seconds = 0.0
        return chunk

    def cut(self, error: EngineSilent) -> None:
        """Cut the generation off. Has no effect if the consumer is not waiting for the engine, or is being
        cancelled."""
        task = self._task
        if self.wait.since is None or self.error is not None or task is None or task.cancelling() > self._cancelling:
            return
        self.error = error
        # Cancel the task now and not with a timer. Before a timer runs, the consumer may have stopped waiting for the
        # engine, and would be cancelled somewhere else.
        task.cancel()

    def _raise_if_cut(self) -> None:
        """Raise EngineSilent if the generation was cut off, unless the consumer was cancelled for another reason,
        too."""
        if self.error is not None and self._task is not None and self._task.uncancel() <= self._cancelling:
            raise self._take_error() from None

    def _take_error(self) -> EngineSilent:
        """Return the error and remove it from this flight. Otherwise the error and the flight would form a reference
        cycle."""
        assert self.error is not None
        error, self.error = self.error, None
        return error

    def land(self) -> None:
        """End the flight, after a success or a failure, and record how fast the engine was in its `Pace`."""
        if self.overdue is not None:
            self.overdue.remove(self.wait)
        # Calls that did not finish, and calls with a slow consumer, do not show how fast the engine is. So they are not
        # recorded.
        at_once = self._finished is not None and self._finished - self.began <= 2 * self.wait.waited + 1.0
        if self._first is not None and self._finished is not None and at_once:
            self.member.pace.note(
                self._finished,
                overdue=self.wait.overdue > 0,
                first=self._first,
                prompt_tokens=self.prompt_tokens,
                first_tokens=self._first_tokens,
                rest=self.wait.waited - self._first,
                rest_tokens=self.tokens - self._first_tokens,
            )

    @property
    def longest_wait(self) -> float:
        """Number of seconds of waiting after which the engine may have lost the call."""
        if self.begun:
            return self.wait.allowance + self.grace
        whole = self.member.pace.whole_reply(self.request.sampling.max_tokens)
        return max(self.wait.allowance, 2 * whole) + self.grace

    @property
    def grace(self) -> float:
        """Additional seconds before an engine of unknown pace (usual speed) is checked; 0 if the pace is known."""
        if self._known:
            return 0.0
        if self.begun:
            return self._limits.unknown_token * self.tokens
        return self._limits.unknown + 9 * self.prompt_tokens / PREFILL_TOKENS_PER_SECOND

    @property
    def begun(self) -> bool:
        """True once the first chunk has arrived."""
        return self._first is not None

    def _end_stretch(self, now: float) -> None:
        if self.overdue is not None:
            self.overdue.before_end(self.wait, now)
        self.wait.end(now)
