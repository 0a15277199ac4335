"""A storm of many sessions on fakes, with every kind of failure."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from outrider.config import LanesConfig
from outrider.spec import GroupSpec

from .conftest import MakeWorld
from .storm import Fate, add_engines, assert_over, draw, unleash
from .world import group

LANES = LanesConfig(init=8, run=24, eval=6)
PREPARE = [{"run": "echo x > prepared"}, {"write": "y", "to": "written"}]
HANGING = ("start", "exec")
BROKEN = ("start", "exec", "write")


def well(rng: random.Random) -> GroupSpec:
    return group(*["ask"] * rng.randint(1, 4), runtime={"prepare": PREPARE}, verdicts=[rng.random()])


def graded_by_command(rng: random.Random) -> GroupSpec:
    grader = {"run": rng.choice(("true", "false", "test -f prepared"))}
    return group("ask", "run echo hi > out", runtime={"prepare": PREPARE}, evaluator=grader)


def graded_elsewhere(rng: random.Random) -> GroupSpec:
    carry = rng.choice((["out"], [".", "/tmp"], [], "all"))
    grader = {"run": rng.choice(("true", "false", "test -f prepared", "exit 7", "sleep 60")), "carry": carry}
    do = ["ask", "run echo hi > out", *rng.choice(([], ["sleep 0.05"], ["crash"], ["break"]))]
    evaluator = {**grader, "seconds": rng.uniform(0.01, 0.1)}
    return group(*do, runtime={"prepare": PREPARE}, evaluator=evaluator, max_attempts=rng.randint(1, 3))


def graded_where_nothing_starts(rng: random.Random) -> GroupSpec:
    limits = {"session_seconds": rng.uniform(0.05, 0.3)}
    runtime = {"env": {"HANG": "start"}, "kind": "service.test_grading:HangingFresh"}
    evaluator = {"run": "true", "carry": ["out"]}
    return group("ask", runtime=runtime, evaluator=evaluator, limits=limits, max_attempts=1)


def out_of_agent_time(rng: random.Random) -> GroupSpec:
    return group(*["ask"] * rng.randint(0, 2), "wait forever", limits={"agent_seconds": rng.uniform(0.01, 1.0)})


def out_of_session_time(rng: random.Random) -> GroupSpec:
    return group("ask", "wait forever", limits={"session_seconds": rng.uniform(0.01, 0.2)})


def hangs_before_the_run(rng: random.Random) -> GroupSpec:
    runtime = {"env": {"HANG": rng.choice(HANGING)}, "prepare": PREPARE}
    return group("ask", runtime=runtime, limits={"session_seconds": rng.uniform(0.01, 0.1)})


def in_the_middle_of_a_reply(rng: random.Random) -> GroupSpec:
    return group("ask", instruction="never end", limits={"agent_seconds": rng.uniform(0.02, 1.0)})


def out_of_turns(rng: random.Random) -> GroupSpec:
    return group(*["ask"] * 3, rng.choice(("ask", "ask quietly")), limits={"turns": rng.randint(1, 3)})


def out_of_tokens(rng: random.Random) -> GroupSpec:
    return group(*["ask"] * 6, limits={"response_tokens": rng.randint(3, 12)})


def overflowing(rng: random.Random) -> GroupSpec:
    return group("ask", instruction="too long " * 20_000, max_attempts=rng.randint(1, 3))


def harness_fails(rng: random.Random) -> GroupSpec:
    do = rng.choice((["ask", "crash"], ["crash"], ["note nothing"], ["ask quietly", "crash"]))
    return group(*do, max_attempts=rng.randint(1, 3))


def program_fails(rng: random.Random) -> GroupSpec:
    harness = {"command": rng.choice((["false"], ["bash", "-c", "echo oh >&2; exit 3"], ["true"]))}
    return group(harness=harness, max_attempts=rng.randint(1, 3))


def engine_rejects(rng: random.Random) -> GroupSpec:
    return group(rng.choice(("ask", "ask quietly")), instruction="reject this")


def engine_breaks_off(rng: random.Random) -> GroupSpec:
    return group(rng.choice(("ask", "ask quietly")), instruction="break off", max_attempts=rng.randint(1, 2))


def sandbox_fails(rng: random.Random) -> GroupSpec:
    runtime = {"env": {"OUTRIDER_FAKE_FAIL": rng.choice(BROKEN)}, "prepare": PREPARE}
    return group("ask", runtime=runtime, max_attempts=rng.randint(1, 3))


def sandbox_breaks(rng: random.Random) -> GroupSpec:
    return group("ask", "break", max_attempts=rng.randint(1, 3))


def grader_fails(rng: random.Random) -> GroupSpec:
    return group("ask", verdicts=["fail"], max_attempts=rng.randint(1, 3))


def grader_hangs(rng: random.Random) -> GroupSpec:
    grader = {"run": "sleep 60", "seconds": rng.uniform(0.01, 0.1)}
    return group("ask", evaluator=grader, max_attempts=rng.randint(1, 2))


FATES: tuple[Fate, ...] = (
    *[well] * 6,
    *[graded_by_command] * 2,
    *[graded_elsewhere] * 3,
    graded_where_nothing_starts,
    out_of_agent_time,
    out_of_session_time,
    hangs_before_the_run,
    in_the_middle_of_a_reply,
    out_of_turns,
    out_of_tokens,
    overflowing,
    harness_fails,
    program_fails,
    engine_rejects,
    engine_breaks_off,
    sandbox_fails,
    sandbox_breaks,
    grader_fails,
    grader_hangs,
)
ENDINGS = {
    "completed",
    "max_turns",
    "max_tokens",
    "context_overflow",
    "agent_timeout",
    "session_timeout",
    "cancelled",
    "harness_error",
    "engine_rejected",
    "engine_unavailable",
    "runtime_failure",
    "evaluator_error",
}


@pytest.mark.timeout(600)
@pytest.mark.deep
@pytest.mark.parametrize(("sessions", "seed"), [(1000, 0)])
async def test_many_sessions(world: MakeWorld, tokenizer: Path, sessions: int, seed: int) -> None:
    rng = random.Random(seed)
    async with world(lanes=LANES) as w:
        await add_engines(w, tokenizer, 6, percent=3)
        groups = draw(rng, FATES, sessions)
        started = time.monotonic()
        views = await unleash(w, rng, groups, spared=len(FATES), cancelled=0.5, within=sessions / 400)
        seconds = time.monotonic() - started
        endings = await assert_over(w, groups, views)
        assert endings.keys() >= ENDINGS, endings
        failures = sum(engine.failures for engine in w.service.pool.status())
        assert failures > 0
        print(f"{sessions} sessions in {seconds:.1f} s, {failures} engine failures: {dict(endings)}")
