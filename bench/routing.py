"""Placement of a session's next call on engines: Outrider's placement compared with the policies of routers, by
simulation.

Sessions are those of coding agents: 30 to 40 turns as a rule, a context that grows with each, pauses for tool calls,
replies and pauses with heavy tails, and groups of sessions that begin with the same prompt. All policies get the same
draws; engines are simulated (`fleet.py`). Nothing is timed, so the figures are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from bench.fleet import BLOCK, Joining, Router, Session, Turn, play
from bench.routers import CacheAware, ConsistentHash, LeastLoaded, Outrider, RoundRobin, Sticky

ENGINES = 4
GROUPS = 36
AT_ONCE = 320
"""Number of sessions at once, 80 per engine; each further session begins when another ends."""
START_SECONDS = 60.0
"""The first sessions begin within this many seconds, because sandboxes are not ready all at once."""
INSTRUCTIONS = 4096
"""Number of tokens with which all sessions begin: the harness's instructions and tools."""
TASK = 2048
"""Number of tokens of the task. The task follows the instructions, and is shared by the sessions of a group."""
LONG_TASK = 24_576
"""Number of tokens of the task in groups that share much, such as files of a repository."""
CONTEXT = 131_072
"""A session ends when its context has this many tokens, however many turns are left."""
CACHE = 3_600_000
"""Number of tokens that an engine's cache can hold. Eighty of the sessions have about 2.2 million at once."""
SMALL_CACHE = 2_000_000
"""Number of tokens of a small cache: not enough for eighty sessions, but enough for sixty."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One case of the simulation. `tail` is the spread of the numbers of turns: the standard deviation of their
    logarithms."""

    name: str
    engines: tuple[Joining, ...] = tuple(Joining(f"engine-{number}") for number in range(ENGINES))
    tail: float = 0.1
    task: int = TASK
    cache: int = CACHE
    at_once: int = AT_ONCE


_OTHERS = Case(name="").engines[:-1]
CASES = (
    Case(name="equal engines"),
    Case(name="one engine joins late", engines=(*_OTHERS, Joining("late", at=240.0))),
    Case(name="one engine at half speed", engines=(*_OTHERS, Joining("slow", pace=0.5))),
    Case(name="sessions of unequal length", tail=0.8),
    Case(name="groups share 28k tokens", task=LONG_TASK),
    Case(name="small caches", cache=SMALL_CACHE),
    Case(name="small caches, 240 at once", cache=SMALL_CACHE, at_once=240),
)

POLICIES: dict[str, Callable[[], Router]] = {
    "Outrider": Outrider,
    "cache_aware, 32 / 1.5": lambda: CacheAware(32, 1.5),
    "cache_aware, 4 / 1.1": lambda: CacheAware(4, 1.1),
    "cache_aware, 64 / 1.5": lambda: CacheAware(64, 1.5),
    "sticky, fewest": lambda: Sticky(fewest=True),
    "sticky, told of ends": lambda: Sticky(fewest=True, told=True),
    "sticky, at random": lambda: Sticky(fewest=False),
    "hash ring, session": lambda: ConsistentHash(lambda session: session.name),
    "hash ring, prefix": lambda: ConsistentHash(lambda session: session.group),
    "least loaded": LeastLoaded,
    "round robin": RoundRobin,
}


class Plan(msgspec.Struct, frozen=True):
    """The cases and the seeds of a run. Figures are means over the seeds."""

    seeds: tuple[int, ...] = (1,)
    groups: int = GROUPS
    cases: tuple[Case, ...] = CASES
    policies: tuple[str, ...] = tuple(POLICIES)


FULL = Plan()
QUICK = Plan(cases=(CASES[0], CASES[2]))
"""A plan with two cases: equal engines, and engines with one at half speed."""


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    rows = []
    for case in plan.cases:
        traffic = [sessions_of(case, seed, plan.groups) for seed in plan.seeds]
        for policy in plan.policies:
            found = [_figures(POLICIES[policy](), case, sessions) for sessions in traffic]
            means = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
            rows.append({"case": case.name, "at_once": case.at_once, "policy": policy, **means})
    return {"engines": ENGINES, "seeds": len(plan.seeds), "rows": rows}


def sessions_of(case: Case, seed: int, groups: int = GROUPS) -> list[Session]:
    """Return the sessions of a case in the order of their starts. The same seed gives the same sessions in every
    process."""
    draw = random.Random(f"{seed}")
    return [
        Session(
            f"session-{group}-{number}",
            (("instructions", INSTRUCTIONS), (f"group-{group}", case.task)),
            _turns(case, draw),
        )
        for group in range(groups)
        for number in range(draw.randint(8, 16))
    ]


def _turns(case: Case, draw: random.Random) -> tuple[Turn, ...]:
    """Draw the turns of a session. The median length is 500 tokens for tool results and 250 for replies, both at most
    8192; the median pause is 3 s, at most 120 s."""
    turns: list[Turn] = []
    context = INSTRUCTIONS + case.task
    for _ in range(max(2, round(draw.lognormvariate(_LOG_35, case.tail)))):
        new = min(8192, round(draw.lognormvariate(_LOG_500, 1.0))) + 1
        reply = min(8192, round(draw.lognormvariate(_LOG_250, 0.9))) + 1
        context += new + reply
        if context > CONTEXT:
            break
        turns.append(Turn(new, reply, min(120.0, draw.lognormvariate(_LOG_3, 1.2))))
    return tuple(turns)


_LOG_35, _LOG_500, _LOG_250, _LOG_3 = 3.5553, 6.2146, 5.5215, 1.0986
"""Natural logarithms of the medians: 35 turns, 500 and 250 tokens, 3 seconds."""


def _figures(router: Router, case: Case, sessions: list[Session]) -> dict[str, float]:
    played = play(
        router, case.engines, sessions, at_once=case.at_once, start_seconds=START_SECONDS, cache_tokens=case.cache
    )
    prompt = sum(engine.prompt_tokens for engine in played.engines)
    cached = sum(engine.cached_tokens for engine in played.engines)
    first_token = sorted(played.first_token)
    done = sorted(played.done)
    return {
        "cached": cached / prompt,
        "read_tokens": prompt - cached,
        "seconds": done[-1],
        "seconds_90": done[len(done) * 9 // 10],
        "first_token_p95": first_token[len(first_token) * 95 // 100],
        "moves_per_session": played.moves / len(sessions),
        "fullest_cache": max(engine.cache.most_used for engine in played.engines) * BLOCK / case.cache,
    }
