"""Makes samples from columns of their tokens, which are lists of equal length."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.trajectory import JsonSample, Sample, sample_json


def make_sample(**fields: Any) -> Sample:
    return JsonSample(**fields).sample()


def changed_sample(sample: Sample, **changes: Any) -> Sample:
    """Return a copy of a sample. `changes` may name its columns, such as `ids` and `loss_mask`."""
    return msgspec.structs.replace(msgspec.json.decode(sample_json(sample), type=JsonSample), **changes).sample()
