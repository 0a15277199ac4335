"""Writes training rows to files, and their images to a folder. Invariants:

- `jsonl` and `parquet` have the same rows, with the fields of `trajectory.Sample`.
- A file appears complete or not at all, unless it is a device or a pipe.
"""

from __future__ import annotations

import errno
import importlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

import msgspec

from outrider import sample_columns
from outrider.client.atif import Trajectory
from outrider.environment import install_command
from outrider.errors import InvalidField
from outrider.messages import Image, image_file
from outrider.trajectory import ChatRow, JsonSample, Sample, sample_json, unpack_logprobs

Row = Sample | ChatRow
TOKEN_COLUMNS = ("ids", "loss_mask", "logprobs", "versions")
"""The columns that have a number for each token."""
ROW_GROUP_TOKENS = 1 << 20
"""A Parquet row group ends once it has this many tokens. The arrays of a row group have 17 bytes for each token. With
row groups of 400,000 tokens or of two million tokens, writing takes a tenth more time than with this number."""


class SampleFormat(StrEnum):
    """The format of a file. `jsonl`, `parquet` and `arrow` contain samples. `chat` contains conversations and `atif`
    contains ATIF trajectories, both as JSON lines."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    CHAT = "chat"
    ATIF = "atif"


class JsonLines:
    """Writes JSON lines: one JSON object on each line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, samples: Sequence[Row | Trajectory]) -> None:
        for sample in samples:
            encoded = sample_json(sample) if isinstance(sample, Sample) else self._encoder.encode(sample)
            self._file.write(encoded + b"\n")

    def close(self) -> None:
        self._file.flush()


class Parquet:
    """Writes Parquet, with a row group for about `row_group_tokens` tokens.

    Token columns are large lists: `ids` and `versions` of int32, `loss_mask` of int8, `logprobs` of float64. `metrics`
    and `labels` are JSON text, because not all readers treat Arrow maps alike. `images` is a list of structs. Raises
    InvalidField if pyarrow is not installed.
    """

    def __init__(self, file: BinaryIO, *, row_group_tokens: int = ROW_GROUP_TOKENS) -> None:
        try:
            self._arrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise InvalidField(
                "Parquet files need pyarrow",
                field="format",
                hint=f"{install_command('parquet')}, or use --format jsonl",
            ) from error
        self._schema = self._arrow.schema(_columns(self._arrow, JsonSample))
        # Dictionaries and statistics are not written for token columns. No reader needs them, and they would take two
        # thirds of the writing time.
        small = [field.name for field in self._schema if field.name not in TOKEN_COLUMNS]
        self._writer = parquet.ParquetWriter(
            file, self._schema, compression="zstd", use_dictionary=small, write_statistics=small
        )
        self._row_group_tokens = row_group_tokens
        self._rows: list[Sample] = []
        self._tokens = 0

    def write(self, samples: Sequence[Row | Trajectory]) -> None:
        for sample in samples:
            if isinstance(sample, Sample):
                self._rows.append(sample)
                self._tokens += len(sample)
                if self._tokens >= self._row_group_tokens:
                    self._write_group()

    def _write_group(self) -> None:
        rows, self._rows, self._tokens = self._rows, [], 0
        tokens = _token_arrays(rows)
        offsets = list(accumulate(map(len, rows), initial=0))
        columns = [
            self._arrow.LargeListArray.from_arrays(
                offsets, self._arrow.array(tokens[field.name], type=field.type.value_type), type=field.type
            )
            if field.name in tokens
            else self._column(field, rows)
            for field in self._schema
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))

    def _column(self, field: Any, rows: Sequence[Sample]) -> Any:
        values = [getattr(row, field.name) for row in rows]
        if field.name in ("metrics", "labels"):
            values = [msgspec.json.encode(value).decode() for value in values]
        return self._arrow.array(msgspec.to_builtins(values), type=field.type)

    def close(self) -> None:
        try:
            if self._rows:
                self._write_group()
        finally:
            self._writer.close()


def _token_arrays(rows: Sequence[Sample]) -> dict[str, Any]:
    """Return the TOKEN_COLUMNS of all rows as numpy arrays, one row after the other. The arrays are made from the rows'
    packed fields. Joining the arrays of single samples would copy all values."""
    import numpy as np

    total = sum(map(len, rows))
    ids = np.frombuffer(b"".join([row.packed_ids for row in rows]), dtype="<i4")
    mask, logprobs = np.zeros(total, dtype=np.int8), np.zeros(total)
    versions = np.full(total, -1, dtype=np.int32)
    begin = 0
    for row in rows:
        given, at = unpack_logprobs(row.packed_logprobs), 0
        for start, end in row.trained:
            mask[begin + start : begin + end] = 1
            logprobs[begin + start : begin + end] = given[at : at + end - start]
            at += end - start
        for span in row.version_spans:
            versions[begin + span.start : begin + span.end] = span.version
        begin += len(row)
    return dict(zip(TOKEN_COLUMNS, (ids, mask, logprobs, versions), strict=True))


class ArrowStream:
    """Writes an Arrow IPC stream with the columns of `sample_columns.py`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file.write(sample_columns.head(b"{}"))

    def write(self, samples: Sequence[Row | Trajectory]) -> None:
        self._file.writelines(sample_columns.batches([sample for sample in samples if isinstance(sample, Sample)]))

    def close(self) -> None:
        self._file.write(sample_columns.END)


SampleWriter = JsonLines | Parquet | ArrowStream
WRITERS: dict[SampleFormat, Callable[[BinaryIO], SampleWriter]] = {
    SampleFormat.PARQUET: Parquet,
    SampleFormat.ARROW: ArrowStream,
}
"""The writers of binary formats. All other formats use JsonLines."""


@contextmanager
def sample_file(path: Path, kind: SampleFormat) -> Iterator[SampleWriter]:
    """Open a writer for the file at `path`. The file appears, or is replaced, only if the block ends without an error.
    Raises InvalidField if the file cannot be created, or if `kind` is `parquet` and pyarrow is not installed.
    """
    make = WRITERS.get(kind, JsonLines)
    with whole_file(path, field="output") as file, closing[SampleWriter](make(file)) as writer:
        yield writer


class ImageFolder:
    """A folder of image files named by their digests (DIGEST.png, ...). It is created with the first image."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests that have no file in this folder, without repetitions."""
        return [digest for digest in dict.fromkeys(digests) if next(self.path.glob(f"{digest}.*"), None) is None]

    def add(self, image: Image) -> None:
        """Write an image. Raises InvalidField if the file cannot be created."""
        with whole_file(self.path / image_file(image), field="output") as file:
            file.write(image.data)


def stored_images(samples: Iterable[Row]) -> list[str]:
    """Return the digests of the images in samples, without repetitions. Images that were sent as URLs are left out,
    because the service does not fetch URLs, and so has no bytes of these images."""
    shown = (image for sample in samples for image in sample.images)
    return list(dict.fromkeys(image.digest for image in shown if image.url is None))


@contextmanager
def whole_file(path: Path, *, field: str) -> Iterator[BinaryIO]:
    """Open a file for writing. The file has a temporary name until the block ends. If the block ends without an error,
    the file then appears at `path`. After an error, the file is removed. If `path` is a link, the file that it names is
    replaced. A device or a pipe, such as /dev/stdout, is not replaced, but written to. Raises InvalidField, naming
    `field`, if the file cannot be created."""
    try:
        if is_stream(path):
            draft, file = None, path.open("wb")
        else:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            path.parent.mkdir(parents=True, exist_ok=True)
            target = Path(os.path.realpath(path))
            # Another process may write the same file at the same time, so the name of the draft is used only once.
            draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.draft")
            file = draft.open("xb")
    except OSError as error:
        raise InvalidField(f"cannot write {path}: {error.strerror}", field=field) from error
    if draft is None:
        with file:
            yield file
        return
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Return True if `path` is a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _columns(arrow: Any, row: type) -> list[tuple[str, Any]]:
    """Return the columns for a struct: the name and type of one column for each field."""
    return [(name, _arrow_type(arrow, name, kind)) for name, kind in get_type_hints(row).items()]


def _arrow_type(arrow: Any, name: str, kind: Any) -> Any:
    """Return the Arrow type for a field of the Python type `kind`. Types that are not handled here become strings."""
    inner = get_args(kind)
    if isinstance(kind, UnionType):  # `X | None` has the type of X, because every column may be null
        return _arrow_type(arrow, name, inner[0])
    if get_origin(kind) in (list, tuple):
        if name in TOKEN_COLUMNS:
            return arrow.large_list(arrow.field("element", _arrow_type(arrow, name, inner[0]), nullable=False))
        return arrow.list_(_arrow_type(arrow, name, inner[0]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return arrow.struct(_columns(arrow, kind))
    if kind is int:
        return {"loss_mask": arrow.int8(), "size": arrow.int64()}.get(name, arrow.int32())
    return arrow.float64() if kind is float else arrow.string()
