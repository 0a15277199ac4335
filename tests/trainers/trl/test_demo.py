"""A short run of `make train`: the whole system over HTTP, and the reward rises. The whole run takes minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.lab.demo import train as training
from outrider.lab.demo.dialogue import POLICY
from outrider.sandbox.runtimes.default_runtime import default_runtime

STEPS = 10
RISE = 0.2
"""A whole run rises by 0.7; the difference of two means over 128 episodes is off by 0.05 one time in three."""

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(300),
    # What TRL, transformers and torch say of themselves is theirs.
    pytest.mark.filterwarnings("ignore"),
]


def test_the_reward_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training, "MAX_STEPS", STEPS)
    runtime, _ = default_runtime()
    seen: list[training.TrainStep] = []
    run = training.train(0, POLICY, runtime, tmp_path / "trained", seen.append)
    assert tuple(seen) == run.steps
    assert [step.stats.version for step in run.steps] == list(range(2, STEPS + 2))
    assert run.first_reward < training.STARTS_BELOW
    assert run.last_reward > run.first_reward + RISE
    assert run.drift_tokens == run.errors == 0
    assert run.max_logprob_gap <= training.LARGEST_GAP
    assert run.compared_tokens > 1000
    capsys.readouterr()
    assert main(["demo", "--json", "--model", run.policy, "--out", str(tmp_path / "demo")]) == 0
    assert json.loads(capsys.readouterr().out)["mean_reward"] > run.first_reward
