"""Every file of a user becomes a value or one error that names the file, for any content and every reader."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.cli.task_sources import examples_in, load_group
from outrider.config import load_config
from outrider.errors import InvalidField, OutriderError
from outrider.sandbox.rootfs.recipe import load_recipe
from outrider.tasks.datasets import harbor_examples, read_rows
from outrider.text_files import MAX_DEPTH, parse_toml, read_text_file, read_toml_file
from outrider.trainers.shared_settings import _settings_of_variable

PARTS = 200_000
BOMBS: dict[str, bytes] = {
    "lists": b"a = " + b"[" * 50_000,
    "closed lists": b"a = " + b"[" * 50_000 + b"]" * 50_000,
    "tables": b"a = " + b"{b = " * 50_000 + b"1" + b"}" * 50_000,
    "few lists": b"a = " + b"[" * 100 + b"]" * 100,
    "a long key": b".".join([b"a"] * PARTS) + b" = 1",
    "a long key of a table": b"a = {" + b" . ".join([b'"a"'] * PARTS) + b" = 1}",
    "a long header": b"[" + b".".join([b"a"] * PARTS) + b"]",
    "a long header of a list": b"[[" + b".".join([b"a"] * PARTS) + b"]]",
    "a long key with escapes": b".".join([rb'"\""'] * PARTS) + b" = 1",
    "a long key after strings": rb"""a = ['''#''''', "\\", '\'] #"
"""
    + b".".join([b"a"] * PARTS),
    "ends of strings": b'a = """' + b'\\"""\n' * (PARTS // 10),
    "a number": b"a = " + b"9" * 5000,
    "a date": b"a = 2026-13-45",
    "no text": b"\xff\xfe\x00",
    "nul": b"a = 1\0",
    "half": b'a = "',
}
READERS: dict[str, Callable[[Path], Any]] = {
    "settings": lambda path: load_config({}, file=path),
    "recipe": load_recipe,
    "task": lambda path: load_group(path, n=1, priority=0),
    "tasks": lambda path: examples_in(str(path), limit=None, image=None),
    "Harbor": lambda path: harbor_examples(as_harbor(path), environ={}),
    "bridge": lambda path: _settings_of_variable(f"@{path}", "OUTRIDER_TASK"),
}


def as_harbor(file: Path) -> Path:
    folder = file.parent / "harbor" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "instruction.md").write_text("do")
    (folder / "task.toml").unlink(missing_ok=True)
    (folder / "task.toml").symlink_to(file)
    return folder.parent


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_one_error_that_names_the_file(tmp_path: Path, bomb: str, reader: str) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(BOMBS[bomb])
    with pytest.raises(InvalidField) as raised:
        READERS[reader](path)
    assert ".toml" in raised.value.message
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", ["missing", "folder", "endless"])
def test_what_is_no_file_is_one_error(tmp_path: Path, what: str, reader: str) -> None:
    path = tmp_path / "file.toml"
    if what == "folder":
        path.mkdir()
    elif what == "endless":
        path.symlink_to("/dev/zero")
    with pytest.raises(InvalidField):
        READERS[reader](path)


def test_what_people_write_is_read(tmp_path: Path) -> None:
    text = 'a.b."c.d" = [[1, 2], [{x = 3}]]\n[e.f]\ng = """\n' + "..." * 100 + '"""\n'
    (tmp_path / "file").write_text(text)
    found = read_toml_file(tmp_path / "file", field="f")
    assert found == {"a": {"b": {"c.d": [[1, 2], [{"x": 3}]]}}, "e": {"f": {"g": "..." * 100}}}
    words = ".".join(["word"] * (MAX_DEPTH + 1))
    for quotes in ("'", '"', "'''", '"""'):
        assert parse_toml(f"a = {quotes}it is {words}{quotes} # {words}") == {"a": f"it is {words}"}
    assert parse_toml("a = " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    with pytest.raises(InvalidField, match="more than 0 KiB"):
        read_text_file(tmp_path / "file", field="f", limit=10)


ROW_BOMBS: dict[str, bytes] = {
    "lists": b"[" * 100_000,
    "closed lists": b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
    "a number": b'{"a": ' + b"9" * 5000 + b"}",
    "no object": b"5",
    "no text": b"\xff",
}


@pytest.mark.parametrize("bomb", ROW_BOMBS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_bomb_of_rows_is_one_error(tmp_path: Path, bomb: str, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(ROW_BOMBS[bomb]) if suffix.endswith("gz") else ROW_BOMBS[bomb])
    with pytest.raises(InvalidField, match=r"rows\.json"):
        list(read_rows(path))


@pytest.mark.deep
def test_rows_that_unpack_to_more_than_rows_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20)) * 200)
    with pytest.raises(InvalidField, match="unpacks to more than"):
        list(read_rows(path))
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 10_000)[:-20])
    with pytest.raises(InvalidField, match="cannot read"):
        list(read_rows(path))
    path.write_bytes(gzip.compress(gzip.compress(b'{"a": 1}\n')))
    with pytest.raises(InvalidField, match="is not UTF-8"):
        list(read_rows(path))
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 10_000))
    assert len(list(read_rows(path))) == 10_000


WORDS = b"""a = [ ] { } " ' . , 1 - nan inf 1e9999 true # \\u0000 \\ 2026-11-26 runtime prepare evaluator then rows
instruction gold upload to file"""
PIECES = st.sampled_from([*WORDS.split(), b'"""', b"\n", b" ", b"\xff", b"\0", b"9" * 5000])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(PIECES, max_size=40).map(b"".join) | st.binary(max_size=200))
def test_nothing_but_an_error_of_ours_comes_of_any_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(data)
    for reader in READERS.values():
        with suppress(OutriderError):
            reader(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
TASK_FIELDS = (
    "instruction",
    "runtime",
    "evaluator",
    "harness",
    "then",
    "gold",
    "rows",
    "limits",
    "artifacts",
    "labels",
)
AT = ("prepare", "kind", "options", "run", "carry", "runtime", "command", "resources", "file", "id")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    task=st.dictionaries(
        st.sampled_from(TASK_FIELDS), VALUES | st.dictionaries(st.sampled_from(AT), VALUES, max_size=4), max_size=6
    )
)
def test_nothing_but_an_error_of_ours_comes_of_any_task(tmp_path: Path, task: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "task": task}, allow_nan=True) + "\n")
    (tmp_path / "file.toml").write_text("".join(f"{name} = {as_toml(value)}\n" for name, value in task.items()))
    for source in ("rows.jsonl", "file.toml"):
        with suppress(OutriderError):
            examples_in(os.fspath(tmp_path / source), limit=None, image=None)
        with suppress(OutriderError):
            load_group(tmp_path / source, n=1, priority=0)


def as_toml(value: Any) -> str:
    match value:
        case None:
            return "'none'"
        case dict():
            return "{" + ", ".join(f"{as_toml(name)} = {as_toml(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(as_toml, value)) + "]"
        case bool() | str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case _:
            return str(value)
