"""The simulation of bench/routing.py loses no tokens and no sessions, and gives the same figures in every process.

tests/docs/test_routing.py compares docs/engines.md with these figures.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path as FilePath

import orjson
import pytest
from bench.fleet import BLOCK, SPEED, Engine, Joining, Path, PrefixCache, Session, Turn, first_call, play
from bench.routers import CacheAware, Outrider

from bench import report, routing, sheets

ROOT = FilePath(__file__).parents[2]
ENGINES = (Joining("one"), Joining("two", pace=0.5), Joining("late", at=60.0))
TINY = routing.Case(name="tiny", engines=ENGINES, cache=400_000, at_once=24)
GROUPS = 3


@pytest.mark.parametrize("policy", routing.POLICIES)
async def test_every_token_is_cached_or_read_and_every_session_ends(policy: str) -> None:
    sessions = routing.sessions_of(TINY, 7, GROUPS)

    played = play(
        routing.POLICIES[policy](),
        TINY.engines,
        sessions,
        at_once=TINY.at_once,
        start_seconds=10.0,
        cache_tokens=TINY.cache,
    )

    turns = [turn for session in sessions for turn in session.turns]
    assert played.calls == len(played.first_token) == len(turns)
    assert len(played.done) == len(sessions)
    assert sum(engine.prompt_tokens for engine in played.engines) == sum(each.prompt_tokens for each in sessions)
    assert sum(engine.reply_tokens for engine in played.engines) == sum(turn.reply for turn in turns)
    for engine in played.engines:
        assert engine.cached_tokens <= engine.prompt_tokens
        assert engine.cache.most_used <= engine.cache.capacity
        assert engine.cache.pinned == 0
    assert sum(engine.cached_tokens for engine in played.engines) > 0
    assert max(engine.cache.most_used for engine in played.engines) > 0.9 * TINY.cache / BLOCK
    assert min(played.first_token) > 0


@pytest.mark.deep
async def test_the_same_seed_gives_the_same_figures_in_any_process() -> None:
    plan = routing.Plan(groups=GROUPS, cases=(TINY,), policies=("Outrider", "cache_aware, 4 / 1.1"))
    code = (
        "import asyncio, orjson, bench.routing as r, bench.fleet as f\n"
        "e = (f.Joining('one'), f.Joining('two', pace=0.5), f.Joining('late', at=60.0))\n"
        "c = r.Case(name='tiny', engines=e, cache=400_000, at_once=24)\n"
        "p = r.Plan(groups=3, cases=(c,), policies=('Outrider', 'cache_aware, 4 / 1.1'))\n"
        "print(orjson.dumps(asyncio.run(r.measure(p))).decode())"
    )

    here = await routing.measure(plan)
    there = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "5"},
        capture_output=True,
        timeout=60,
        check=True,
    )

    assert orjson.loads(there.stdout) == here
    other = await routing.measure(routing.Plan(seeds=(2,), groups=GROUPS, cases=(TINY,), policies=("Outrider",)))
    assert other["rows"][0] != here["rows"][0]


@pytest.mark.deep
async def test_it_is_shown() -> None:
    found = await routing.measure(routing.Plan(groups=GROUPS, cases=(TINY,)))
    made = report.Report(
        at=report.now(),
        machine=report.machine(),
        load=(0.0, 0.0),
        seconds={"routing": 1.0},
        quick=True,
        results={"routing": found},
    )

    (sheet,) = sheets.sheets(made.results)
    assert [row[0] for row in sheet.rows] == list(routing.POLICIES)
    assert "| Outrider" in report.markdown(made)


def test_sessions_are_those_of_agents() -> None:
    sessions = routing.sessions_of(routing.CASES[0], 1)

    turns = sorted(len(session.turns) for session in sessions)
    assert turns[len(turns) // 10] >= 30
    assert turns[len(turns) * 9 // 10] <= 40
    sizes = [sum(each.group == session.group for each in sessions) for session in sessions]
    assert min(sizes) >= 8
    assert max(sizes) <= 16
    replies = sorted(turn.reply for session in sessions for turn in session.turns)
    assert replies[-1] > 20 * replies[len(replies) // 2]
    assert all(tokens % BLOCK == 0 for session in sessions for _, tokens in session.shared)


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_keeps_what_is_pinned_and_never_exceeds_its_capacity(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache(200)
    under_way: list[Path] = []
    own: dict[int, int] = {}
    refused = 0
    for _ in range(400):
        if under_way and draw.random() < 0.5:
            cache.release(under_way.pop(draw.randrange(len(under_way))))
        number = draw.randrange(12)
        if not any(path[-1][0] == f"s{number}" for path in under_way):
            own[number] = own.get(number, 0) % (40 * BLOCK) + draw.randint(1, 900)
            path: Path = (("all", 4 * BLOCK), (f"g{number % 3}", 3 * BLOCK), (f"s{number}", own[number]))
            before = cache.matched(path)
            found = cache.admit(path, draw.randint(1, 300))
            if found is None:
                refused += 1
                assert cache.matched(path) == before
            else:
                under_way.append(path)
                assert found <= before
        assert cache.used <= cache.most_used <= cache.capacity
        for path in under_way:
            assert cache.matched(path) == sum(tokens // BLOCK * BLOCK for _, tokens in path)
    assert refused > 0


def test_what_was_used_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    cache = PrefixCache(10)
    shared = ("all", 4 * BLOCK)
    for name in ("old", "new"):
        assert cache.admit((shared, (name, 3 * BLOCK - 1)), 1) is not None
        cache.release((shared, (name, 3 * BLOCK - 1)))
    assert cache.used == 10

    assert cache.admit((shared, ("next", 2 * BLOCK - 1)), 1) == 4 * BLOCK

    assert cache.matched((shared, ("old", 3 * BLOCK))) == 5 * BLOCK
    assert cache.matched((shared, ("new", 3 * BLOCK))) == 7 * BLOCK


def test_a_lone_call_takes_the_steps_of_its_prompt_and_reply() -> None:
    session = Session("s", (("all", 2 * SPEED.chunk),), (Turn(SPEED.chunk, 11, 0.0),))
    engine = Engine("e", 1_000_000)
    call = first_call(session, 0.0)
    engine.advance(0.0)
    engine.add(call)

    read = engine.next_change()
    assert read is not None
    assert read == pytest.approx(3 * (SPEED.step + SPEED.chunk / SPEED.prefill_per_second))
    assert engine.advance(read) == ([call], [])
    ends = engine.next_change()
    assert ends is not None
    one = SPEED.step + SPEED.per_reply + (call.prompt + call.reply // 2) * SPEED.per_token
    assert ends - read == pytest.approx(10 * one)
    assert engine.advance(ends) == ([], [call])
    assert engine.next_change() is None


async def test_cache_aware_follows_the_prompt_until_engines_are_unequal() -> None:
    router = CacheAware(2, 1.5)
    for engine in ("one", "two"):
        router.join(engine)
    sessions = [Session(f"s{number}", (("all", 64), ("g", 640)), (Turn(64, 1, 0),)) for number in range(5)]

    chosen = [router.choose(first_call(session, 0.0)) for session in sessions]

    assert chosen == ["one", "one", "one", "two", "two"]  # at the fourth call, one has three calls more than two


async def test_outriders_placement_is_that_of_the_pool() -> None:
    """The first call of a session goes to the engine with the least load. Later calls go to the same engine, unless its
    load is much higher than another engine's."""
    router = Outrider()
    for engine in ("one", "two"):
        router.join(engine)
    short, long = Turn(64, 1, 0.0), Turn(2_000_000, 1, 0.0)
    turns = {"a": (short, short), "b": (short, long), "c": (short, short), "d": (short, short)}
    calls = {name: first_call(Session(name, (("all", 64),), turns[name]), 0.0) for name in turns}
    placed = {name: router.choose(call) for name, call in calls.items()}
    assert placed == {"a": "one", "b": "two", "c": "one", "d": "two"}
    for name, engine in placed.items():
        router.ended(calls[name], engine)

    assert [router.choose(calls[name].following(1.0)) for name in ("a", "b", "d")] == ["one", "two", "one"]
