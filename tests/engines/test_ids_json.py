"""Ids that are written by table lookup read back unchanged."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from outrider.engines.adapters.ids_json import SHORT, TABLED, body_with_ids


@pytest.mark.parametrize(
    "largest", [0, 9, 10, 99, 100, 262_143, 262_144, 999_999, 1_000_000, TABLED - 1, TABLED, 2**31 - 1]
)
@pytest.mark.parametrize("count", [0, 1, SHORT - 1, SHORT, 3 * SHORT])
def test_they_read_back_as_they_were(largest: int, count: int) -> None:
    ids = np.random.default_rng(largest).integers(0, largest, count, dtype=np.int32, endpoint=True)
    ids[: count // 3] = largest
    body = b"".join(body_with_ids({"before": 1}, "ids", ids))
    assert orjson.loads(body) == {"before": 1, "ids": ids.tolist()}
