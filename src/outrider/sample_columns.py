"""Writes and reads training rows as an Arrow IPC stream. Programs exchange samples with the service in this form; JSON
is for people.

A row is a `trajectory.Sample`, in the form in which it is stored: `ids` has all token ids of the row, while `logprobs`
and `versions` only describe the ids that are trained on. `COLUMNS` lists the columns; docs/api.md documents them. The
rest of a reply, such as a group's sessions, is JSON in the schema's metadata, under the key `REPLY`.

Invariant: `decode(encode(samples, reply))` returns equal samples and the same reply.

Each column of a batch takes a fixed time, however many rows the batch has. So a batch has many rows: rows are added to
it until their ids reach BATCH_BYTES. nanoarrow writes the schema and reads streams. It has a fortieth of the size of
pyarrow, and its import is ten times as fast. Even so, nanoarrow is imported only inside functions, because most
commands read no samples.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from outrider.errors import ServiceError, ServiceUnusable
from outrider.lifecycle import StopReason
from outrider.trajectory import BranchKind, LogprobKind, Sample, SampleImage, TokenMode, VersionSpan

if TYPE_CHECKING:
    import nanoarrow

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
REPLY = "outrider.reply"
"""A key in the schema's metadata. Its value is the JSON of the reply without its samples."""
CANNOT_READ = "the samples in the service's reply cannot be read"
VERSIONS = "the client and the service may be of different versions"

View = Any
"""nanoarrow's class `CArrayView`, which has no type information."""


class Column(ABC):
    """Encodes and decodes one field of the samples as an Arrow column. `of` is the field's name in `Sample`, if it
    differs from the column's name."""

    def __init__(self, name: str, of: str = "") -> None:
        self.name = name
        self.of = of or name

    @abstractmethod
    def type(self) -> nanoarrow.Schema: ...

    @abstractmethod
    def encode(self, values: Sequence[Any], batch: RecordBatch) -> None: ...

    @abstractmethod
    def decode(self, column: View) -> Iterable[Any]: ...


class TextColumn(Column):
    """A column of texts. `make` converts a text to the value of the sample's field."""

    def __init__(self, name: str, make: Any = str) -> None:
        super().__init__(name)
        self._make = make

    def type(self) -> nanoarrow.Schema:
        return _arrow().string(nullable=False)

    def encode(self, values: Sequence[str], batch: RecordBatch) -> None:
        texts = [value.encode() for value in values]
        batch.add_array(len(texts), _offsets(map(len, texts)), b"".join(texts))

    def decode(self, column: View) -> list[Any]:
        data = bytes(memoryview(column.buffer(2)))
        return [self._make(data[start:end].decode()) for start, end in pairwise(_numbers(column.buffer(1)))]


class JsonColumn(TextColumn):
    """A column of JSON texts, which are decoded to values of the type `shape`. Arrow also has types for maps and nested
    structs, but libraries read them in different ways."""

    def __init__(self, name: str, shape: Any) -> None:
        super().__init__(name, msgspec.json.Decoder(shape).decode)

    def encode(self, values: Sequence[Any], batch: RecordBatch) -> None:
        super().encode([msgspec.json.encode(value).decode() for value in values], batch)


class NumberColumn(Column):
    """A column of numbers: int32 for `code` "i", float64 for "d". None is stored as null."""

    def __init__(self, name: str, code: str = "i", *, nullable: bool = False) -> None:
        super().__init__(name)
        self._code = code
        self._nullable = nullable

    def type(self) -> nanoarrow.Schema:
        return (_arrow().int32 if self._code == "i" else _arrow().float64)(nullable=self._nullable)

    def encode(self, values: Sequence[Any], batch: RecordBatch) -> None:
        if self._nullable and None in values:
            filled = array(self._code, [0 if value is None else value for value in values])
            batch.add_array(len(values), filled.tobytes(), validity=_validity(values), nulls=values.count(None))
        else:
            batch.add_array(len(values), array(self._code, values).tobytes())

    def decode(self, column: View) -> list[Any]:
        return _with_nulls(column, _numbers(column.buffer(1)))


class ListColumn(Column):
    """A column with a list of numbers for each row. `inner` is the column that has the numbers of all lists, one after
    the other."""

    def __init__(self, name: str, inner: NumberColumn) -> None:
        super().__init__(name)
        self._inner = inner

    def type(self) -> nanoarrow.Schema:
        return _arrow().list_(self._inner.type(), nullable=False)

    def encode(self, values: Sequence[Sequence[Any]], batch: RecordBatch) -> None:
        batch.add_array(len(values), _offsets(map(len, values)))
        self._inner.encode([*chain.from_iterable(values)], batch)

    def decode(self, column: View) -> list[tuple[Any, ...]]:
        items = self._inner.decode(column.child(0))
        return [tuple(items[start:end]) for start, end in pairwise(_numbers(column.buffer(1)))]


class PackedColumn(Column):
    """A column with a list of numbers for each row. The numbers are packed bytes both in `Sample` and in Arrow, so they
    never become Python objects."""

    def __init__(self, name: str, of: str, code: str = "i") -> None:
        super().__init__(name, of)
        self._code = code
        self._size = array(code).itemsize

    def type(self) -> nanoarrow.Schema:
        arrow = _arrow()
        return arrow.list_((arrow.int32 if self._code == "i" else arrow.float64)(nullable=False), nullable=False)

    def encode(self, values: Sequence[bytes], batch: RecordBatch) -> None:
        lengths = [len(value) // self._size for value in values]
        batch.add_array(len(values), _offsets(lengths))
        batch.add_array(sum(lengths), values)

    def decode(self, column: View) -> list[bytes]:
        data = memoryview(column.child(0).buffer(1)).cast("B")
        offsets = pairwise(_numbers(column.buffer(1)))
        return [bytes(data[start * self._size : end * self._size]) for start, end in offsets]


class SpanColumn(Column):
    """A column with a list of spans for each row. A span is stored as a struct of int32. `make` makes a span from the
    struct's numbers, and `split` returns the numbers of a span."""

    def __init__(
        self,
        name: str,
        fields: Sequence[str],
        of: str = "",
        make: Callable[..., Any] = lambda *numbers: numbers,
        split: Callable[[Any], Iterable[int]] | None = None,
    ) -> None:
        super().__init__(name, of)
        self._fields = fields
        self._make = make
        self._split = split

    def type(self) -> nanoarrow.Schema:
        arrow = _arrow()
        item = arrow.struct({field: arrow.int32(nullable=False) for field in self._fields}, nullable=False)
        return arrow.list_(item, nullable=False)

    def encode(self, values: Sequence[Sequence[Any]], batch: RecordBatch) -> None:
        spans: Iterable[Iterable[int]] = chain.from_iterable(values)
        # All numbers are converted in one call. One call per span would take most of the time of a batch.
        numbers = array("i", [*chain.from_iterable(spans if self._split is None else map(self._split, spans))])
        width = len(self._fields)
        batch.add_array(len(values), _offsets(map(len, values)))
        batch.add_array(len(numbers) // width)
        for at in range(width):
            batch.add_array(len(numbers) // width, numbers[at::width].tobytes())

    def decode(self, column: View) -> list[tuple[Any, ...]]:
        inner = column.child(0)
        numbers = [_numbers(inner.child(at).buffer(1)) for at in range(len(self._fields))]
        spans = [*map(self._make, *numbers)]
        return [tuple(spans[start:end]) for start, end in pairwise(_numbers(column.buffer(1)))]


class RecordBatch:
    """Builds an Arrow record batch. Each array of a column must be added before the arrays inside it.

    The batch is a message in Arrow's encapsulated format: metadata, then the buffers, each padded to 8 bytes. The
    metadata is a flatbuffer (Arrow's Message.fbs). Its layout is always the same, so it is written without a flatbuffer
    library. nanoarrow's own writer would copy the ids twice.
    Source: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._nodes: list[int] = []
        self._buffers: list[int] = []
        self._body: list[bytes] = []
        self._size = 0

    def add_array(self, length: int, *buffers: bytes | Sequence[bytes], validity: bytes = b"", nulls: int = 0) -> None:
        """Add an array of `length` items. `validity` is the bitmap of its non-null items. A buffer may be given in
        pieces, which are not joined."""
        self._nodes += (length, nulls)
        for buffer in (validity, *buffers):
            pieces = (buffer,) if isinstance(buffer, bytes) else buffer
            size = sum(map(len, pieces))
            self._buffers += (self._size, size)
            self._body += pieces
            if padding := -size % 8:
                self._body.append(bytes(padding))
            self._size += size + padding

    def message(self) -> list[bytes]:
        """Return the batch as a message, in pieces. Only small pieces are joined, because joining copies them."""
        nodes, buffers = len(self._nodes) // 2, len(self._buffers) // 2
        # A flatbuffer's vtable has its own size, the size of its table, and the position of each field in the table. A
        # table begins with the distance to its vtable. An offset counts from the field that contains it.
        metadata = _METADATA.pack(
            *(_CONTINUATION, _METADATA.size + 16 * nodes + 16 * buffers),
            16,  # the position of the table Message
            *(12, 24, 16, 18, 4, 8),  # the vtable of Message
            *(12, 32, self._size, _METADATA_V5, _RECORD_BATCH),
            *(10, 20, 4, 12, 16),  # the vtable of RecordBatch
            *(12, self._rows, 12, 16 + 16 * nodes),
            nodes,
        )
        pieces = [
            metadata,
            array("q", self._nodes).tobytes(),
            struct.pack("<4xI", buffers),
            array("q", self._buffers).tobytes(),
        ]
        joined: list[bytes] = []
        for piece in self._body:
            if len(piece) < SMALL:
                pieces.append(piece)
            else:
                joined += (b"".join(pieces), piece)
                pieces = []
        return [*joined, b"".join(pieces)]


_METADATA = struct.Struct(
    "<Ii"  # before the flatbuffer: the mark of a message, and the size of the flatbuffer
    "I6H"
    "iIqhB5x"  # Message: vtable, header, bodyLength, version, header_type
    "5H2x"
    "iqII"  # RecordBatch: vtable, length, nodes, buffers
    "4xI"
)
_CONTINUATION, _METADATA_V5, _RECORD_BATCH = 0xFFFFFFFF, 4, 3
SMALL = 16 << 10
"""Pieces of a message that have fewer bytes than this are joined with their neighbours."""


SPAN = ("start", "end")
COLUMNS: tuple[Column, ...] = (
    TextColumn("group_id"),
    TextColumn("session_id"),
    NumberColumn("attempt"),
    NumberColumn("sample_index"),
    NumberColumn("row"),
    NumberColumn("rows"),
    TextColumn("kind", BranchKind),
    NumberColumn("parent", nullable=True),
    NumberColumn("depth"),
    TextColumn("label"),
    PackedColumn("ids", of="packed_ids"),
    SpanColumn("trained", SPAN),
    PackedColumn("logprobs", of="packed_logprobs", code="d"),
    SpanColumn("versions", ("version", *SPAN), of="version_spans", make=VersionSpan, split=astuple),
    NumberColumn("prompt_length"),
    NumberColumn("reward", "d", nullable=True),
    JsonColumn("metrics", dict[str, float]),
    TextColumn("mode", TokenMode),
    TextColumn("logprob_kind", LogprobKind),
    TextColumn("stop_reason", StopReason),
    NumberColumn("min_version"),
    NumberColumn("max_version"),
    JsonColumn("labels", dict[str, str]),
    JsonColumn("images", tuple[SampleImage, ...]),
    ListColumn("turns", NumberColumn("item")),
    SpanColumn("turn_spans", SPAN),
    ListColumn("turn_rewards", NumberColumn("item", "d", nullable=True)),
    ListColumn("altered", NumberColumn("item")),
)


END = b"\xff\xff\xff\xff\0\0\0\0"
"""The bytes that end a stream. A stream without them was cut off, maybe between two batches."""
BATCH_BYTES = 2 << 20
"""Size of the token ids, in bytes, at which a batch ends. With larger buffers, the allocator would get memory from the
kernel for each batch, and this would take longer than the encoding."""


def prepare() -> None:
    """Import nanoarrow and make the schema. Otherwise the first call of `head` would do both, and take about 50 ms
    longer."""
    from nanoarrow import ipc  # noqa: F401

    _schema()


def encode(samples: Sequence[Sample], reply: bytes) -> bytes:
    """Return an Arrow IPC stream with the samples. `reply` is the JSON of the reply without its samples."""
    return b"".join([head(reply), *batches(samples), END])


def head(reply: bytes) -> bytes:
    """Return the beginning of a stream. It has the schema with the columns, and `reply`, the JSON of the reply without
    its samples. The batches and `END` must follow."""
    from nanoarrow.ipc import StreamWriter

    written = _Pieces()
    writer = StreamWriter.from_writable(written)
    writer.write_stream(_arrow().c_array_stream([], _schema().modify(metadata={REPLY: reply})))
    writer.release()  # `close` would also write the stream's end
    return written.pieces[0]  # without the empty batch that follows the schema


class _Pieces:
    """A file object for nanoarrow that keeps each written piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece))  # copied, because nanoarrow's memory is valid only during the call
        return len(self.pieces[-1])


def batches(samples: Sequence[Sample]) -> Iterator[bytes]:
    """Yield the batches of a stream, in pieces of any size. The pieces are not joined, because joining would copy
    them."""
    for some in rows_of_batches(samples):
        yield from batch(some)


def rows_of_batches(samples: Sequence[Sample], batch_bytes: int = BATCH_BYTES) -> Iterator[list[Sample]]:
    """Divide samples into batches by the size of their ids in bytes, and yield the samples of each batch."""
    some: list[Sample] = []
    size = 0
    for sample in samples:
        some.append(sample)
        size += len(sample.packed_ids)
        if size >= batch_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some


def batch(samples: Sequence[Sample]) -> list[bytes]:
    """Encode samples as one batch, and return the batch in pieces."""
    made = RecordBatch(len(samples))
    for column in COLUMNS:
        column.encode([getattr(sample, column.of) for sample in samples], made)
    return made.message()


def decode(data: bytes) -> Decoded:
    """Decode a stream from `encode`. Raises ServiceUnusable if a column is missing or has another type, and
    ServiceError for other invalid data or a stream that was cut off."""
    import nanoarrow
    from nanoarrow.ipc import InputStream

    samples: list[Sample] = []
    fields = [column.of for column in COLUMNS]
    try:
        with InputStream.from_readable(data) as stream, nanoarrow.c_array_stream(stream) as arrays:
            schema = arrays.get_schema()
            places = _places(schema)
            if not data.endswith(END):
                raise ValueError("the stream is cut off")
            reply = dict(schema.metadata.items())[REPLY.encode()]
            for batch in arrays:
                view = batch.view()
                columns = [column.decode(view.child(at)) for column, at in zip(COLUMNS, places, strict=True)]
                samples += (Sample(**dict(zip(fields, row, strict=True))) for row in zip(*columns, strict=True))
    except (RuntimeError, ValueError, KeyError) as error:  # nanoarrow raises RuntimeError
        raise ServiceError(f"{CANNOT_READ}: {error}", hint=VERSIONS) from error
    return Decoded(reply, samples)


class Decoded(NamedTuple):
    """The samples of a reply, and the rest of the reply as JSON."""

    reply: bytes
    samples: list[Sample]


def _places(schema: Any) -> list[int]:
    """Return the position of each of COLUMNS in a stream. Raises ServiceUnusable if a column is missing or has another
    type, because the buffers of another type would be read as wrong numbers."""
    places = {child.name: place for place, child in enumerate(schema.children)}
    for at, column in enumerate(COLUMNS):
        place = places.get(column.name)
        if place is None or not schema.child(place).type_equals(_schema().child(at)):
            what = "is missing" if place is None else "has another type"
            raise ServiceUnusable(f"{CANNOT_READ}: the column {column.name!r} {what}", hint=VERSIONS)
    return [places[column.name] for column in COLUMNS]


@cache
def _schema() -> Any:
    return _arrow().c_schema(_arrow().struct({column.name: column.type() for column in COLUMNS}))


def _arrow() -> Any:
    import nanoarrow

    return nanoarrow


def _offsets(lengths: Iterable[int]) -> bytes:
    """Return Arrow's buffer of offsets for lists that are stored one after another: the beginning of each list, and
    the end of the last."""
    return array("i", accumulate(lengths, initial=0)).tobytes()


def _validity(values: Sequence[Any]) -> bytes:
    """Return the bitmap that marks the values that are not None."""
    # The bits are parsed from a text in base 2, in linear time. Shifting one large number for each bit would take
    # seconds for all turns of a page of results.
    digits = "".join(["0" if value is None else "1" for value in reversed(values)])
    return int(digits, 2).to_bytes((len(values) + 7) // 8, "little")


def _with_nulls(column: View, values: list[Any]) -> list[Any]:
    bitmap = bytes(memoryview(column.buffer(0)))
    if not bitmap:
        return values
    digits = f"{int.from_bytes(bitmap, 'little'):0{len(values)}b}"
    return [value if digit == "1" else None for value, digit in zip(values, reversed(digits), strict=False)]


def _numbers(buffer: Any) -> list[Any]:
    return memoryview(buffer).tolist()
