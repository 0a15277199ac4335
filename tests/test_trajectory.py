"""Token ids and log-probabilities as packed bytes."""

from __future__ import annotations

from outrider.trajectory import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


def test_packing_keeps_ids_and_logprobs_exactly() -> None:
    ids, logprobs = [0, 1, 2**31 - 1], [-0.1, -1e-300, 0.0, float(-(10**9)) / 7]
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_logprobs(pack_logprobs(logprobs)).tolist() == logprobs
