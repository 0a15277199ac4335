"""The storm on real sandboxes: no process, mount, socket, descriptor or temporary of them outlives it."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from outrider.config import LanesConfig
from outrider.runtimes.namespace import NamespaceRuntime
from outrider.spec import GroupSpec

from .marks import descendants, identity, marked, mounts, names
from .program import program
from .storm import Fate, add_engines, assert_over, draw, unleash
from .world import a_world, group

SESSIONS = 200
LANES = LanesConfig(init=4, run=12, eval=4)
MARK = f"storm-{uuid4().hex}"
NAMESPACE = {"kind": "namespace", "env": {"OUTRIDER_STORM": MARK}}


class Traces(NamedTuple):
    """What this process, or anything with the storm's mark, has on the host."""

    processes: frozenset[tuple[int, str]]
    mounts: str
    sockets: frozenset[str]
    temporaries: tuple[str, ...]
    descriptors: int


def traces(temporary: Path) -> Traces:
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    return Traces(
        processes=frozenset(map(identity, descendants() | marked(MARK, str(temporary)))),
        mounts=mounts(),
        sockets=frozenset(name for name in sockets if str(temporary) in name),
        temporaries=tuple(names(temporary)),
        descriptors=len(os.listdir("/proc/self/fd")),
    )


def on_namespace(*do: str, **fields: Any) -> GroupSpec:
    runtime = NAMESPACE | {"prepare": fields.pop("prepare", [{"run": "mkdir made; setsid sleep 4010 &"}])}
    return group(*do, runtime=runtime, **fields)


def in_bash(then: str, **fields: Any) -> GroupSpec:
    return on_namespace(harness=program(then), **fields)


def well(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", evaluator={"run": rng.choice(("true", "test -d made", "false"))})


def agent_well(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", "run (setsid sleep 4010 &); echo hi > out", "ask", evaluator={"run": "test -f out"})


def out_of_agent_time(rng: random.Random) -> GroupSpec:
    limits = {"agent_seconds": rng.uniform(0.3, 1.0)}
    return rng.choice((in_bash("sleep 4010", limits=limits), on_namespace("ask", "run sleep 4010", limits=limits)))


def out_of_session_time(rng: random.Random) -> GroupSpec:
    limits = {"session_seconds": rng.uniform(0.05, 1.0)}
    return rng.choice((in_bash("sleep 4010", limits=limits), on_namespace("ask", "wait forever", limits=limits)))


def hangs_in_prepare(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", prepare=[{"run": "sleep 4010"}], limits={"session_seconds": rng.uniform(0.05, 0.5)})


def in_the_middle_of_a_reply(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", instruction="never end", limits={"agent_seconds": rng.uniform(0.3, 1.0)})


def program_fails(rng: random.Random) -> GroupSpec:
    return in_bash(rng.choice(("exit 3", "kill -9 $$", "kill -9 0")), max_attempts=rng.randint(1, 2))


def prepare_fails(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", prepare=[{"run": "sleep 4010 & false"}], max_attempts=rng.randint(1, 2))


def engine_rejects(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", instruction="reject this")


def sandbox_breaks(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", "break", max_attempts=rng.randint(1, 2))


def grader_fails(rng: random.Random) -> GroupSpec:
    grader = {"run": rng.choice(("sleep 4010", "exit 7", "kill -9 $$")), "seconds": 0.3}
    return on_namespace("ask", evaluator=grader, max_attempts=rng.randint(1, 2))


FATES: tuple[Fate, ...] = (
    *[well] * 3,
    *[agent_well] * 2,
    out_of_agent_time,
    out_of_session_time,
    hangs_in_prepare,
    in_the_middle_of_a_reply,
    program_fails,
    prepare_fails,
    engine_rejects,
    sandbox_breaks,
    grader_fails,
)
ENDINGS = {
    "completed",
    "agent_timeout",
    "session_timeout",
    "cancelled",
    "harness_error",
    "engine_rejected",
    "runtime_failure",
    "evaluator_error",
}


@pytest.mark.timeout(180)
async def test_two_hundred_real_sandboxes(temporary: Path, tmp_path: Path, tokenizer: Path) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    rng = random.Random(7)
    before = traces(temporary)
    async with a_world(tmp_path, tokenizer, http=True, lanes=LANES) as w:
        idle = traces(temporary)
        await add_engines(w, tokenizer, 4, percent=2)
        groups = draw(rng, FATES, SESSIONS)
        begun = time.monotonic()
        views = await unleash(w, rng, groups, spared=len(FATES), cancelled=0.5, within=8.0)
        seconds = time.monotonic() - begun
        endings = await assert_over(w, groups, views)
        during = traces(temporary)
        assert during.processes == idle.processes
        assert during.mounts == idle.mounts
        assert endings.keys() >= ENDINGS, endings
        print(f"{SESSIONS} sandboxed sessions in {seconds:.1f} s: {dict(endings)}")
    assert traces(temporary) == before
