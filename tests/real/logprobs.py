"""The log-probabilities that a trainer would compute, with Hugging Face transformers in float32, for the recorded ids.

The computation shares no code with Outrider or with an engine. Log-probabilities are natural logarithms, before
temperature: `log_softmax(logits)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.trajectory import LogprobKind, Sample
from support.later import torch

Span = tuple[int, int]


def recompute(model_folder: Path, ids: Sequence[int], spans: Sequence[Span]) -> list[float]:
    """Return the log-probability of the id at each position of the half-open `spans`, given all ids before it.

    Raises ValueError for a span that is empty, reaches outside `ids`, or contains position 0, which has no prefix.
    """
    for start, end in spans:
        if not 0 < start < end <= len(ids):
            raise ValueError(f"span [{start}, {end}) of {len(ids)} ids")
    with torch.inference_mode():
        row = torch.tensor([list(ids)])
        logits = _model(model_folder)(input_ids=row, use_cache=False).logits[0, :-1]
        found = torch.log_softmax(logits.float(), dim=-1).gather(-1, row[0, 1:, None])[:, 0]
    return [value for start, end in spans for value in found[start - 1 : end - 1].tolist()]


def assert_agrees(samples: Iterable[Sample], model_folder: Path, tolerance: float = 1e-4) -> float:
    """Check that the recorded log-probability of every trained position equals the recomputed one, within `tolerance`.

    Also fails if there is nothing to compare, or if the columns of a sample differ in length. Returns the largest
    difference.
    """
    largest, compared = 0.0, 0
    for sample in samples:
        where = f"session {sample.session_id} row {sample.row}"
        assert sample.logprob_kind is LogprobKind.RAW, f"{where}: log-probabilities are {sample.logprob_kind}"
        lengths = {len(sample.ids), len(sample.loss_mask), len(sample.logprobs), len(sample.versions)}
        assert len(lengths) == 1, f"{where}: ids, mask, log-probabilities and versions differ in length"
        trained = [position for position, mask in enumerate(sample.loss_mask) if mask]
        expected = recompute(model_folder, sample.ids.tolist(), [(position, position + 1) for position in trained])
        for position, value in zip(trained, expected, strict=True):
            gap = abs(sample.logprobs[position] - value)
            assert gap <= tolerance, (
                f"{where} position {position} id {sample.ids[position]}: recorded "
                f"{sample.logprobs[position]:.6f}, recomputed {value:.6f}"
            )
            largest = max(largest, gap)
        compared += len(trained)
    assert compared, "no trained position in any sample: nothing was compared"
    return largest


@lru_cache(maxsize=2)
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
