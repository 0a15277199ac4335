"""Samples as an Arrow stream: decoded samples equal the encoded ones, and readers of Arrow see the columns of
docs/api.md."""

from __future__ import annotations

import random
import time
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from outrider import sample_columns
from outrider.errors import ServiceError, ServiceUnusable
from outrider.lifecycle import StopReason
from outrider.sample_columns import END, batch, decode, encode, head, rows_of_batches
from outrider.trajectory import BranchKind, JsonSample, LogprobKind, Sample, SampleImage, TokenMode, sample_json
from support.samples import changed_sample, make_sample

ROW = make_sample(
    group_id="g-1",
    session_id="s-1",
    attempt=2,
    sample_index=3,
    row=0,
    rows=2,
    kind=BranchKind.SUBAGENT,
    parent=4,
    depth=1,
    label="größe",
    turns=(5, 6),
    ids=[10, 11, 151_643, 20, 21, 13],
    loss_mask=[0, 0, 1, 1, 0, 1],
    logprobs=[0.0, 0.0, -0.1, -12.000000000000002, 0.0, -5e-324],
    versions=[-1, -1, 7, 8, -1, 8],
    prompt_length=2,
    reward=-0.0,
    metrics={"tests passed": 3.0},
    mode=TokenMode.CAPTURE,
    logprob_kind=LogprobKind.RAW,
    stop_reason=StopReason.MAX_TURNS,
    min_version=7,
    max_version=8,
    labels={"item": "rye"},
    images=(SampleImage(turn=5, message=0, digest="ab", media_type="image/png", size=3 << 32, url=None),),
    altered=(6,),
    turn_spans=((2, 4), (5, 6)),
    turn_rewards=(0.25, None),
)
EMPTY = changed_sample(
    ROW, ids=[], loss_mask=[], logprobs=[], versions=[], turns=(), turn_spans=(), turn_rewards=(), parent=None,
    reward=None, metrics={}, labels={}, images=(), altered=(), label="",
)  # fmt: skip


def drawn(seed: int) -> Sample:
    draw = random.Random(seed)
    mask = [int(draw.random() < 0.5) for _ in range(draw.randrange(40))]
    return changed_sample(
        ROW,
        row=seed,
        ids=[draw.randrange(2**31) for _ in mask],
        loss_mask=mask,
        logprobs=[-draw.random() * one for one in mask],
        versions=[draw.randrange(3) if one else -1 for one in mask],
        reward=draw.choice([None, 1.0, float(seed)]),
        parent=draw.choice([None, seed]),
        turns=tuple(range(draw.randrange(5))),
        turn_rewards=tuple(draw.choice([None, 0.5]) for _ in range(draw.randrange(5))),
    )


@pytest.mark.parametrize(
    "samples",
    [[], [ROW], [EMPTY], [EMPTY, ROW, EMPTY], [drawn(seed) for seed in range(100)]],
    ids=["none", "one", "empty", "three", "many"],
)
def test_the_same_samples_come_back(samples: list[Sample]) -> None:
    found = decode(encode(samples, b'{"cursor":3}'))
    assert found == (b'{"cursor":3}', samples)
    for sample, sent in zip(found.samples, samples, strict=True):
        assert sample_json(sample) == sample_json(sent)
        assert JsonSample.sample(msgspec.json.decode(sample_json(sample), type=JsonSample)) == sent


def test_every_field_of_a_sample_is_a_column() -> None:
    assert {column.of for column in sample_columns.COLUMNS} == set(Sample.__struct_fields__)


def test_readers_of_arrow_see_the_columns() -> None:
    table = pa.ipc.open_stream(encode([ROW, EMPTY], b"{}")).read_all()
    table.validate(full=True)
    assert [field.name for field in table.schema] == [column.name for column in sample_columns.COLUMNS]
    row, empty = table.to_pylist()
    assert row["ids"] == ROW.ids.tolist()
    assert row["trained"] == [{"start": 2, "end": 4}, {"start": 5, "end": 6}]
    assert row["logprobs"] == [-0.1, -12.000000000000002, -5e-324]
    assert row["versions"] == [
        {"version": 7, "start": 2, "end": 3},
        {"version": 8, "start": 3, "end": 4},
        {"version": 8, "start": 5, "end": 6},
    ]
    assert (row["label"], row["metrics"], row["turn_rewards"]) == ("größe", '{"tests passed":3.0}', [0.25, None])
    assert (empty["reward"], empty["parent"], empty["ids"]) == (None, None, [])


def test_batches_are_arrow_for_other_readers() -> None:
    """Large buffers are not copied, nulls are counted, and pyarrow validates the table and reads the same values."""
    long = changed_sample(ROW, **{name: [1] * 30_001 for name in ("ids", "loss_mask", "logprobs", "versions")})
    samples = [drawn(seed) for seed in range(20)] + [long, EMPTY, long]
    assert any(piece is long.packed_ids for piece in sample_columns.batch(samples))
    table = pa.ipc.open_stream(encode(samples, b"{}")).read_all()
    table.validate(full=True)
    assert table["reward"].to_pylist() == [sample.reward for sample in samples]
    assert table["parent"].null_count == sum(sample.parent is None for sample in samples)
    assert table["ids"].to_pylist() == [sample.ids.tolist() for sample in samples]
    assert table["turn_rewards"].to_pylist() == [list(sample.turn_rewards) for sample in samples]


def test_columns_are_arrays_that_cannot_be_changed() -> None:
    for column in (ROW.ids, ROW.loss_mask, ROW.logprobs, ROW.versions):
        assert len(column) == len(ROW)
        assert not column.flags.writeable
    assert {column.dtype for column in (ROW.ids, ROW.loss_mask, ROW.versions)} == {np.dtype(np.int32)}
    assert ROW.logprobs.dtype == np.float64
    long = changed_sample(ROW, **{name: [1] * 300 for name in ("ids", "loss_mask", "logprobs", "versions")})
    assert sum(long.loss_mask) == long.trained_tokens == 300  # a smaller type would overflow here


def stream() -> bytes:
    return encode([ROW], b"{}")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", stream()[:100], stream()[:-300], b"\xff" * 64, pa.table({"a": [1]}).to_batches()[0].serialize()],
)
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(ServiceError, match="cannot be read") as caught:
        decode(bytes(data))
    assert "versions" in (caught.value.hint or "")


def test_no_beginning_of_a_stream_is_a_stream() -> None:
    whole = encode([ROW, EMPTY], b"{}")
    for size in range(0, len(whole), 4):
        with pytest.raises(ServiceError, match="cannot be read") as caught:
            decode(whole[:size])
        assert caught.value.retryable, size  # the next reply may be complete


def stream_of(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data: bytes = out.getvalue().to_pybytes()
    return data


def test_a_column_that_is_missing_is_named() -> None:
    table = pa.ipc.open_stream(stream()).read_all()
    with pytest.raises(ServiceUnusable, match="'reward' is missing"):
        decode(stream_of(table.drop_columns(["reward"])))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ids", pa.list_(pa.int64())),
        ("ids", pa.large_list(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("attempt", pa.int64()),
        ("reward", pa.float32()),
        ("label", pa.large_string()),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_a_column_of_another_type_is_named(name: str, other: pa.DataType) -> None:
    table = pa.ipc.open_stream(stream()).read_all()
    at = table.schema.get_field_index(name)
    changed = table.set_column(at, pa.field(name, other), table[name].cast(other))
    with pytest.raises(ServiceUnusable, match=f"'{name}' has another type"):
        decode(stream_of(changed.replace_schema_metadata(table.schema.metadata)))


def test_columns_may_be_in_another_order_and_among_others() -> None:
    table = pa.ipc.open_stream(encode([ROW, EMPTY], b'{"cursor":3}')).read_all()
    mixed = table.select([*reversed(table.column_names)]).append_column("new", pa.array([1, 2]))
    assert decode(stream_of(mixed)) == (b'{"cursor":3}', [ROW, EMPTY])


def test_a_batch_ends_with_the_row_that_fills_it() -> None:
    samples = [ROW, EMPTY, ROW, EMPTY, EMPTY]
    for size, rows in ((1, [1, 2, 2]), (len(ROW.packed_ids) + 1, [3, 2]), (1 << 20, [5])):
        data = b"".join([head(b"{}"), *chain.from_iterable(map(batch, rows_of_batches(samples, size))), END])
        assert [batch.num_rows for batch in pa.ipc.open_stream(data) if batch.num_rows] == rows
        assert decode(data) == (b"{}", samples)


def test_the_time_for_rewards_of_turns_is_proportional_to_their_number() -> None:
    count = 1_000_000
    row = changed_sample(ROW, turns=(), turn_spans=(), turn_rewards=(0.5, None) * (count // 2))
    begun = time.thread_time()
    [found] = decode(encode([row], b"{}")).samples
    assert time.thread_time() - begun < 5.0  # 0.2 s; shifts of one large number took 23 s
    assert found.turn_rewards == row.turn_rewards


def test_a_stream_may_have_several_batches() -> None:
    table = pa.ipc.open_stream(encode([ROW, EMPTY], b"{}")).read_all()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        for at in range(2):
            writer.write_table(table.slice(at, 1).combine_chunks())
    assert decode(out.getvalue().to_pybytes()).samples == [ROW, EMPTY]
