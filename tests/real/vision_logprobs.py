"""The log-probabilities that a trainer of a vision model would compute, with Hugging Face transformers in float32.

The inputs are a row's ids, and the pixel values that transformers' own image processor makes of the stored images. The
computation shares no code with Outrider or with an engine. Log-probabilities are natural logarithms, before
temperature.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from outrider.trajectory import LogprobKind, Sample
from support.later import torch


def assert_agrees(sample: Sample, images: Mapping[str, bytes], folder: Path, tolerance: float = 1e-4) -> float:
    """Check that the recorded log-probability of every trained position equals the recomputed one, and that the grids
    of the row's images are those of the processor. Returns the largest difference."""
    assert sample.logprob_kind is LogprobKind.RAW
    processor, model = _processor(folder), _model(folder)
    pictures = [Image.open(io.BytesIO(images[image.digest])).convert("RGB") for image in sample.images]
    given: dict[str, Any] = {}
    ids = torch.tensor([sample.ids.tolist()])
    if pictures:
        made = processor(images=pictures, return_tensors="np")
        assert [tuple(grid) for grid in made["image_grid_thw"].tolist()] == [image.grid for image in sample.images]
        given = {name: torch.from_numpy(np.asarray(made[name])) for name in ("pixel_values", "image_grid_thw")}
        kinds = torch.zeros_like(ids)
        kinds[ids == model.config.image_token_id] = 1
        given["mm_token_type_ids"] = kinds
    trained = [at for at, mask in enumerate(sample.loss_mask.tolist()) if mask]
    assert trained, "no trained position: nothing was compared"
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, :-1]
        found = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    gaps = [abs(float(sample.logprobs[at]) - float(found[at - 1])) for at in trained]
    assert max(gaps) <= tolerance, f"largest gap {max(gaps)} at position {trained[int(np.argmax(gaps))]}"
    return max(gaps)


def without_images(sample: Sample, folder: Path) -> Sequence[float]:
    """Return the log-probabilities of the trained positions with black images instead of the row's images."""
    processor, model = _processor(folder), _model(folder)
    ids = torch.tensor([sample.ids.tolist()])
    sizes = [(image.grid[2] * 16, image.grid[1] * 16) for image in sample.images if image.grid is not None]
    made = processor(images=[Image.new("RGB", size) for size in sizes], return_tensors="np")
    kinds = torch.zeros_like(ids)
    kinds[ids == model.config.image_token_id] = 1
    given = {name: torch.from_numpy(np.asarray(made[name])) for name in ("pixel_values", "image_grid_thw")}
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, mm_token_type_ids=kinds, **given).logits[0, :-1]
        found = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    return [float(found[at - 1]) for at, mask in enumerate(sample.loss_mask.tolist()) if mask]


@lru_cache(maxsize=1)
def _processor(folder: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(folder)


@lru_cache(maxsize=1)
def _model(folder: Path) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
