"""Runs tinker-cookbook's whole training, `rl.train.main`, with examples/tinker/train.py. SkyRL's server of Tinker's
interface samples and trains, with JAX on the CPU. The agents are sessions of a service, with the demo's model and
task."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import Client
from outrider.config import Config, LanesConfig, ModelConfig
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.lab.demo.service_process import service_process
from outrider.lab.demo.task import group_spec, make_task
from outrider.spec import EngineSpec

EXAMPLE = Path(__file__).parents[3] / "examples" / "tinker" / "train.py"
SERVER = Path(__file__).parent / "skyrl_server.py"

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("skyrl") is None, reason="SkyRL's server is not installed"),
]


@pytest.fixture(scope="module")
def tinker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("skyrl")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SERVER), str(POLICY), str(port), str(folder)]
    log = folder / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert server.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a service in another process, whose relay engine waits for the trainer."""
    config = Config(
        port=0,
        data=tmp_path / "data",
        model=ModelConfig(tokenizer=str(POLICY), renderer=RENDERER, name="demo-policy"),
        lanes=LanesConfig(init=8, run=16, eval=8),
        engines=(EngineSpec(kind="relay", name="tinker"),),
    )
    with service_process(config, tmp_path) as url:
        yield url


def rows(path: Path, number: int) -> Path:
    rng = random.Random(7)
    tasks = [group_spec(make_task(rng), 1)["task"] for _ in range(number)]
    path.write_text("".join(json.dumps({"task": task}) + "\n" for task in tasks))
    return path


def trained(service: str, server: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train with the example's command, and return the metrics of the steps."""
    given: dict[str, Any] = {
        "model_name": POLICY,
        "log_path": folder / "log",
        "base_url": server,
        "groups_per_batch": 2,
        "group_size": 4,
        "max_tokens": 96,
        "learning_rate": 1e-2,
        "lora_rank": 8,
        "num_epochs": 1,
        "remove_constant_reward_groups": False,
        "eval_every": 0,
        **options,
    }
    settings = {"url": service, "metrics": ["called_right_file"]}
    env = {
        **os.environ,
        "TINKER_API_KEY": "tml-unused",
        "TINKER_TELEMETRY": "0",
        "OUTRIDER_TINKER": json.dumps(settings),
    }
    command = [sys.executable, str(EXAMPLE), *(f"{name}={value}" for name, value in given.items())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "env/all/reward/total" in line]


def test_training_samples_each_step_with_its_own_weights(service: str, tinker_server: str, tmp_path: Path) -> None:
    steps = trained(
        service,
        tinker_server,
        tmp_path,
        data=rows(tmp_path / "rows.jsonl", 4),
        test_data=rows(tmp_path / "test.jsonl", 2),
        eval_every=1,
    )
    assert len(steps) == 2
    for version, step in enumerate(steps, start=1):
        assert step["env/all/outrider/version_min"] == step["env/all/outrider/version_max"] == version
        # the trainer's own log-probabilities of the sampled tokens, over all datums, are those of the service's rows
        assert abs(step["optim/kl_sample_train_v1"]) < 1e-4
        assert abs(step["optim/kl_sample_train_v2"]) < 1e-4
        assert 0 <= step["env/all/called_right_file"] <= 1
        assert step["skyrl.ai/grad_norm"] >= 0
        assert "test/env/all/reward/total" in step
    with Client(service) as client:
        groups = client.results(after=0, limit=100).groups
        assert [engine.version for engine in client.policy().engines] == [3]
    assert len(groups) == 4 + 3 * 2  # an evaluation before each step, and one at the end
    assert {group.n for group in groups} == {1, 4}


def test_asynchronous_training(service: str, tinker_server: str, tmp_path: Path) -> None:
    """A group keeps the client with which it began, even if other groups use a newer client."""
    steps = trained(
        service,
        tinker_server,
        tmp_path,
        data=rows(tmp_path / "rows.jsonl", 6),
        max_steps_off_policy=1,
        loss_fn="ppo",
    )
    assert len(steps) == 3
    for number, step in enumerate(steps, start=1):
        least, most = step["env/all/outrider/version_min"], step["env/all/outrider/version_max"]
        assert max(1, number - 1) <= least == most <= number
