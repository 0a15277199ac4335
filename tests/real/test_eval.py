"""`outrider eval` and `outrider serve` as processes: tasks of real data sets, and a run that is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli.test_serve import flags
from cli.world import program
from outrider.client.client import AsyncClient
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.tasks.datasets import reasoning_gym_examples

from .eval_programs import evaluated, serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="this machine cannot run namespace sandboxes"),
]

SETS = (
    *("basic_arithmetic", "caesar_cipher", "chain_sum", "countdown", "gcd"),
    *("lcm", "leg_counting", "letter_counting", "number_filtering", "spell_backward"),
)
EACH = 3
TASKS = EACH * len(SETS)
SOURCES = [f"reasoning-gym:{name}" for name in SETS]


def perfect(folder: Path) -> list[str]:
    """Return the flags of a service whose model replies to each question with the task's own answer."""
    examples = [example for name in SETS for example in reasoning_gym_examples(name, size=EACH)]
    replies = []
    for example in examples:
        assert example.gold is not None
        replies.append({"when": example.task["instruction"], "reply": f"{example.gold.reply}<|im_end|>"})
    assert len(replies) == len({reply["when"] for reply in replies}) == TASKS
    return flags(folder, replies)


def policy(folder: Path) -> list[str]:
    """Return the flags of a service with the demo's model, which was not trained for these tasks."""
    return [
        *("--port", "0", "--data", str(folder / "data"), "--engine", f"embedded={POLICY}"),
        *("--tokenizer", str(POLICY), "--renderer", RENDERER),
    ]


def words_of(run: str, url: str) -> tuple[str, ...]:
    """Return the arguments of `outrider eval`."""
    return (*SOURCES, "--limit", str(EACH), "--resume", run, "--url", url)


def figures(document: str) -> dict[str, Any]:
    """Return the figures of a run without its times, in which two runs of the same sessions may differ."""
    found = json.loads(document)
    found["metrics"].pop("check_seconds", None)
    return {name: found[name] for name in ("name", "reward", "metrics", "graded", "failures", "versions")}


@pytest.mark.parametrize("model", [perfect, pytest.param(policy, marks=pytest.mark.nightly)])
async def test_a_run_that_was_killed_half_way_ends_with_the_table_of_one_that_was_not(
    tmp_path: Path, model: Any
) -> None:
    """Both the command and the service are killed with SIGKILL and started again."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: see `make test-real`")
    words = model(tmp_path)
    async with serving(words) as (service, url), AsyncClient(url) as client:
        whole = figures(await evaluated(*words_of("whole", url), "--json"))
        assert (whole["graded"], whole["failures"]) == (TASKS, {})
        assert (whole["reward"]["mean"] == 1.0) is (model is perfect)

        command = await program("eval", *words_of("cut", url), "--json")
        finished = 0
        while finished < TASKS / 2:
            groups = await client.groups(limit=2 * TASKS)
            finished = sum(group.finished is not None for group in groups) - TASKS
        command.kill()
        service.kill()
        await asyncio.gather(command.communicate(), service.wait())
        assert finished < TASKS
    async with serving(words) as (_, url):
        resumed = await evaluated(*words_of("cut", url), "--json")
        assert figures(resumed) == whole
        again = await evaluated(*words_of("cut", url), "--json")
        assert {**json.loads(again), "seconds": 0} == {**json.loads(resumed), "seconds": 0}
        shown = await evaluated(*words_of("cut", url))
        assert f"{TASKS} sessions graded" in shown
        assert "not graded" not in shown
