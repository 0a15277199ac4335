"""The JSON of the replies to other systems' clients."""

from __future__ import annotations

import msgspec
import numpy as np

from outrider.api.compat.routes import encoded


def test_integers_of_any_size_and_arrays_are_encoded() -> None:
    """A tool's schema and a tool call may contain any integer, and the result must still reach its client."""
    columns = {"ids": np.array([1, 2], np.int32), "logprobs": np.array([-0.5, -1e-300])}
    for integer in (1, 2**64 - 1, 2**64, -(2**70)):
        value = {"arguments": {"n": integer}, **columns}
        assert msgspec.json.decode(encoded(value)) == {
            "arguments": {"n": integer},
            "ids": [1, 2],
            "logprobs": [-0.5, -1e-300],
        }
