"""Simulated engines, the sessions that call them, and the clock of both: a discrete-event simulation.

An engine reads prompts in chunks, first come first served, beside the replies that it decodes; all replies advance by
one token a step. A step takes longer with more replies, with more context, and with a chunk to read. Time between two
events is not stepped through, because rates are constant there. The prefix cache is counted in blocks, and evicts from
the end of the least recently used prefix.

The losses of real engines with a full cache are understated: a call is admitted only if its whole reply fits into the
cache, so no call is preempted, and a prompt token costs the same at the end of a long context as at its beginning. The
module does not depend on Outrider, and draws nothing at random. Invariants: cached blocks never exceed the capacity;
every prompt token is either cached or read.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

BLOCK = 64
"""Number of tokens in a block of the cache. Only whole blocks can be reused."""
EPSILON = 1e-6
"""Numbers of steps below this count as zero, because of rounding errors."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's constants, near those of a model with 100 billion parameters (12 billion active) on eight H100. Such
    an engine reads 20,000 prompt tokens per second if it does nothing else; it generates 60 tokens per second for a
    single reply, and 40 for each of 64 replies with contexts of 30,000 tokens. `step` is the duration of a decoding
    step, to which each reply adds `per_reply` and each token of its context `per_token` (all in seconds). `chunk` is
    the number of prompt tokens read in one step."""

    prefill_per_second: float = 20_000
    chunk: int = 2048
    step: float = 0.016
    per_reply: float = 0.000_03
    per_token: float = 0.000_000_004


SPEED = Speed()

Path = tuple[tuple[str, int], ...]
"""A prompt as segments, each a name and a number of tokens, from the beginning. Equal names mean equal tokens, and a
segment always follows the same segments. Every segment but the last consists of whole blocks; so does every segment
that sessions share."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One turn. `new`: tokens that the session adds to its context before the call. `pause`: seconds from the end of
    the reply to the next call."""

    new: int
    reply: int
    pause: float


class Session(msgspec.Struct, frozen=True):
    """A session. `shared` are the segments that the session's prompts have in common with those of other sessions."""

    name: str
    shared: Path
    turns: tuple[Turn, ...]

    @property
    def group(self) -> str:
        return self.shared[-1][0]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in all calls of the session."""
        total, length = 0, sum(tokens for _, tokens in self.shared)
        for turn in self.turns:
            length += turn.new
            total += length
            length += turn.reply
        return total


class Call(msgspec.Struct, eq=False):
    """A model call: the segments of its prompt, the tokens of the prompt and of the reply, and its time. `cached` is
    set on admission."""

    session: Session
    turn: int
    path: Path
    prompt: int
    reply: int
    begun: float
    cached: int = 0

    @property
    def last(self) -> bool:
        return self.turn + 1 == len(self.session.turns)

    def following(self, begun: float) -> Call:
        """Return the session's next call. The call's prompt begins with this call's prompt and reply."""
        turn, (name, own) = self.session.turns[self.turn + 1], self.path[-1]
        more = self.reply + turn.new
        path = (*self.path[:-1], (name, own + more))
        return Call(self.session, self.turn + 1, path, self.prompt + more, turn.reply, begun)


def first_call(session: Session, begun: float) -> Call:
    turn = session.turns[0]
    path = (*session.shared, (session.name, turn.new))
    return Call(session, 0, path, sum(tokens for _, tokens in path), turn.reply, begun)


class _Cached(msgspec.Struct, eq=False):
    """A segment: its number of blocks, including a partly filled block, its number of tokens, and the number of calls
    that pin it."""

    tokens: int = 0
    blocks: int = 0
    pins: int = 0


class PrefixCache:
    """The cached segments of one engine. Segments of calls under way are pinned. Every use of a segment is also a use
    of the segments in front of it, so eviction always takes the end of a prefix."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self.used = 0
        self.most_used = 0
        self.pinned = 0
        """Number of blocks pinned by calls under way."""
        self._segments: dict[str, _Cached] = {}
        self._free: OrderedDict[str, _Cached] = OrderedDict()
        """Segments that are not pinned, least recently used first."""

    def matched(self, path: Path) -> int:
        """Return the number of cached tokens from the beginning of the prompt."""
        found = 0
        for name, tokens in path:
            cached = self._segments.get(name)
            here = 0 if cached is None else min(cached.tokens, tokens) // BLOCK * BLOCK
            found += here
            if here < tokens:
                break
        return found

    def admit(self, path: Path, reply: int) -> int | None:
        """Evict until prompt and reply fit into the cache, and pin both. Returns the number of cached tokens of the
        prompt, which is always less than the whole prompt. Returns None if the other calls under way leave too few
        blocks."""
        extra = to_pin = 0
        wanted: list[tuple[str, int, int, _Cached]] = []
        for name, tokens in path:
            length = tokens + reply if name is path[-1][0] else tokens
            blocks = -(-length // BLOCK)
            cached = self._segments.get(name) or _Cached()
            wanted.append((name, length, blocks, cached))
            extra += max(0, blocks - cached.blocks)
            to_pin += 0 if cached.pins else cached.blocks
        if self.pinned + to_pin + extra > self.capacity:
            return None
        prompt = sum(tokens for _, tokens in path)
        found = min(self.matched(path), (prompt - 1) // BLOCK * BLOCK)
        for name, _, _, cached in wanted:
            self._segments[name] = cached
            self._free.pop(name, None)
            cached.pins += 1
        self._drop(self.used + extra - self.capacity)
        for _, length, blocks, cached in wanted:
            cached.tokens, cached.blocks = max(cached.tokens, length), max(cached.blocks, blocks)
        self.pinned += to_pin + extra
        self.used += extra
        self.most_used = max(self.most_used, self.used)
        return found

    def release(self, path: Path) -> None:
        """Unpin the segments of an ended call; the segments stay cached until their blocks are needed."""
        for name, _ in reversed(path):
            cached = self._segments[name]
            cached.pins -= 1
            if not cached.pins:
                self.pinned -= cached.blocks
                self._free[name] = cached

    def _drop(self, blocks: int) -> None:
        while blocks > 0:
            name, cached = next(iter(self._free.items()))
            taken = min(blocks, cached.blocks)
            cached.blocks -= taken
            cached.tokens = cached.blocks * BLOCK
            if not cached.blocks:
                del self._free[name]
                del self._segments[name]
            self.used -= taken
            blocks -= taken


class Engine:
    """One simulated engine. `pace` is its speed relative to the others.

    The owner calls `advance` with the time before anything else, and reads `next_change` afterwards. A prompt takes
    at least one step, and no other prompt is read in that step.
    """

    def __init__(self, name: str, cache_tokens: int, *, pace: float = 1.0, speed: Speed = SPEED) -> None:
        self.name = name
        self.cache = PrefixCache(cache_tokens // BLOCK)
        self.prompt_tokens = self.cached_tokens = self.reply_tokens = 0
        self.looks = 0
        """Number of changes of state so far. An event that was planned in an earlier state is ignored."""
        self._speed = speed
        self._pace = pace
        self._now = 0.0
        self._steps = 0.0
        """Number of steps so far. A reply that has been decoded since the beginning would have as many tokens."""
        self._waiting: deque[Call] = deque()
        self._reading: deque[Call] = deque()
        self._unread_steps = 0.0
        """Number of steps that the rest of the first prompt of `_reading` takes."""
        self._read_seconds = 0.0
        """Seconds that reading adds to each of those steps."""
        self._decoding: list[tuple[float, int, Call]] = []
        self._context = 0
        self._order = 0

    def add(self, call: Call) -> None:
        """Add a call that arrives at the time of the last `advance`."""
        self._waiting.append(call)
        self._admit()

    def next_change(self) -> float | None:
        """Return the time at which either the prompt being read or the next reply ends, whichever is first. None while
        idle."""
        step, steps = self._step_seconds(), math.inf
        if self._reading:
            steps = self._unread_steps
        if self._decoding:
            steps = min(steps, self._decoding[0][0] - self._steps)
        return None if math.isinf(steps) else self._now + max(0.0, steps) * step

    def advance(self, now: float) -> tuple[list[Call], list[Call]]:
        """Advance to `now`, which is not after `next_change`. Returns the calls whose first token came at `now`,
        and the calls that ended at `now`."""
        steps = (now - self._now) / self._step_seconds()
        self._now = now
        self._steps += steps
        self.looks += 1
        if self._reading:
            self._unread_steps -= steps
        first: list[Call] = []
        ended: list[Call] = []
        if self._reading and self._unread_steps <= EPSILON:
            call = self._reading.popleft()
            first.append(call)
            self._order += 1
            heapq.heappush(self._decoding, (self._steps + call.reply - 1, self._order, call))
            self._context += call.prompt + call.reply // 2
            self._begin_reading()
        while self._decoding and self._decoding[0][0] <= self._steps + EPSILON:
            _, _, call = heapq.heappop(self._decoding)
            self._context -= call.prompt + call.reply // 2
            self.reply_tokens += call.reply
            self.cache.release(call.path)
            ended.append(call)
        if ended:
            self._admit()
        return first, ended

    def _admit(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            found = self.cache.admit(call.path, call.reply)
            if found is None:
                return
            self._waiting.popleft()
            call.cached = found
            self.prompt_tokens += call.prompt
            self.cached_tokens += found
            self._reading.append(call)
            if len(self._reading) == 1:
                self._begin_reading()

    def _begin_reading(self) -> None:
        if self._reading:
            unread = self._reading[0].prompt - self._reading[0].cached
            self._unread_steps = -(-unread // self._speed.chunk)
            self._read_seconds = unread / self._unread_steps / self._speed.prefill_per_second

    def _step_seconds(self) -> float:
        speed = self._speed
        seconds = speed.step + len(self._decoding) * speed.per_reply + self._context * speed.per_token
        return (seconds + self._read_seconds if self._reading else seconds) / self._pace


class Router(Protocol):
    """Chooses the engine of a call. `ended` is called once for each call, and `over` once for each session."""

    def join(self, engine: str) -> None:
        """Add an engine."""

    def choose(self, call: Call) -> str: ...

    def ended(self, call: Call, engine: str) -> None: ...

    def over(self, session: Session) -> None: ...


class Joining(msgspec.Struct, frozen=True):
    """An engine with the relative speed `pace`, which joins at the time `at`."""

    name: str
    pace: float = 1.0
    at: float = 0.0


@dataclass
class Played:
    """The result of a simulation. `first_token` are seconds from each call to its first token, `done` are the times at
    which sessions ended, and `moves` is the number of calls that went to another engine than the previous call of the
    session."""

    engines: list[Engine]
    first_token: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    calls: int = 0
    moves: int = 0


def play(
    router: Router,
    joining: Sequence[Joining],
    sessions: Sequence[Session],
    *,
    at_once: int,
    start_seconds: float,
    cache_tokens: int,
) -> Played:
    """Run all sessions in their order, `at_once` at a time. The starts of the first `at_once` sessions are spread over
    `start_seconds`."""
    engines: dict[str, Engine] = {}
    played = Played([])
    events: list[tuple[float, int, str, object]] = []
    order = 0
    waiting = deque(sessions[at_once:])
    last: dict[str, str] = {}

    def at(when: float, kind: str, what: object) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, kind, what))

    def look(engine: Engine) -> None:
        if (when := engine.next_change()) is not None:
            at(when, "engine", (engine, engine.looks))

    def advance(engine: Engine, now: float) -> None:
        first, ended = engine.advance(now)
        played.first_token += [now - call.begun for call in first]
        for call in ended:
            router.ended(call, engine.name)
            if not call.last:
                begun = now + call.session.turns[call.turn].pause
                at(begun, "call", call.following(begun))
                continue
            router.over(call.session)
            played.done.append(now)
            if waiting:
                begin(waiting.popleft(), now)

    def begin(session: Session, now: float) -> None:
        at(now, "call", first_call(session, now))

    for each in joining:
        at(each.at, "join", each)
    for number, session in enumerate(sessions[:at_once]):
        begin(session, start_seconds * number / at_once)
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "join":
            assert isinstance(what, Joining)
            engine = engines[what.name] = Engine(what.name, cache_tokens, pace=what.pace)
            engine.advance(now)
            played.engines.append(engine)
            router.join(what.name)
        elif kind == "call":
            assert isinstance(what, Call)
            name = router.choose(what)
            engine = engines[name]
            advance(engine, now)
            engine.add(what)
            look(engine)
            played.calls += 1
            played.moves += last.get(what.session.name, name) != name
            last[what.session.name] = name
        else:
            assert isinstance(what, tuple)
            engine, looks = what
            if engine.looks == looks:
                advance(engine, now)
                look(engine)
    return played
