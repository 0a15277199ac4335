"""Fates of sessions in real sandboxes, whose processes can be found on the host.

Every process has MARK in its environment or sleeps for NAP seconds. No other program does either, so processes that
have cleared their environment are found, too.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

from outrider.spec import GroupSpec

from .program import program
from .storm import Fate
from .world import group

MARK = f"storm-{uuid4().hex}"
NAP = f"4010.{uuid4().int % 10**12:012d}"
ESCAPES = f"setsid sleep {NAP} & (setsid env -i sleep {NAP} &)"


def on_namespace(*do: str, **fields: Any) -> GroupSpec:
    runtime = {
        "kind": "namespace",
        "env": {"OUTRIDER_STORM": MARK},
        "prepare": fields.pop("prepare", [{"run": f"mkdir made; {ESCAPES}"}]),
        "resources": fields.pop("resources", {}),
    }
    return group(*do, runtime=runtime, **fields)


def in_bash(then: str, **fields: Any) -> GroupSpec:
    return on_namespace(harness=program(then), **fields)


def well(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", evaluator={"run": rng.choice(("true", "test -d made", "false"))})


def agent_well(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", f"run {ESCAPES}; echo hi > out", "ask", evaluator={"run": "test -f out"})


def out_of_agent_time(rng: random.Random) -> GroupSpec:
    limits = {"agent_seconds": rng.uniform(0.3, 1.0)}
    do = rng.choice((f"sleep {NAP}", f"{ESCAPES}; wait"))
    return rng.choice((in_bash(do, limits=limits), on_namespace("ask", f"run {do}", limits=limits)))


def out_of_session_time(rng: random.Random) -> GroupSpec:
    limits = {"session_seconds": rng.uniform(0.05, 1.0)}
    return rng.choice((in_bash(f"sleep {NAP}", limits=limits), on_namespace("ask", "wait forever", limits=limits)))


def hangs_in_prepare(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", prepare=[{"run": f"sleep {NAP}"}], limits={"session_seconds": rng.uniform(0.05, 0.5)})


def in_the_middle_of_a_reply(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", instruction="never end", limits={"agent_seconds": rng.uniform(0.3, 1.0)})


def program_fails(rng: random.Random) -> GroupSpec:
    harness = program(f"exit {rng.choice((126, 127))}") | {"nonzero_exit": "error"}
    return on_namespace(harness=harness, max_attempts=rng.randint(1, 2))


def program_crashes(rng: random.Random) -> GroupSpec:
    return in_bash(rng.choice(("exit 3", "kill -9 $$", "kill -9 0", "kill -9 -1")), evaluator={"run": "true"})


def breaks_its_sandbox(rng: random.Random) -> GroupSpec:
    do, grader = rng.choice(
        (
            ("chmod 000 /work; exit 0", {"run": "true"}),
            ("mkdir out; truncate -s 3G out/hole; exit 0", {"run": "true", "carry": ["out"]}),
            ("head -c 9000000 /dev/zero > big; exit 0", {"run": "echo 1 > $OUTRIDER_VERDICT"}),
        )
    )
    return in_bash(do, evaluator=grader, resources={"disk_mb": 4})


def prepare_fails(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", prepare=[{"run": f"sleep {NAP} & false"}], max_attempts=rng.randint(1, 2))


def engine_rejects(rng: random.Random) -> GroupSpec:
    return in_bash("exit 0", instruction="reject this")


def sandbox_breaks(rng: random.Random) -> GroupSpec:
    return on_namespace("ask", "break", max_attempts=rng.randint(1, 2))


def grader_fails(rng: random.Random) -> GroupSpec:
    grader = {"run": rng.choice((f"sleep {NAP}", "exit 7", "kill -9 $$")), "seconds": 0.3}
    return on_namespace("ask", evaluator=grader, max_attempts=rng.randint(1, 2))


def graded_elsewhere(rng: random.Random) -> GroupSpec:
    carry = rng.choice((["out"], [".", "/tmp"], "all"))
    grader = {"run": rng.choice((f"{ESCAPES}; test -f out", f"sleep {NAP}")), "carry": carry, "seconds": 3}
    end = rng.choice(("exit 0", "exit 0", f"sleep {NAP}"))
    return in_bash(f"echo hi > out; {end}", evaluator=grader, limits={"agent_seconds": 1.0}, max_attempts=1)


def leaves_artifacts(rng: random.Random) -> GroupSpec:
    do = f"mkdir kept; for i in 1 2 3; do echo $RANDOM > kept/$i; done; exit {rng.choice((0, 0, 5))}"
    return in_bash(do, artifacts=["kept/*", "missing"], evaluator={"run": "test -f kept/3"}, max_attempts=1)


def many_children(rng: random.Random) -> GroupSpec:
    return in_bash(f"for i in {{1..{rng.randint(20, 60)}}}; do setsid sleep {NAP} & done; exit 0")


def fork_bomb(rng: random.Random) -> GroupSpec:
    do = "bomb() { bomb | bomb & }; bomb 2> /dev/null; wait"
    return in_bash(do, resources={"pids": 24}, limits={"agent_seconds": 0.5}, evaluator={"run": "true"}, max_attempts=1)


def full_disk(rng: random.Random) -> GroupSpec:
    do = f"dd if=/dev/zero of={rng.choice(('/work/big', '/tmp/big', '/dev/shm/big'))} bs=1M count=20; exit 0"
    grader = {"run": "test $(cat /work/big /tmp/big /dev/shm/big | wc -c) -lt 20971520"}
    return in_bash(do, resources={"disk_mb": 4}, evaluator=grader)


def memory_hog(rng: random.Random) -> GroupSpec:
    return in_bash("tail /dev/zero; exit 0", resources={"memory_mb": 64}, evaluator={"run": "true"})


FATES: tuple[Fate, ...] = (
    *[well] * 3,
    *[agent_well] * 2,
    *[graded_elsewhere] * 2,
    out_of_agent_time,
    out_of_session_time,
    hangs_in_prepare,
    in_the_middle_of_a_reply,
    program_fails,
    program_crashes,
    breaks_its_sandbox,
    prepare_fails,
    engine_rejects,
    sandbox_breaks,
    grader_fails,
    leaves_artifacts,
    many_children,
    fork_bomb,
    full_disk,
    memory_hog,
)
ENDINGS = {
    "completed",
    "nonzero_exit",
    "agent_excess",
    "agent_timeout",
    "session_timeout",
    "cancelled",
    "harness_error",
    "engine_rejected",
    "runtime_failure",
    "evaluator_error",
}
