"""A short run of `make train`, the whole system over HTTP: the reward rises, and Ctrl-C ends the training and keeps its
results. The whole run takes minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.lab.demo import train as training
from outrider.lab.demo.dialogue import POLICY
from outrider.sandbox.runtimes.default_runtime import default_runtime

STEPS = 10
RISE = 0.2
"""In a whole run the reward rises by 0.7. The difference of two means over 128 episodes is wrong by more than 0.05 one
time in three."""

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(300),
    # Warnings of TRL, transformers and torch are not ours.
    pytest.mark.filterwarnings("ignore"),
]


def test_the_reward_rises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime, _ = default_runtime()
    seen: list[training.TrainStep] = []
    run = training.train(0, POLICY, runtime, tmp_path / "trained", seen.append, max_steps=STEPS)
    assert tuple(seen) == run.steps
    assert [step.stats.version for step in run.steps] == list(range(2, STEPS + 2))
    assert run.first_reward is not None
    assert run.last_reward is not None
    assert run.first_reward < training.STARTS_BELOW
    assert run.last_reward > run.first_reward + RISE
    assert run.drift_tokens == run.errors == 0
    assert run.max_logprob_gap <= training.LARGEST_GAP
    assert run.compared_tokens > 1000
    capsys.readouterr()
    assert main(["demo", "--json", "--model", run.policy, "--out", str(tmp_path / "demo")]) == 0
    assert json.loads(capsys.readouterr().out)["mean_reward"] > run.first_reward


PROGRAM = """
import sys
from outrider.cli import main
from outrider.lab.demo import train
train.EPISODES = 8
sys.exit(main())
"""
ENDS_AT_ONCE_SECONDS = 30.0
"""The service stops its sessions within this time; a step and an evaluation may take longer."""


@contextmanager
def demo_that_trains(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `outrider demo --train` in its own process group, as a shell does, and yield the process after its first
    step. Checks at the end that no child of the process, such as the service, still runs."""
    command = [sys.executable, "-c", PROGRAM, "demo", "--train", "--json", "--seeds", "2", "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            read_until(process, "seed 0 of 2: step 1 of")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert children
            yield process
            assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read standard error up to the line with this text."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} is not in:\n{''.join(lines)}")


def test_ctrl_c_keeps_the_weights_and_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with demo_that_trains(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        shown, notes = process.communicate()
        assert process.returncode == 130, notes
    printed = json.loads(shown)
    assert printed["interrupted"]
    [line] = printed["seeds"]
    assert line["steps"] >= 1
    assert line["last_reward"] is None
    [kept] = json.loads((tmp_path / "train.json").read_bytes())
    assert len(kept["steps"]) == line["steps"]
    assert printed["curve"] is None or Path(printed["curve"]).stat().st_size > 1000
    trained = tmp_path / "policy-0"
    assert f"seed 0 of 2, after step {line['steps']} of {training.MAX_STEPS}" in notes
    assert str(trained) in notes
    assert (trained / "model.safetensors").read_bytes() != (POLICY / "model.safetensors").read_bytes()
    assert main(["demo", "--json", "--model", str(trained), "--out", str(tmp_path / "demo")]) == 0
    capsys.readouterr()


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_the_training_at_once(tmp_path: Path) -> None:
    with demo_that_trains(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        read_until(process, "Ctrl-C again ends it at once")
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        shown, notes = process.communicate()
        assert time.monotonic() - began < ENDS_AT_ONCE_SECONDS
        assert process.returncode == 130, notes
    assert shown == ""
    assert not (tmp_path / "policy-0").exists()
