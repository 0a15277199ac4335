"""`outrider.tasks.datasets` writes files for verl's own dataset, and reads data sets that Hugging Face's `datasets` has
saved."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pytest
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_class_from_fqn

from outrider.errors import InvalidField
from outrider.tasks.datasets import examples_of, read_rows, verl_parquet
from outrider.trainers.verl import OutriderAgentLoopManager, settings_of
from trainers.verl import world
from trainers.verl.world import write_model

pytestmark = pytest.mark.trainers

ROWS: list[dict[str, Any]] = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(3)]
TEMPLATE = {"instruction": "{row.question}", "evaluator": {"options": {"answer": "{row.answer}"}}}


def test_verls_dataset_gives_the_loop_its_task(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    examples = examples_of(tmp_path / "rows.jsonl", template=TEMPLATE)
    written = verl_parquet(examples, tmp_path / "data", data_source="sums", agent_name="outrider")
    model = write_model(tmp_path / "model")
    config = world.verl_config(tmp_path, model, {}).data
    config.cache_dir = str(tmp_path / "cache")
    dataset = RLHFDataset(str(written.path), AutoTokenizer.from_pretrained(model), config)
    assert len(dataset) == 3
    for number, example in enumerate(examples):
        row = dataset[number]
        assert json.loads(row["task"]) == example.task
        assert row["raw_prompt"] == [{"role": "user", "content": example.task["instruction"]}]
        assert (row["index"], row["agent_name"], row["data_source"]) == (number, "outrider", "sums")


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert list(read_rows(tmp_path / "one")) == ROWS
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "several"))
    with pytest.raises(InvalidField, match="has several splits"):
        list(read_rows(tmp_path / "several"))
    assert list(read_rows(tmp_path / "several" / "test")) == ROWS
    saved.select([2, 0]).save_to_disk(str(tmp_path / "chosen"))
    assert list(read_rows(tmp_path / "chosen")) == [ROWS[2], ROWS[0]]
    assert examples_of(tmp_path / "one", template=TEMPLATE)[1].task["evaluator"]["options"] == {"answer": 2}


def test_verl_takes_the_examples_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train-1.parquet", "val-2.parquet"):
        (tmp_path / name).touch()
        (tmp_path / f"{name.split('-')[0]}.parquet").symlink_to(name)
    (tmp_path / "train-0.parquet").touch()  # a file of the data before an edit
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    own = {"MODEL": "/model", "DATA": str(tmp_path), "OUTRIDER_URL": "http://far:8700", "OUTRIDER_TOKEN": "secret"}
    own["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    script = Path(__file__).parents[3] / "examples" / "verl" / "train.sh"
    words = subprocess.run([script], env=own, check=True, capture_output=True, text=True).stdout.splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words[2:])
    assert list(config.data.train_files) == [str(tmp_path / "train-1.parquet")]
    assert config.trainer.use_v1
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.OUTRIDER_URL == "http://far:8700"
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert load_class_from_fqn(rollout.agent.agent_loop_manager_class, "manager") is OutriderAgentLoopManager
    monkeypatch.delenv("OUTRIDER_VERL", raising=False)
    settings = settings_of(config)
    assert settings.relay == "trainer"
    assert settings.task == {"harness": {"preset": "mini-swe-agent"}}
