"""The training demo, without a training run: its summary line, its plots, and the service that it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from outrider.cli import main
from outrider.cli.training import HEIGHT, WIDTH, plot
from outrider.client.client import Client
from outrider.client.sampling import Counts
from outrider.config import Config, ModelConfig
from outrider.errors import ServiceError
from outrider.lab.demo.curve import draw
from outrider.lab.demo.dialogue import POLICY
from outrider.lab.demo.service_process import service_process
from outrider.lab.demo.train import SeedRun, TrainStep, summary
from outrider.spec import EngineSpec
from outrider.trainers.trl import StepStats


def step(reward: float, gap: float) -> TrainStep:
    stats = StepStats(
        step=0,
        version=1,
        reward=reward,
        spread=0.4,
        kept_reward=0.5,
        staleness_mean=0.3,
        staleness_max=1,
        waited=2.0,
        held=1.0,
        groups=Counts(),
        left_out_rows=0,
        left_out_tokens=0,
        empty_rows=0,
        errors=0,
        drift_tokens=0,
        logprob_gap=gap,
        compared_tokens=10,
    )
    return TrainStep(stats=stats, idle=0.1, seconds=3.0)


def seed_run(**changed: object) -> SeedRun:
    made = SeedRun(
        seed=0,
        first_reward=0.2,
        last_reward=0.9,
        seconds=80.04,
        steps=(step(0.2, 1e-6), step(0.9, 1e-5)),
        sessions=100,
        errors=0,
        drift_tokens=0,
        max_logprob_gap=1e-5,
        compared_tokens=20,
        policy="policy-0",
    )
    return msgspec.structs.replace(made, **changed)


def test_the_line_sums_over_seeds() -> None:
    found = summary([seed_run(), seed_run(seed=1, max_logprob_gap=2e-5)], Path("curve.png"))
    assert msgspec.to_builtins(found) == {
        "seeds": (
            {"seed": 0, "first_reward": 0.2, "last_reward": 0.9, "seconds": 80.0, "steps": 2},
            {"seed": 1, "first_reward": 0.2, "last_reward": 0.9, "seconds": 80.0, "steps": 2},
        ),
        "max_logprob_gap": 2e-5,
        "drift_tokens": 0,
        "errors": 0,
        "curve": "curve.png",
        "interrupted": False,
    }
    assert found.good


@pytest.mark.parametrize(
    "changed",
    [
        {"first_reward": 0.31},
        {"last_reward": 0.84},
        {"last_reward": None},
        {"max_logprob_gap": 2e-4},
        {"drift_tokens": 1},
        {"errors": 1},
    ],
)
def test_a_training_that_shows_less_is_not_good(changed: dict[str, float | None]) -> None:
    assert not summary([seed_run(), seed_run(**changed)], None).good


def test_the_terminals_curve_fills_a_column_for_each_step() -> None:
    lines = plot([0.0, 0.55, 1.0]).plain.splitlines()
    assert len(lines) == HEIGHT + 1
    columns = ["".join(line[6 + at] for line in lines[:HEIGHT]) for at in range(3)]
    assert columns[0].strip() == ""
    assert columns[1] == "    ▄█████"
    assert columns[2] == "█" * HEIGHT
    assert len(plot([0.5] * (WIDTH + 5)).plain.splitlines()[0]) == 6 + WIDTH


@pytest.mark.deep
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw([seed_run(), seed_run(seed=1)], tmp_path / "curve.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
def test_without_trl_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--train"]) == 2
    assert "make train" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.deep
def test_a_service_in_its_own_process_is_there_and_then_gone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = Config(
        port=0,
        data=tmp_path / "data",
        model=ModelConfig(tokenizer=str(POLICY), renderer="template:qwen3"),
        engines=(EngineSpec(kind="embedded", model=str(POLICY), options={"slots": 3}),),
    )
    with service_process(config, tmp_path) as url, Client(url) as client:
        assert [engine.model for engine in client.engines()] == [str(POLICY)]
    with Client(url) as client, pytest.raises(ServiceError, match="cannot reach"):
        client.status()


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider.config import Config, ModelConfig
from outrider.lab.demo.dialogue import POLICY
from outrider.lab.demo.service_process import service_process

folder = Path(sys.argv[1])
config = Config(port=0, data=folder / "data", model=ModelConfig(tokenizer=str(POLICY), renderer="template:qwen3"))
with service_process(config, folder) as url:
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.deep
def test_a_service_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    give_up_at = time.monotonic() + 30
    with Client(done.stdout.strip()) as client:
        while time.monotonic() < give_up_at:
            try:
                client.status()
            except ServiceError:
                return
            time.sleep(0.05)
    pytest.fail("the service is still there")


@pytest.mark.deep
def test_a_service_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    config = Config(port=0, data=tmp_path / "data", model=ModelConfig(tokenizer=str(tmp_path)))
    with pytest.raises(ServiceError, match="did not start") as raised, service_process(config, tmp_path):
        pytest.fail("it started")
    assert "tokenizer" in (raised.value.log_tail or "")
