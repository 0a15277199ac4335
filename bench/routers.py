"""Ways to choose an engine for a call: Outrider's own, and those of vllm-router and sglang-router.

The latter follow their published descriptions; these policies observe calls and not the engines. Invariant: the same
calls give the same choices, in any process.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import cast

from bench.fleet import Call, Path, Session
from outrider.engines.base import Engine, EngineHealth
from outrider.engines.pool.placement import EngineRecord, Placement
from outrider.trajectory import LogprobKind, TokenMode

VIRTUAL_NODES = 160
"""Number of points of an engine on the hash ring, as in vllm-router."""
CACHE_THRESHOLD = 0.3
"""The fraction of a prompt that must match for cache_aware to follow the match: the default of both routers."""


class Outrider:
    """The placement of `EnginePool`, made with the pool's own classes, which need a running event loop."""

    def __init__(self) -> None:
        self._placement = Placement()
        self._members: dict[str, EngineRecord] = {}

    def join(self, engine: str) -> None:
        member = EngineRecord(
            cast(Engine, _NamedEngine(engine)), EngineHealth(ok=True), kind="simulated", url=None, owned=False
        )
        self._members[engine] = member
        self._placement.refresh(member)

    def choose(self, call: Call) -> str:
        self._placement.rebalance(call.session.name)
        member = self._placement.pick(call.session.name, (True, False))
        assert member is not None
        member.enter()
        self._placement.set_context(call.session.name, member, call.prompt)
        self._placement.refresh(member)
        return member.name

    def ended(self, call: Call, engine: str) -> None:
        member = self._members[engine]
        member.leave(call.reply)
        self._placement.set_context(call.session.name, member, call.prompt + call.reply)
        self._placement.refresh(member)

    def over(self, session: Session) -> None:
        self._placement.release(session.name)


class _NamedEngine:
    """The attributes of an engine that `EngineRecord` reads. It generates nothing."""

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING

    def __init__(self, name: str) -> None:
        self.name = name


class _Counting:
    """Engines in the order in which they joined, and the calls in flight on each."""

    def __init__(self) -> None:
        self.in_flight: dict[str, int] = {}

    def join(self, engine: str) -> None:
        self.in_flight[engine] = 0

    def choose(self, call: Call) -> str:
        engine = self.pick(call)
        self.in_flight[engine] += 1
        return engine

    def pick(self, call: Call) -> str:
        raise NotImplementedError

    def ended(self, call: Call, engine: str) -> None:
        self.in_flight[engine] -= 1

    def over(self, session: Session) -> None:
        pass

    def least(self) -> str:
        return min(self.in_flight, key=self.in_flight.__getitem__)


class RoundRobin(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._calls = count()

    def pick(self, call: Call) -> str:
        return list(self.in_flight)[next(self._calls) % len(self.in_flight)]


class LeastLoaded(_Counting):
    """Sends each call to the engine with the fewest calls in flight."""

    def pick(self, call: Call) -> str:
        return self.least()


class ConsistentHash(_Counting):
    """Chooses by a hash ring. A new engine takes sessions from all other engines; load never moves a session."""

    def __init__(self, key: Callable[[Session], str]) -> None:
        super().__init__()
        self._key = key
        self._ring: list[tuple[int, str]] = []

    def join(self, engine: str) -> None:
        super().join(engine)
        self._ring += [(_hash(f"{engine}:{number}"), engine) for number in range(VIRTUAL_NODES)]
        self._ring.sort()

    def pick(self, call: Call) -> str:
        at = bisect.bisect(self._ring, (_hash(self._key(call.session)), ""))
        return self._ring[at % len(self._ring)][1]


class Sticky(_Counting):
    """Sends all calls of a session to the engine of its first call. This engine is random, as in sglang-router's
    `manual` by default, or has the fewest sessions, as in vllm-router's `sticky_least_loaded` and in `manual` with
    `min_group`. With `told` the router is notified of the end of a session; otherwise the router counts the session for
    hours.
    """

    def __init__(self, *, fewest: bool, told: bool = False) -> None:
        super().__init__()
        self._fewest, self._told = fewest, told
        self._places: dict[str, str] = {}
        self._sessions: Counter[str] = Counter()

    def pick(self, call: Call) -> str:
        name = call.session.name
        if name not in self._places:
            engines = list(self.in_flight)
            engine = min(engines, key=self._sessions.__getitem__) if self._fewest else None
            self._places[name] = engine or engines[_hash(name) % len(engines)]
            self._sessions[self._places[name]] += 1
        return self._places[name]

    def over(self, session: Session) -> None:
        if self._told:
            self._sessions[self._places[session.name]] -= 1


class CacheAware(_Counting):
    """Sends a call to the engine that has been sent the longest prefix of the prompt. If this prefix is not more than
    `CACHE_THRESHOLD` of the prompt, the engine with the fewest calls in flight is taken. The engine with the fewest
    calls also gets every call while the busiest engine has more than `balance_abs` calls more than the idlest, and more
    than `balance_rel` times as many. Among equal matches the engine that was sent the prefix last is taken. Prefixes
    that engines have dropped from their caches stay in the tree.
    """

    def __init__(self, balance_abs: int, balance_rel: float) -> None:
        super().__init__()
        self._abs, self._rel = balance_abs, balance_rel
        self._sent: dict[str, dict[str, tuple[int, int]]] = {}
        """Tokens of each segment on each engine, and the number of the last call that used the segment."""
        self._calls = count()

    def join(self, engine: str) -> None:
        super().join(engine)
        self._sent[engine] = {}

    def pick(self, call: Call) -> str:
        engine = self._pick(call)
        number = next(self._calls)
        for name, tokens in call.path:
            self._sent[engine][name] = (max(tokens, self._sent[engine].get(name, (0, 0))[0]), number)
        return engine

    def _pick(self, call: Call) -> str:
        loads = self.in_flight.values()
        most, fewest = max(loads), min(loads)
        if most - fewest > self._abs and most > self._rel * fewest:
            return self.least()
        best = max(self.in_flight, key=lambda engine: self._match(engine, call.path))
        matched, _ = self._match(best, call.path)
        return best if matched > CACHE_THRESHOLD * call.prompt else self.least()

    def _match(self, engine: str, path: Path) -> tuple[int, int]:
        found, last, sent = 0, -1, self._sent[engine]
        for name, tokens in path:
            here, number = sent.get(name, (0, -1))
            if here:
                found, last = found + min(here, tokens), number
            if here < tokens:
                break
        return found, last


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
