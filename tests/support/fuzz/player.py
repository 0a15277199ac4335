"""Plays one session of the fuzzer: makes its requests and checks the replies.

The format of the dialect is in `speaker.Speaker`. Invariant: every reply that a client reads to its end is checked.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec

from outrider.trajectory import TokenCounts, Turn, pack_ids, unpack_ids
from support.fuzz.drawing import Ask, Dialogue, Drawer
from support.fuzz.speaker import Manner, Request, Said, Speaker, Violation, check
from support.fuzz.stage import Stage
from support.fuzz.wire import Answer, exchange
from support.recording_engine import Given
from support.tokenizer import SPECIAL_TOKENS

OPENED, CLOSED = (SPECIAL_TOKENS.index(tag) for tag in ("<think>", "</think>"))
REFUSALS = frozenset({400, 401, 404, 413, 422, 429})
EXCUSES = (b"context", b"by its script", b"token count", b"too long")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A violation, with the data to reproduce it."""

    problem: str
    session: int
    number: int
    request: Request | None
    shrunk: bytes | None = None


class Tally(msgspec.Struct, kw_only=True):
    """The counts of a run so far."""

    requests: int = 0
    sessions: int = 0
    statuses: Counter[int] = msgspec.field(default_factory=Counter)
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    slowest: float = 0.0
    sampled: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    samples: int = 0
    joins: Counter[str] = msgspec.field(default_factory=Counter)
    branches: Counter[str] = msgspec.field(default_factory=Counter)
    failures: list[Failure] = msgspec.field(default_factory=list)

    def add(self, tokens: TokenCounts) -> None:
        self.sampled += tokens.sampled
        self.trained += tokens.trained
        self.masked += tokens.masked
        self.dropped += tokens.dropped


class Player:
    """Makes one session's requests and checks the replies. `current` is the last request."""

    def __init__(self, speaker: Speaker, stage: Stage, dice: random.Random, tally: Tally) -> None:
        self.current: Request | None = None
        self._speaker = speaker
        self._stage = stage
        self._dice = dice
        self._tally = tally
        self._drawer = Drawer(speaker, stage.key, dice)

    async def play(self, most: int) -> int:
        """Make one request, or a few concurrently, and return their number."""
        if self._dice.random() < 0.02:
            self._stage.engine.version += 1
        if most > 3 and self._dice.random() < 0.03:
            asks = [self._drawer.draw() for _ in range(self._dice.choice((2, 3)))]
            for outcome in await asyncio.gather(
                *(self._make(ask, alone=False) for ask in asks), return_exceptions=True
            ):
                if outcome is not None:
                    raise outcome
            return len(asks)
        await self._make(self._drawer.draw(), alone=True)
        return 1

    async def _make(self, ask: Ask, *, alone: bool) -> None:
        self.current = ask.request
        before, stored = len(self._stage.engine.given), len(self._stage.turns)
        leave = self._dice.choice((1, 2, 4)) if ask.body is not None and self._dice.random() < 0.03 else None
        answer = await exchange(self._stage.application, ask.request, leave_after=leave)
        self._tally.statuses[answer.status] += 1
        self._tally.kinds[ask.kind] += 1
        self._tally.slowest = max(self._tally.slowest, answer.seconds)
        if answer.left:
            return
        said = self._judge(ask, answer)
        if not alone:
            return
        given, turns = self._stage.engine.given[before:], self._stage.turns[stored:]
        check(len(given) <= 1 and len(turns) <= 1, "one request, several generations")
        if said is None or said.failure is not None:
            return
        check(len(given) == 1 and len(turns) == 1, "a reply without a generation or its turn")
        self._compare(ask, said, given[0], turns[0])
        self._drawer.answered(ask, said, given[0])

    def _judge(self, ask: Ask, answer: Answer) -> Said | None:
        """Return the model's reply, or None if the response contains none. Raises Violation for a response that is not
        allowed."""
        check(answer.status < 500, f"status {answer.status}: {answer.payload[:300]!r}")
        if answer.status != 200:
            check(answer.status in REFUSALS, f"status {answer.status}")
            if ask.shaped:
                self._speaker.read_error(answer.status, answer.payload)
            sound = ask.honest and ask.kind != "opening"
            check(not sound or _is_excused(answer), f"{ask.kind} was refused: {answer.payload[:300]!r}")
            check(ask.kind != "unknown key" or answer.status == 401, f"an unknown key is a {answer.status}")
            return None
        check(ask.kind != "unknown key", "an unknown key was served")
        if ask.kind in ("aside", "astray"):
            return None
        if ask.manner.form == "count":
            check(self._speaker.read_count(answer.payload) > 0, "a prompt of no tokens")
            return None
        manner = Manner(answer.streamed or ask.manner.form == "array", ask.manner.form)
        try:
            said = self._speaker.read(answer.payload, manner)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, AssertionError) as error:
            raise Violation(f"a reply of another shape: {error!r}: {answer.payload[-300:]!r}") from error
        if ask.body is not None and self._speaker.name != "gemini":
            check(manner.stream == bool(ask.body.get("stream")), "streamed or not, against what was asked for")
        return said

    def _compare(self, ask: Ask, said: Said, given: Given, turn: Turn) -> None:
        """Compare the reply that the client got with the engine's record and the stored turn."""
        if said.prompt_tokens is not None:
            check(said.prompt_tokens == len(given.prompt), "the prompt's tokens are not those told")
            check(said.output_tokens == len(given.sampled), "the sampled tokens are not those told")
        check(turn.output_ids == pack_ids(given.sampled), "the turn's tokens are not the engine's")
        reply = turn.reply
        if reply is None:
            raise Violation("a turn that was answered has no reply")
        check(said.text == reply.content, f"told {said.text!r}, recorded {reply.content!r}")
        if said.reasoning is not None:
            check(said.reasoning == (reply.reasoning or ""), "another reasoning was told than recorded")
        check(len(said.calls) == len(reply.tool_calls), "not as many calls were told as recorded")
        if ask.follows is not None:
            check(self._kept(ask.follows, given, turn), f"{ask.kind}: the recorded ids were not kept ({turn.cause})")

    def _kept(self, earlier: Dialogue, given: Given, turn: Turn) -> bool:
        """Return True if the engine got the ids of the reply that the client sent back, or if the turn continues a
        stored reply with the same text.

        Two other cases also count as kept. In a session whose history is "template", every past reply is rendered
        anew. No template renders a reply that ends within its reasoning, so the turn after such a reply is a fork.
        """
        if earlier.given.leads_to(given) or self._stage.history == "template":
            return True
        text = earlier.said.text.strip()
        alike = [turn for turn in self._stage.turns if turn.reply is not None and turn.reply.content.strip() == text]
        if any(turn.parent == other.index for other in alike):
            return True
        return any(_ends_thinking(unpack_ids(other.output_ids).tolist()) for other in alike)


def _ends_thinking(sampled: list[int]) -> bool:
    return sampled.count(OPENED) != sampled.count(CLOSED)


def _is_excused(answer: Answer) -> bool:
    """Return True if a valid request may be refused: the context or the limits of the session are used up, or the
    engine's script refuses the request."""
    told = answer.payload.lower()
    return answer.status == 429 or any(word in told for word in EXCUSES)
