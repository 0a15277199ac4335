"""Samples as an Arrow stream: the same samples come back, and readers of Arrow see what docs/api.md states."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from outrider import sample_columns
from outrider.errors import ServiceError
from outrider.lifecycle import StopReason
from outrider.sample_columns import decode, encode
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


def test_a_column_that_is_missing_is_named() -> None:
    table = pa.ipc.open_stream(stream()).read_all()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.drop_columns(["reward"]).schema) as writer:
        writer.write_table(table.drop_columns(["reward"]))
    with pytest.raises(ServiceError, match="'reward'"):
        decode(out.getvalue().to_pybytes())


def test_a_stream_may_have_several_batches() -> None:
    table = pa.ipc.open_stream(encode([ROW, EMPTY], b"{}")).read_all()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        for at in range(2):
            writer.write_table(table.slice(at, 1).combine_chunks())
    assert decode(out.getvalue().to_pybytes()).samples == [ROW, EMPTY]
