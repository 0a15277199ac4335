"""Holds training rows against what the engine was really asked and really sampled.

Pure, and independent of how rows are made. Invariant: no fault means that every trained id stands in a row whose
ids before it are, one by one, those that the engine was given when it sampled it, with its own log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.certify.actor import Call
from outrider.testing.scripted_engine import scripted_logprob
from outrider.trajectory import Ids, Sample


def faults(samples: Sequence[Sample], calls: Sequence[Call]) -> list[str]:
    """What is wrong with the rows of one session, in words. `calls` are all its generations."""
    return [fault for sample in samples for fault in _row_faults(sample, calls)]


def _row_faults(sample: Sample, calls: Sequence[Call]) -> list[str]:
    ids: Ids = np.asarray(sample.ids, dtype=np.int32)
    mask = np.asarray(sample.loss_mask, dtype=bool)
    named = f"row {sample.row} ({sample.kind.value})"
    proved = np.zeros(len(ids), dtype=bool)
    for call in calls:
        start, end = len(call.prompt), len(call.prompt) + len(call.output)
        if np.array_equal(ids[:end], np.concatenate([call.prompt, np.asarray(call.output, dtype=np.int32)])):
            proved[start:end] = True
    found = []
    if unproved := int((mask & ~proved).sum()):
        found.append(f"{named} trains on {unproved} ids that the engine did not sample after the ids before them")
    wrong = sum(sample.logprobs[at] != scripted_logprob(int(at), sample.ids[at]) for at in np.flatnonzero(mask))
    if wrong:
        found.append(f"{named} has {wrong} log-probabilities that are not the engine's")
    return found
