"""A trainer that is killed continues from its checkpoint: no group is lost, and none is trained on twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.client.client import Client
from outrider.client.sampling import SamplerState
from outrider.errors import InvalidField
from outrider.lab.demo.dialogue import POLICY
from outrider.trainers.trl import STATE_FILE, UNUSED_FILE, Rollouts, sampler_state
from outrider.trainers.weight_publishing import PolicyWeights

from .killed_training import KILLED_IN, STEPS, TASKS, key_of
from .test_rows import even, parameters, task
from .world import Trainer, simulated

PROGRAM = Path(__file__).with_name("killed_training.py")

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_after_a_kill_every_group_is_trained_on_once(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, str(PROGRAM), client.asynchronous.url, str(POLICY), str(folder)]
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    with (tmp_path / "first").open("w") as errors:
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            assert first.stdout is not None
            assert any("in the middle of a step" in line for line in first.stdout), (tmp_path / "first").read_text()
        finally:
            first.kill()
            first.communicate()
    assert (folder / f"checkpoint-{KILLED_IN}" / UNUSED_FILE).exists()
    version = client.policy().version
    second = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert second.returncode == 0, second.stderr

    lines: list[Mapping[str, Any]] = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    steps = [(line["resumed"], line["step"]) for line in lines if "step" in line]
    assert steps == [
        *((False, step) for step in range(KILLED_IN + 1)),
        *((True, step) for step in range(KILLED_IN, STEPS)),
    ]
    # The fourth step of the first run ended before its weights were saved: the second run makes this step again.
    lost = [line for line in lines if line.get("step") == KILLED_IN and not line["resumed"]]
    again = [line for line in lines if line.get("step") == KILLED_IN and line["resumed"]]
    assert lost[0]["rows"] == again[0]["rows"]
    trained = Counter(key for line in lines if "step" in line and line not in lost for key in line["rows"])
    groups = client.results(limit=200, samples=True).groups
    rows = [sample for group in groups for sample in group.samples or ()]
    assert (len(groups), len(rows)) == (TASKS, sum(trained.values()))
    assert trained == Counter(key_of(row.ids.tolist(), row.logprobs[row.loss_mask == 1].tolist()) for row in rows)

    versions = [line["version"] for line in lines if "version" in line]
    assert versions == sorted(set(versions))
    assert client.policy().version == versions[-1] > version


def test_a_state_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    state = SamplerState(run="r", next=40, pending=(), version=57, batches=20)
    with pytest.raises(InvalidField, match="no sampler's state"):
        sampler_state(tmp_path)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    with simulated(even) as client, PolicyWeights(client, tmp_path / "weights") as weights:
        with Rollouts(client, task, weights) as rollouts:
            rollouts.resume(sampler_state(tmp_path))
            rollouts.resume(state)
            with pytest.raises(InvalidField, match="not that of the checkpoint"):
                rollouts.resume(msgspec.structs.replace(state, next=41))
            rollouts([""] * 4, Trainer(parameters()))
            with pytest.raises(InvalidField, match="made batches already"):
                rollouts.resume(state)
        assert weights.version == 58
