"""Sessions in sandboxes that were made ahead: they are ready at once, each is used by one session, and all are stopped
in the end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.config import LanesConfig, SandboxesConfig
from outrider.spec import GroupSpec

from .conftest import MakeWorld
from .world import World, group, result_of

WARM = SandboxesConfig(warm=3, warm_memory_mb=1024)
UNTOUCHED = ("run test -f prepared", "run test ! -e /tmp/used", "run echo x > /tmp/used")
PREPARE = [{"run": "test ! -e prepared"}, {"run": "echo x > prepared"}]  # fails the second time


async def full(w: World, ready: int) -> None:
    """Poll the status until `ready` sandboxes are ready."""
    async with asyncio.timeout(10):
        while (status := await w.service.status()).nodes[0].warm.ready != ready:
            assert status.nodes[0].warm.ready <= 9


async def test_the_next_session_finds_its_sandbox_ready(world: MakeWorld) -> None:
    async with world(sandboxes=WARM) as w:
        given: dict[str, Any] = {"init": UNTOUCHED, "runtime": {"prepare": PREPARE}}
        first = await w.run("ask", **given)
        await full(w, 3)
        second = await w.run("ask", **given)
        assert result_of(first).error is result_of(second).error is None
        stats = w.node.stats().warm
        assert (stats.taken, stats.misses) == (1, 1)
        assert {name for name, _ in w.stage.ledger.stopped} == {first.id, "warm-0"}
        await full(w, 3)


async def test_an_upload_that_has_changed_is_uploaded_anew(world: MakeWorld, tmp_path: Path) -> None:
    async with world(sandboxes=WARM) as w:
        runtime = {"prepare": [{"upload": "data", "to": "data"}]}
        for text in ("one", "two"):
            (tmp_path / "files/data").write_text(text)
            session = await w.run("ask", f"run test $(cat data) = {text}", runtime=runtime, max_attempts=1)
            await full(w, 3 if text == "one" else 6)
            assert result_of(session).stop_reason is not None
        assert w.node.stats().warm.misses == 2


def any_fate(rng: random.Random) -> GroupSpec:
    fields: dict[str, Any] = rng.choice(
        (
            {},
            {"limits": {"agent_seconds": 0.05}},
            {"limits": {"session_seconds": 0.05}},
            {"evaluator": {"run": "test -f prepared", "carry": ["prepared"]}},
        )
    )
    do = ["ask", *rng.choice(([], ["crash"], ["break"], ["sleep 0.1"], ["crash at 20"]))]
    runtime = {"prepare": PREPARE, "env": {"KIND": str(rng.randrange(3))}}
    return group(*do, init=UNTOUCHED, runtime=runtime, n=rng.randint(1, 5), max_attempts=2, **fields)


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("many", "seed"), [(25, 1), pytest.param(120, 0, marks=pytest.mark.nightly)])
async def test_a_storm(world: MakeWorld, many: int, seed: int) -> None:
    rng = random.Random(seed)
    async with world(sandboxes=WARM, lanes=LanesConfig(init=4, run=8, eval=2)) as w:
        groups = []
        for _ in range(many):
            groups.append((await w.service.submit(any_fate(rng))).id)
            if rng.random() < 0.3:
                await w.service.cancel(rng.choice(groups))
            await asyncio.sleep(rng.uniform(0, 0.03))
        ended = [session for id in groups for session in (await w.done(id)).sessions]
        faults = [
            str(error) for session in ended if (error := result_of(session).error) and "AssertionError" in str(error)
        ]
        assert faults == []  # no session got a used or an unprepared sandbox
        assert w.node.stats().warm.taken > 20
        assert sum(name.startswith("warm") for name, _ in w.stage.ledger.started) > 20
