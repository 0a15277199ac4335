"""The pace of an engine: how it is learned, how slowly it changes, and how it is remembered."""

from __future__ import annotations

from contextlib import aclosing
from itertools import count
from typing import Any

import msgspec
import pytest

from outrider.engines.base import EngineOptions
from outrider.engines.pool.follower import apply_state
from outrider.engines.pool.leader import note_uses, pool_state
from outrider.engines.pool.placement import EngineUse, use_of
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.waits import KNOWN_CALLS, LIMITS, Overdue, Pace, PaceSummary, RememberedPace
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.nodes.claims import checked_uses
from support.clock import pass_time

from .test_silence import Call, Dripping, engine_of, known, request, until

USUAL: dict[str, Any] = {
    "first": 0.1,
    "prompt_tokens": 100,
    "first_tokens": 1,
    "rest": 1.0,
    "rest_tokens": 100,
    "overdue": False,
}
DRIP = USUAL | {"first": 4.0, "rest": 400.0, "overdue": True}
SLOW = PaceSummary(first=9.0, first_per_prompt_token=0.0, per_token=1.0, first_tokens=1, longest=100, calls=300)


def learned(pace: Pace, call: dict[str, Any], *, since: float, seconds: float, calls_per_second: int) -> float:
    """Record calls for some seconds. Returns the time at which they end."""
    for number in range(int(seconds * calls_per_second)):
        pace.note(since + number / calls_per_second, **call)
    return since + seconds


def dues(pace: Pace) -> tuple[float, float]:
    return pace.first_due(LIMITS, 100, 10), pace.token_due()


@pytest.mark.parametrize("calls_per_second", [1, 200])
def test_the_pace_of_an_engine_does_not_move_while_it_misbehaves_for_a_minute(calls_per_second: int) -> None:
    pace = Pace()
    now = learned(pace, USUAL, since=0, seconds=600, calls_per_second=calls_per_second)
    usual = dues(pace)
    now = learned(pace, DRIP, since=now, seconds=60, calls_per_second=calls_per_second)
    assert dues(pace) == usual
    learned(pace, DRIP, since=now, seconds=300, calls_per_second=calls_per_second)  # the engine stays slower
    assert dues(pace) > usual


def test_a_pace_that_has_just_become_known_does_not_move_sooner() -> None:
    pace = Pace()
    for number in range(KNOWN_CALLS):
        assert not pace.known
        pace.note(number / 100, **USUAL)
    assert pace.known
    usual = dues(pace)
    learned(pace, DRIP, since=1.0, seconds=60, calls_per_second=10)
    assert dues(pace) == usual


def test_a_pace_is_not_learned_of_calls_during_a_silence_but_of_a_slow_engine() -> None:
    pace = Pace()
    now = learned(pace, USUAL, since=0, seconds=4, calls_per_second=1)
    now = learned(pace, DRIP, since=now + 3600, seconds=100, calls_per_second=10)
    assert not pace.known
    now = learned(pace, USUAL, since=now, seconds=1, calls_per_second=1)
    now = learned(pace, DRIP, since=now, seconds=100, calls_per_second=10)  # the next silence
    assert not pace.known
    now = learned(pace, USUAL, since=now, seconds=3, calls_per_second=1)
    assert pace.usual_token == 0.01
    slow = Pace()
    learned(slow, DRIP, since=0, seconds=130, calls_per_second=1)
    assert slow.usual_token == 4.0


@pytest.mark.parametrize("remembered", [False, True])
def test_a_slow_engine_that_is_seldom_asked_is_known_after_a_few_calls(remembered: bool) -> None:
    """The engine may differ from the engine whose pace is remembered."""
    pace = Pace()
    if remembered:
        learned(pace, USUAL, since=0, seconds=20, calls_per_second=1)
        pace = Pace(pace.summary)
    for now in range(0, 8 * 60, 60):
        assert pace.usual_token < 4.0
        pace.note(now, **DRIP)
    assert pace.usual_token == 4.0


def test_an_engine_that_was_fast_here_is_not_soon_taken_for_a_slow_one() -> None:
    pace = Pace()
    now = learned(pace, USUAL, since=0, seconds=20, calls_per_second=1)
    for _ in range(9):
        pace.note(now := now + 60, **DRIP)
    assert pace.usual_token == 0.01
    for _ in range(3):
        pace.note(now := now + 60, **DRIP)
    assert pace.usual_token == 4.0


def test_an_engine_of_whole_replies_is_known_as_one_though_most_are_short() -> None:
    pace = Pace()
    short = USUAL | {"first_tokens": 5, "rest": 0.0, "rest_tokens": 0}
    now = learned(pace, short, since=0, seconds=20, calls_per_second=1)
    assert pace.whole_reply(1000) > 0  # it may be an engine of whole replies
    for _ in range(20):
        now = learned(pace, short, since=now, seconds=4, calls_per_second=1)
        pace.note(now := now + 60, **short | {"first": 60.0, "first_tokens": 1500})
    assert pace.whole_reply(1000) > 0
    learned(pace, USUAL, since=now, seconds=20, calls_per_second=1)
    streams = Pace()
    learned(streams, USUAL | {"rest_tokens": 5}, since=0, seconds=20, calls_per_second=1)
    assert streams.whole_reply(1000) == 0


def test_short_prompts_do_not_say_how_long_a_long_one_takes() -> None:
    pace = Pace()
    learned(pace, USUAL | {"prompt_tokens": 10, "first": 0.05}, since=0, seconds=20, calls_per_second=1)
    assert pace.first_due(LIMITS, 8000, 10) < 15


def test_a_remembered_pace_is_that_of_the_earlier_service() -> None:
    earlier = Pace()
    learned(earlier, USUAL, since=0, seconds=100, calls_per_second=2)
    assert earlier.summary is not None
    pace = Pace(msgspec.json.decode(msgspec.json.encode(earlier.summary), type=PaceSummary))
    assert dues(pace) == dues(earlier)
    learned(pace, DRIP, since=1000.0, seconds=60, calls_per_second=10)
    assert dues(pace) == dues(earlier)


def test_an_unknown_engine_has_no_more_time_at_the_sessions_cost_than_a_fast_one() -> None:
    pace = Pace()
    assert pace.first_due(LIMITS, 0, 10) == LIMITS.least
    assert pace.first_due(LIMITS, 4000, 10) == LIMITS.least + 2
    assert pace.token_due() < 0.2


def test_a_prompt_much_longer_than_usual_and_replies_in_one_piece_are_due_later() -> None:
    pace = Pace()
    whole = {"first": 8.0, "prompt_tokens": 100, "first_tokens": 800, "rest": 0.0, "rest_tokens": 0, "overdue": True}
    learned(pace, whole, since=0, seconds=130, calls_per_second=1)
    assert pace.first_due(LIMITS, 100_000, 800) > 50
    assert pace.first_due(LIMITS, 100, 8000) >= 8 * 8  # eight times its longest recent wait
    assert pace.whole_reply(8000) == 80


def test_an_engine_of_whole_replies_that_hangs_is_due_by_the_replies_that_it_gave() -> None:
    pace, lengths = Pace(), count(400, 10)
    for now in range(0, 400, 10):
        tokens = next(lengths)
        whole = {"first": tokens * 0.02, "first_tokens": tokens, "rest": 0.0, "rest_tokens": 0}
        pace.note(now, **USUAL | whole | {"overdue": not pace.known})
    assert pace.first_due(LIMITS, 100, 100_000) < 200


def test_paces_resemble_each_other_if_they_differ_by_less_than_a_quarter() -> None:
    assert SLOW.resembles(msgspec.structs.replace(SLOW, first=10.0, calls=0))
    assert not SLOW.resembles(msgspec.structs.replace(SLOW, first=12.0))
    assert not SLOW.resembles(msgspec.structs.replace(SLOW, per_token=0.0))


def engine() -> ScriptedEngine:
    return ScriptedEngine(EngineOptions(name="a"))


async def test_a_pool_starts_from_what_is_remembered_of_the_same_engine() -> None:
    remembered = RememberedPace(kind="in-process", url=None, pace=SLOW)
    async with EnginePool(paces={"a": remembered}) as pool:
        await pool.add_engine(engine())
        assert pool.paces() == {"a": remembered}
    async with EnginePool(paces={"a": msgspec.structs.replace(remembered, url="http://127.0.0.1:1")}) as pool:
        await pool.add_engine(engine())
        assert pool.paces() == {}  # the remembered pace belongs to another engine of the same name


async def test_an_engine_that_hangs_from_the_start_is_found_out_sooner_if_its_pace_is_remembered() -> None:
    usual = msgspec.structs.replace(SLOW, first=0.1)
    async with EnginePool(paces={"a": RememberedPace(kind="in-process", url=None, pace=usual)}) as pool:
        hanging = engine_of("a")
        await pool.add_engine(hanging)
        hanging.hang()
        call = Call(pool, "s")
        await until(lambda: not pool.status()[0].ok, 2 * (LIMITS.least + LIMITS.check))
        hanging.revive()
        await call.task


async def test_a_pool_learns_the_pace_of_its_followers_and_tells_it_to_the_others() -> None:
    async with EnginePool() as pool:
        await pool.add_engine(engine())
        changes = list[None]()
        pool.changes.subscribe(changes.append)
        note_uses(pool, "one", {"a": EngineUse(pace=SLOW)})
        assert pool.paces()["a"].pace == SLOW
        assert changes == [None]
        [state] = pool_state(pool).engines
        assert state.pace == SLOW
        newer = msgspec.structs.replace(SLOW, per_token=2.0, calls=400)
        note_uses(pool, "one", {"a": EngineUse(pace=newer)})
        assert pool.paces()["a"].pace == newer
        note_uses(pool, "one", {})
        assert pool.paces()["a"].pace == SLOW  # the pace that was reported first


async def test_a_pool_remembers_the_pace_of_an_engine_that_leaves_and_returns() -> None:
    async with EnginePool() as pool:
        first = engine_of("a")
        await pool.add_engine(first)
        await known(pool)
        before = pool.paces()
        await pool.remove("a", seconds=0)
        await pool.add_engine(engine_of("a"))
        assert pool.paces() == before != {}


@pytest.mark.parametrize("way", ["given up", "read slowly"])
async def test_what_the_consumer_does_is_no_pace_of_the_engines(way: str) -> None:
    async with EnginePool() as pool:
        await pool.add_engine(engine_of("a", Dripping))
        for number in range(2 * KNOWN_CALLS):
            call = pool.calls.generate(request(f"s{number}"), Overdue())
            async with aclosing(call) as chunks:
                async for chunk in chunks:
                    if way == "given up":
                        break
                    if chunk.finish is None:
                        await pass_time(2)
        assert pool.paces() == {}
        await known(pool)
        assert pool.paces() != {}


async def test_a_follower_takes_the_pace_over_unless_it_knows_it() -> None:
    async with EnginePool() as leader, EnginePool() as follower:
        await leader.add_engine(engine())
        [state] = pool_state(leader).engines
        await follower.adopt(state, engine())
        apply_state(follower, msgspec.structs.replace(state, pace=SLOW))
        assert use_of(follower.members["a"]).pace == SLOW
        apply_state(follower, msgspec.structs.replace(state, pace=msgspec.structs.replace(SLOW, per_token=2.0)))
        assert use_of(follower.members["a"]).pace == SLOW


def test_the_pace_that_a_node_of_somebody_elses_reports_is_not_believed() -> None:
    uses = {"a": EngineUse(pace=SLOW, suspect="x" * 100_000, in_flight=3)}
    own, strange = (checked_uses(uses, stranger=stranger)["a"] for stranger in (False, True))
    assert own.pace == SLOW
    assert strange.pace is None
    assert strange.in_flight == 3
    assert len(strange.suspect or "") < 10_000
