"""The statements of docs/engines.md about routers' policies match the simulation. The table is compared with a run; the
text is checked with ratios that leave room for changes of Outrider's placement.
"""

from __future__ import annotations

import pytest
from bench.fleet import play

from bench import routing

from .pages import page

CLOSE = 0.1
"""Maximum difference between a simulated time and the table's time, as a fraction."""
PAGE = page("docs/engines.md")
CASES = {case.name: case for case in routing.CASES}
RUN = {
    "equal engines": ("Outrider", "cache_aware, 32 / 1.5", "cache_aware, 4 / 1.1", "round robin"),
    "one engine at half speed": ("Outrider", "cache_aware, 32 / 1.5", "hash ring, session"),
    "one engine joins late": ("sticky, fewest", "sticky, told of ends"),
    "groups share 28k tokens": ("Outrider", "cache_aware, 32 / 1.5"),
    "small caches": ("Outrider", "cache_aware, 32 / 1.5"),
    "small caches, 240 at once": (
        "Outrider",
        "cache_aware, 32 / 1.5",
        "cache_aware, 64 / 1.5",
        "hash ring, session",
    ),
}
"""The cases and policies that the page's statements are about."""


def test_the_table_has_all_policies_and_names_cases() -> None:
    (table,) = PAGE.tables("policy")
    assert sorted(table.column("policy")) == sorted(routing.POLICIES)
    assert set(table.columns[1:]) <= set(CASES)
    assert set(RUN) == set(table.columns[1:])


def test_the_flags_are_those_of_the_recommended_row() -> None:
    wanted = "--policy cache_aware --balance-abs-threshold 32 --balance-rel-threshold 1.5"
    commands = [line for block in PAGE.blocks for line in block.text.splitlines() if "launch_router" in line]
    assert len(commands) == 2
    assert all(wanted in command for command in commands)


def test_few_sessions_all_go_to_one_engine_with_cache_aware() -> None:
    case = CASES["equal engines"]
    sessions = routing.sessions_of(case, 1, 3)
    counts = {}
    for policy in ("cache_aware, 32 / 1.5", "sticky, fewest"):
        router = routing.POLICIES[policy]()
        played = play(
            router, case.engines, sessions, at_once=32, start_seconds=routing.START_SECONDS, cache_tokens=case.cache
        )
        counts[policy] = sum(engine.prompt_tokens > 0 for engine in played.engines)
    assert counts == {"cache_aware, 32 / 1.5": 1, "sticky, fewest": 4}


@pytest.mark.nightly
async def test_the_page_says_what_a_run_gives() -> None:
    (table,) = PAGE.tables("policy")
    cells = {(case, row[0]): cell for row in table.rows for case, cell in zip(table.columns[1:], row[1:], strict=True)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, policies in RUN.items():
        rows = (await routing.measure(routing.Plan(cases=(CASES[name],), policies=policies)))["rows"]
        found[name] = {row["policy"]: row for row in rows}
        for row in rows:
            cached, seconds = cells[name, row["policy"]].split(", ", 1)
            assert float(cached.removesuffix(" %")) / 100 == pytest.approx(row["cached"], abs=0.03)
            assert float(seconds.removesuffix(" s").replace(",", "")) == pytest.approx(row["seconds_90"], rel=CLOSE)

    equal, slow, late = (found[name] for name in ("equal engines", "one engine at half speed", "one engine joins late"))
    shared, small, fewer = (
        found[name] for name in ("groups share 28k tokens", "small caches", "small caches, 240 at once")
    )
    loose, tight, hashed = "cache_aware, 32 / 1.5", "cache_aware, 4 / 1.1", "hash ring, session"
    assert equal["round robin"]["seconds_90"] > 2 * equal["Outrider"]["seconds_90"]
    assert equal[tight]["read_tokens"] > 2.5 * equal[loose]["read_tokens"]
    assert slow[hashed]["seconds"] > 1.2 * max(slow["Outrider"]["seconds"], slow[loose]["seconds"])
    assert fewer[hashed]["seconds_90"] > 1.3 * fewer["Outrider"]["seconds_90"]
    assert fewer["cache_aware, 64 / 1.5"]["seconds_90"] > 1.3 * fewer[loose]["seconds_90"]
    assert late["sticky, fewest"]["seconds_90"] > 1.03 * late["sticky, told of ends"]["seconds_90"]
    assert shared[loose]["read_tokens"] < 0.9 * shared["Outrider"]["read_tokens"]
    assert small["Outrider"]["seconds_90"] > 1.7 * fewer["Outrider"]["seconds_90"]
    for rows in (equal, slow, shared, fewer):
        assert rows["Outrider"]["seconds_90"] < 1.08 * rows[loose]["seconds_90"]
