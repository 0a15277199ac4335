"""A run of the fuzzer: sessions of odd, broken and ordinary requests in one dialect. All replies and records are
checked.

The format of the dialect is in `speaker.Speaker`. Invariant: the requests of a session depend only on the seed of the
run and the number of the session, so each session can be replayed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from support.fuzz.audit import audited
from support.fuzz.player import Failure, Player, Tally
from support.fuzz.shrink import shrunk
from support.fuzz.speaker import Speaker, Violation, check
from support.fuzz.stage import Ground, a_stage

SESSION_REQUESTS = 50


class Campaign:
    """Sessions in one dialect. `told` is called after each session."""

    def __init__(
        self, speaker: Speaker, ground: Ground, seed: int, told: Callable[[Tally], None] = lambda tally: None
    ) -> None:
        self.tally = Tally()
        self._speaker = speaker
        self._ground = ground
        self._seed = seed
        self._told = told

    async def run(self, requests: int, *, first: int = 0, most_failures: int = 5) -> Tally:
        """Run sessions from number `first` on, until `requests` requests have been made or `most_failures` violations
        have been found."""
        session = first
        while self.tally.requests < requests and len(self.tally.failures) < most_failures:
            await self._session(session, min(SESSION_REQUESTS, requests - self.tally.requests))
            self.tally.sessions += 1
            self._told(self.tally)
            session += 1
        return self.tally

    async def _session(self, number: int, requests: int) -> None:
        dice = random.Random(f"{self._seed}:{self._speaker.name}:{number}")
        player: Player | None = None
        made, key = 0, ""
        try:
            async with a_stage(self._ground, dice) as stage:
                player, key = Player(self._speaker, stage, dice, self.tally), stage.key
                while made < requests:
                    made += await player.play(requests - made)
                player.current = None
                audit = audited(stage.turns, stage.engine.given, dice)
                check(stage.open, f"the session was closed by {stage.failure!r}")
                self.tally.add(audit.tokens)
                self.tally.samples += audit.samples
                self.tally.joins += audit.joins
                self.tally.branches += audit.kinds
        except Violation as violation:
            made += 1
            request = player.current if player is not None else None
            self.tally.failures.append(
                Failure(
                    problem=str(violation),
                    session=number,
                    number=made,
                    request=request,
                    shrunk=None if request is None else await shrunk(self._ground, request, key),
                )
            )
        self.tally.requests += made
