"""Writes verl's training and validation files from a folder of Harbor tasks, or from rows and a template.

python examples/verl/make_data.py TASKS data/        # folders with task.toml and instruction.md
python examples/verl/make_data.py rows.jsonl data/ --template examples/verl/template.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider.tasks.datasets import examples_of, verl_parquet


def main() -> None:
    parser = argparse.ArgumentParser(description="Write verl's Parquet files of a dataset of tasks.")
    parser.add_argument("source", type=Path, help="folder of Harbor tasks, saved dataset, .jsonl, .json or .parquet")
    parser.add_argument("folder", type=Path, help="where the files go; those that are there already are kept")
    parser.add_argument("--template", type=Path, help='JSON task with "{row.COLUMN}" for the columns of a row')
    parser.add_argument("--id-column", help="the column that names a row")
    parser.add_argument("--val", type=int, default=0, help="how many examples, the last ones, are for validation")
    parser.add_argument("--offline", action="store_true", help="Harbor tasks that ask for a network run without one")
    arguments = parser.parse_args()
    template = json.loads(arguments.template.read_text()) if arguments.template else None
    examples = examples_of(
        arguments.source, template=template, id_column=arguments.id_column, offline=arguments.offline
    )
    split = len(examples) - arguments.val
    for name, part in (("train", examples[:split]), ("val", examples[split:])):
        if part:
            written = verl_parquet(part, arguments.folder, data_source=arguments.source.name, split=name)
            point_to(written.path, arguments.folder / f"{name}.parquet")
            print(f"{name}: {written.rows} rows in {written.path}{' (as it was)' if written.cached else ''}")


def point_to(file: Path, link: Path) -> None:
    """Point `link` to the newest file, on which train.sh trains. After an edit of the data there are two files."""
    draft = link.with_name(f".{link.name}.draft")
    draft.unlink(missing_ok=True)
    draft.symlink_to(file.name)
    draft.replace(link)


if __name__ == "__main__":
    main()
