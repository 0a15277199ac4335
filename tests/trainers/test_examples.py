"""The examples of the bridges: their settings and rows make valid tasks, and their scripts name files and objects that
exist."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.service.admission import validate_group
from outrider.trainers.nemo_gym import NemoGymSettings
from outrider.trainers.openrlhf import OpenRLHFSettings
from outrider.trainers.shared_settings import BridgeSettings, read_settings, task_for
from outrider.trainers.slime import SlimeSettings
from outrider.trainers.verifiers import VerifiersSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINERS: dict[str, type[BridgeSettings]] = {
    "openrlhf": OpenRLHFSettings,
    "skyrl": BridgeSettings,
    "slime": SlimeSettings,
    "tinker": BridgeSettings,
}


def settings_of(trainer: str) -> dict[str, Any]:
    if trainer != "slime":
        return tomllib.loads((EXAMPLES / trainer / "settings.toml").read_text())
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "slime" / "settings.yaml").read_text())["outrider"]
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_row_is_a_task(trainer: str) -> None:
    settings = read_settings(TRAINERS[trainer], settings_of(trainer), source="settings", variable="OUTRIDER_EXAMPLE")
    rows = [json.loads(line) for line in (EXAMPLES / trainer / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        task = task_for(settings, row, prompt=row["prompt"], sampling={}, labels={})
        spec = validate_group({"task": task, "n": 8}).task
        assert spec.evaluator.run == f'[ "$(cat answer.txt)" = "{row["label"]}" ]'
        assert spec.instruction.endswith("as digits.")


def test_each_row_for_nemo_gym_is_a_task() -> None:
    yaml = pytest.importorskip("yaml")
    folder = EXAMPLES / "nemo_gym" / "responses_api_agents" / "outrider"
    found: list[dict[str, Any]] = [
        yaml.safe_load((folder / "configs" / name).read_text())["outrider"]["responses_api_agents"]["outrider"]
        for name in ("outrider.yaml", "nemo_rl.yaml")
    ]
    assert NemoGymSettings.model_fields.keys() > found[1]["outrider"].keys() == {"engines", "model"}
    settings = read_settings(NemoGymSettings, found[0]["outrider"], source="outrider", variable="OUTRIDER_EXAMPLE")
    for line in (EXAMPLES / "nemo_gym" / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["agent_ref"]["name"] == "outrider"
        prompt = row["responses_create_params"]["input"]
        spec = validate_group({"task": task_for(settings, row, prompt=prompt, sampling={}, labels={})}).task
        assert spec.evaluator.run == f'[ "$(cat answer.txt)" = "{row["label"]}" ]'
        assert spec.instruction.endswith("as digits.")


def test_each_row_for_verifiers_and_prime_rl_is_a_task() -> None:
    folder = EXAMPLES / "verifiers"
    environment = tomllib.loads((folder / "eval.toml").read_text())["env"]
    [source] = tomllib.loads((folder / "prime_rl.toml").read_text())["orchestrator"]["train"]["source"]
    rows = folder / environment["taskset"]["rows"]
    assert source["env"]["taskset"] == environment["taskset"] == {"id": "outrider-rollouts", "rows": "rows.jsonl"}
    for given in (environment, source["env"]):
        found = given["agent"]["harness"]["outrider"]
        settings = read_settings(VerifiersSettings, found, source="outrider", variable="OUTRIDER_EXAMPLE")
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            spec = validate_group({"task": task_for(settings, row, prompt=row["prompt"], sampling={}, labels={})}).task
            assert spec.evaluator.run == f'[ "$(cat answer.txt)" = "{row["label"]}" ]'
            assert spec.instruction == row["prompt"]


@pytest.mark.parametrize("trainer", ["openrlhf", "slime"])
def test_what_the_script_names_of_ours_is_there(trainer: str) -> None:
    script = (EXAMPLES / trainer / "train.sh").read_text()
    for path in re.findall(r"outrider\.trainers\.[\w.]+", script):
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    for file in re.findall(r'\$here/([\w.]+)"', script):
        assert (EXAMPLES / trainer / file).exists()
