"""Ids written by table are the same JSON."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from outrider.engines.http import encode
from outrider.engines.ids import SHORT, ids_json


@pytest.mark.parametrize("largest", [0, 9, 10, 99, 100, 151_999, 262_143, 262_144, 9_999_999, 10_000_000, 2**31 - 1])
@pytest.mark.parametrize("count", [0, 1, SHORT - 1, SHORT, 3 * SHORT])
def test_they_read_back_as_they_were(largest: int, count: int) -> None:
    ids = np.random.default_rng(largest).integers(0, largest, count, dtype=np.int32, endpoint=True)
    ids[: count // 3] = largest
    assert orjson.loads(encode({"before": 1, "ids": ids_json(ids), "after": [2]})) == {
        "before": 1,
        "ids": ids.tolist(),
        "after": [2],
    }
