"""Writes a dataset of Harbor task folders for verl's recipe RemoteAgentLoop.

A row has the path of a folder instead of a task, because the recipe uploads the folder when it runs the task.
Invariant: the written file's name changes with every file of the folders, and with every argument.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField
from outrider.tasks.datasets import Written, write_parquet
from outrider.tasks.harbor.files import files_below, instruction_in
from outrider.tasks.harbor.tasks import TASK_TOML, harbor_folders, read_config

FORMAT = 1
"""Version of the rows' format. It is part of the hash in the file's name."""


def recipe_rows(
    root: Path, *, data_source: str = "harbor", ability: str = "agent", split: str = "train", limit: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each Harbor task folder below `root`, sorted by path. The ground truth is the task's id: the
    folder's path below `root`, with `__` in place of slashes. `task_metadata` is the table `metadata` of task.toml as
    JSON. Raises InvalidField for a broken folder, and if `root` has no task folder."""
    folders = harbor_folders(root)
    if not folders:
        raise InvalidField(f"no folder below {root} has {TASK_TOML} and instruction.md", field="source")
    rows = []
    for index, (name, folder) in enumerate(list(folders.items())[:limit]):
        if not (folder / "instruction.md").is_file():
            raise InvalidField(
                f"{folder} has no instruction.md: the recipe's rows have one instruction",
                field="source",
                hint="leave tasks of several steps out",
            )
        task_id, path = name.replace("/", "__"), str(folder.resolve())
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": instruction_in(folder, folder)}],
                "ability": ability,
                "reward_model": {"style": "rule", "ground_truth": task_id},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "task_id": task_id,
                    "local_path": path,
                    "task_metadata": json.dumps(read_config(folder / TASK_TOML).metadata, sort_keys=True, default=str),
                },
                "instance_id": task_id,
                "local_task_path": path,
            }
        )
    return rows


def recipe_parquet(
    root: Path,
    folder: Path,
    *,
    data_source: str = "harbor",
    ability: str = "agent",
    split: str = "train",
    limit: int | None = None,
) -> Written:
    """Write the rows of `recipe_rows` to `{split}-{key}.parquet` in `folder`, unless it exists. The call blocks. Raises
    InvalidField, for example if pyarrow is not installed."""
    rows = recipe_rows(root, data_source=data_source, ability=ability, split=split, limit=limit)
    digest = hashlib.sha256(json.dumps([FORMAT, rows], sort_keys=True).encode())
    for row in rows:
        task = Path(row["local_task_path"])
        for path, name in files_below(task, task):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return write_parquet(rows, folder / f"{split}-{digest.hexdigest()[:10]}.parquet")
