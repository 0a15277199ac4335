"""Sample files: both formats hold the same rows, and a file appears whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider.client.sample_files import ImageFolder, Parquet, SampleFormat, sample_file, stored_images
from outrider.errors import InvalidField
from outrider.lifecycle import StopReason
from outrider.messages import Image, image_from_bytes
from outrider.sample_columns import decode
from outrider.trajectory import BranchKind, JsonSample, LogprobKind, SampleImage, TokenMode, sample_json
from support.samples import changed_sample, make_sample

SAMPLE = make_sample(
    group_id="g-1",
    session_id="s-1-0",
    attempt=1,
    sample_index=0,
    row=0,
    rows=1,
    kind=BranchKind.MAIN,
    turns=(0, 1),
    ids=[1, 2, 151643],
    loss_mask=[0, 1, 1],
    logprobs=[0.0, -0.1, -12.000000000000002],
    versions=[-1, 7, 8],
    prompt_length=1,
    reward=0.5,
    metrics={"tests passed": 3.0},
    mode=TokenMode.TOKENS,
    logprob_kind=LogprobKind.RAW,
    stop_reason=StopReason.COMPLETED,
    min_version=7,
    max_version=8,
    labels={"item": "rye"},
    turn_spans=((1, 2), (2, 3)),
    turn_rewards=(0.25, None),
    images=(
        SampleImage(turn=0, message=0, digest="ab", media_type="image/png", size=3, url=None),
        SampleImage(turn=1, message=2, digest="cd", media_type="", size=0, url="https://example.org/x.png"),
        SampleImage(turn=1, message=2, digest="ab", media_type="image/png", size=3, url=None),
    ),
)
UNGRADED = changed_sample(
    SAMPLE, reward=None, metrics={}, labels={}, ids=[], loss_mask=[], logprobs=[], versions=[], turns=(), images=()
)


def read_parquet(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return [row | {"metrics": json.loads(row["metrics"]), "labels": json.loads(row["labels"])} for row in rows]


def test_all_formats_hold_the_same_rows(tmp_path: Path) -> None:
    for kind in SampleFormat:
        with sample_file(tmp_path / kind, kind) as writer:
            writer.write([SAMPLE])
            writer.write([])
            writer.write([UNGRADED, SAMPLE])
    lines = [json.loads(line) for line in (tmp_path / "jsonl").read_text().splitlines()]
    assert lines == [json.loads(sample_json(sample)) for sample in (SAMPLE, UNGRADED, SAMPLE)]
    assert read_parquet(tmp_path / "parquet") == lines
    assert decode((tmp_path / "arrow").read_bytes()).samples == [SAMPLE, UNGRADED, SAMPLE]


def test_a_row_group_ends_with_its_tokens(tmp_path: Path) -> None:
    """The rows of several calls of `write` share a row group, and the last one is written when the file is closed."""
    with (
        (tmp_path / "rows").open("wb") as written_to,
        closing(Parquet(written_to, row_group_tokens=2 * len(SAMPLE))) as writer,
    ):
        for rows in ([SAMPLE], [UNGRADED, SAMPLE, SAMPLE], [UNGRADED]):
            writer.write(rows)
    file = pq.ParquetFile(tmp_path / "rows")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [3, 2]
    written = [SAMPLE, UNGRADED, SAMPLE, SAMPLE, UNGRADED]
    assert read_parquet(tmp_path / "rows") == [json.loads(sample_json(sample)) for sample in written]


def test_token_columns_have_the_types_that_trainers_want(tmp_path: Path) -> None:
    with sample_file(tmp_path / "rows", SampleFormat.PARQUET) as writer:
        writer.write([SAMPLE])
    schema = pq.read_schema(tmp_path / "rows")
    assert schema.names == list(JsonSample.__struct_fields__)
    assert {name: schema.field(name).type for name in ("ids", "loss_mask", "logprobs", "versions")} == {
        "ids": pa.large_list(pa.field("element", pa.int32(), nullable=False)),
        "loss_mask": pa.large_list(pa.field("element", pa.int8(), nullable=False)),
        "logprobs": pa.large_list(pa.field("element", pa.float64(), nullable=False)),
        "versions": pa.large_list(pa.field("element", pa.int32(), nullable=False)),
    }


@pytest.mark.parametrize("kind", SampleFormat)
def test_no_rows_make_a_file_too(tmp_path: Path, kind: SampleFormat) -> None:
    with sample_file(tmp_path / "deep" / "rows", kind):
        pass
    path = tmp_path / "deep" / "rows"
    match kind:
        case SampleFormat.PARQUET:
            assert read_parquet(path) == []
        case SampleFormat.ARROW:
            assert decode(path.read_bytes()).samples == []
        case _:
            assert path.read_text() == ""


@pytest.mark.parametrize("kind", SampleFormat)
def test_a_failure_leaves_the_old_file(tmp_path: Path, kind: SampleFormat) -> None:
    (tmp_path / "rows").write_text("old")
    broken = msgspec.structs.replace(SAMPLE, metrics={"bad": object()})
    with pytest.raises(TypeError), sample_file(tmp_path / "rows", kind) as writer:
        writer.write([SAMPLE, broken])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("rows", "old")]


def test_an_image_folder_has_each_digest_once(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    png, odd = image_from_bytes("image/png", b"one"), image_from_bytes("application/octet-stream", b"two")
    assert folder.missing([png.digest, odd.digest, png.digest]) == [png.digest, odd.digest]
    assert not folder.path.exists()
    for image in (png, odd):
        folder.add(image)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == {
        f"{png.digest}.png": b"one",
        f"{odd.digest}.bin": b"two",
    }
    assert folder.missing([png.digest, "other", odd.digest]) == ["other"]


def test_an_image_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    broken = Image("image/png", "ab", data="no bytes")  # type: ignore[arg-type]  # as a broken store would give it
    with pytest.raises(TypeError):
        ImageFolder(tmp_path).add(broken)
    assert list(tmp_path.iterdir()) == []


def test_only_images_that_the_service_keeps_are_files() -> None:
    assert stored_images([SAMPLE, UNGRADED, SAMPLE]) == ["ab"]


def test_a_place_that_cannot_be_written_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidField) as caught, sample_file(tmp_path / "file" / "rows", SampleFormat.JSONL):
        pass
    assert caught.value.field == "output"


@pytest.mark.parametrize("kind", SampleFormat)
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path, kind: SampleFormat) -> None:
    """Such as /dev/stdout or /dev/null, which a program of root would otherwise replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with sample_file(pipe, kind) as writer:
            writer.write([SAMPLE])
        assert os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("rows")
    with sample_file(tmp_path / "link", SampleFormat.JSONL) as writer:
        writer.write([SAMPLE])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "rows").read_bytes() == sample_json(SAMPLE) + b"\n"


@pytest.mark.parametrize("name", [".", "..", "folder", "/"])
def test_a_folder_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(InvalidField, match="Is a directory"),
        sample_file(Path(name), SampleFormat.JSONL),
    ):
        raise AssertionError("the block must not run")


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """Such as two exports into one folder that store the same image."""
    path = tmp_path / "rows"
    with sample_file(path, SampleFormat.JSONL) as one:
        one.write([SAMPLE])
        with sample_file(path, SampleFormat.JSONL) as other:
            other.write([UNGRADED])
        assert path.read_bytes() == sample_json(UNGRADED) + b"\n"
    assert path.read_bytes() == sample_json(SAMPLE) + b"\n"
    assert list(tmp_path.iterdir()) == [path]
