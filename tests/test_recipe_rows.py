"""The dataset of verl's recipe: rows in its form, and a file whose name changes with the tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from outrider.errors import InvalidField
from outrider.tasks.recipe_rows import recipe_parquet, recipe_rows
from support.harbor import task_folder


def test_the_rows_have_the_form_of_the_recipe(tmp_path: Path) -> None:
    toml = '[metadata]\ndifficulty = "easy"\ntags = ["a"]\n'
    second = task_folder(tmp_path / "tasks" / "group" / "b", toml=toml)
    task_folder(tmp_path / "tasks" / "a")
    written = recipe_parquet(tmp_path / "tasks", tmp_path / "cache", split="val")
    assert re.fullmatch(r"val-[0-9a-f]{10}\.parquet", written.path.name)
    first, row = pq.read_table(written.path).to_pylist()
    assert first["instance_id"] == "a"
    metadata = row["extra_info"].pop("task_metadata")
    assert json.loads(metadata) == {"difficulty": "easy", "tags": ["a"]}
    path = str(second.resolve())
    assert row == {
        "data_source": "harbor",
        "prompt": [{"role": "user", "content": "Write the answer.\n"}],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": "group__b"},
        "extra_info": {"split": "val", "index": 1, "task_id": "group__b", "local_path": path},
        "instance_id": "group__b",
        "local_task_path": path,
    }
    assert [each["instance_id"] for each in recipe_rows(tmp_path / "tasks", limit=1)] == ["a"]


def test_every_edit_gives_another_file(tmp_path: Path) -> None:
    task = task_folder(tmp_path / "tasks" / "a")

    def write(**changes: Any) -> Any:
        return recipe_parquet(tmp_path / "tasks", tmp_path / "cache", **changes)

    first = write()
    assert (first.cached, write()) == (False, first._replace(cached=True))
    others = [write(ability="x"), write(data_source="x"), write(split="val")]
    (task / "tests" / "test.sh").write_text("exit 1")
    others.append(write())
    (task / "solution").mkdir()
    (task / "solution" / "solve.sh").write_text("")
    others.append(write())
    assert len({each.path for each in (first, *others)}) == 6
    assert not any(each.cached for each in others)


def test_a_folder_without_tasks_or_an_instruction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"no folder below .* has task\.toml"):
        recipe_parquet(tmp_path, tmp_path / "cache")
    (task_folder(tmp_path / "a") / "instruction.md").unlink()
    (tmp_path / "a" / "steps").mkdir()
    with pytest.raises(InvalidField, match="one instruction"):
        recipe_rows(tmp_path)
