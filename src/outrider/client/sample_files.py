"""Writes training rows to files, as JSON lines or (with pyarrow) as Parquet, and their images to a folder.

The module does not use the service. Invariants: `jsonl` and `parquet` have the same rows, with the fields of
`trajectory.Sample`; a file appears complete or not at all.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from outrider.client.atif import Trajectory
from outrider.errors import InvalidField
from outrider.messages import Image, image_file
from outrider.trajectory import ChatRow, Sample

Row = Sample | ChatRow


class SampleFormat(StrEnum):
    """The format of a file. `jsonl` and `parquet` hold samples; `chat` is JSON lines of chat rows, and `atif` JSON
    lines of trajectories."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    CHAT = "chat"
    ATIF = "atif"


class SampleWriter(Protocol):
    def write(self, samples: Sequence[Row | Trajectory]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object on each line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, samples: Sequence[Row | Trajectory]) -> None:
        for sample in samples:
            self._file.write(self._encoder.encode(sample) + b"\n")

    def close(self) -> None:
        self._file.flush()


class Parquet:
    """Parquet with one row group for each call of `write`.

    Token columns are large lists: `ids` and `versions` of int32, `loss_mask` of int8, `logprobs` of float64. `metrics`
    and `labels` are JSON text, because not all readers treat Arrow maps alike. `images` is a list of structs.

    Raises InvalidField if pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._arrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise InvalidField(
                "Parquet files need pyarrow", field="format", hint="pip install 'outrider[parquet]', or use jsonl"
            ) from error
        self._schema = _schema(self._arrow)
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, samples: Sequence[Row | Trajectory]) -> None:
        if not samples:
            return
        rows = [msgspec.to_builtins(sample) for sample in samples]
        for row in rows:
            for name in ("metrics", "labels"):
                row[name] = msgspec.json.encode(row[name]).decode()
        self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


WRITERS: dict[SampleFormat, type[JsonLines] | type[Parquet]] = {
    SampleFormat.JSONL: JsonLines,
    SampleFormat.PARQUET: Parquet,
    SampleFormat.CHAT: JsonLines,
    SampleFormat.ATIF: JsonLines,
}


@contextmanager
def sample_file(path: Path, kind: SampleFormat) -> Iterator[SampleWriter]:
    """Open a writer of the file at `path`. The file appears, or is replaced, only if the block ends without an error.

    Raises InvalidField if the file cannot be created.
    """
    with _whole_file(path) as file, closing(WRITERS[kind](file)) as writer:
        yield writer


class ImageFolder:
    """A folder of image files named by their digests (DIGEST.png, ...). It is created with the first image."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests of which the folder has no file, each once."""
        return [digest for digest in dict.fromkeys(digests) if next(self.path.glob(f"{digest}.*"), None) is None]

    def add(self, image: Image) -> None:
        """Write an image. Raises InvalidField if the file cannot be created."""
        with _whole_file(self.path / image_file(image)) as file:
            file.write(image.data)


def stored_images(samples: Iterable[Row]) -> list[str]:
    """Return the digests of the images in samples, each once, without images sent as URLs. (The service stores no bytes
    of these, because it does not fetch URLs.)"""
    shown = (image for sample in samples for image in sample.images)
    return list(dict.fromkeys(image.digest for image in shown if image.url is None))


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when the block ends without an error. Until then the file has another name.
    After an error it is removed."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = draft.open("wb")
    except OSError as error:
        raise InvalidField(f"cannot write {path}: {error.strerror}", field="output") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _schema(arrow: Any) -> Any:
    tokens = {
        "ids": arrow.large_list(arrow.int32()),
        "loss_mask": arrow.large_list(arrow.int8()),
        "logprobs": arrow.large_list(arrow.float64()),
        "versions": arrow.large_list(arrow.int32()),
    }
    image = {
        "turn": arrow.int32(),
        "message": arrow.int32(),
        "digest": arrow.string(),
        "media_type": arrow.string(),
        "size": arrow.int64(),
        "url": arrow.string(),
    }
    columns = {
        "group_id": arrow.string(),
        "session_id": arrow.string(),
        "attempt": arrow.int32(),
        "sample_index": arrow.int32(),
        "row": arrow.int32(),
        "rows": arrow.int32(),
        "kind": arrow.string(),
        "parent": arrow.int32(),
        "depth": arrow.int32(),
        "label": arrow.string(),
        "turns": arrow.list_(arrow.int32()),
        **tokens,
        "prompt_length": arrow.int32(),
        "reward": arrow.float64(),
        "metrics": arrow.string(),
        "mode": arrow.string(),
        "logprob_kind": arrow.string(),
        "stop_reason": arrow.string(),
        "min_version": arrow.int32(),
        "max_version": arrow.int32(),
        "labels": arrow.string(),
        "images": arrow.list_(arrow.struct(list(image.items()))),
        "altered": arrow.list_(arrow.int32()),
        "turn_spans": arrow.list_(arrow.list_(arrow.int32())),
        "turn_rewards": arrow.list_(arrow.float64()),
    }
    return arrow.schema(list(columns.items()))
