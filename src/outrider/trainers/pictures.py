"""Converts the images of a training row to pixel values for a trainer's model. Also finds where a row must be cut so
that the model can read it.

Pillow and torch are imported only when pixel values are made. Invariant: an image's pixel values have as many patches
as the engine used, so they fit the image's placeholder tokens in the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidField, ServiceError
from outrider.tokens.rendering.image_grids import Grid
from outrider.trainers.trajectories import TrainingRow


@dataclass(frozen=True)
class TrainerImage:
    """An image for a trainer's model. `picture` is the scaled image as a Pillow image. `inputs` is the output of the
    trainer's image processor, with the tensors `pixel_values` and `image_grid_thw`."""

    picture: Any
    inputs: Mapping[str, Any]


def image_in_grid(data: bytes, grid: Grid | None, image_processor: Any, *, trainer: str, field: str) -> TrainerImage:
    """Decode an image, scale it to `grid` (in patches), and run the trainer's image processor on it. Raises
    InvalidField, naming `field`, if the processor returns another grid. Raises ServiceError if the data cannot be
    decoded."""
    from PIL.Image import Resampling

    from outrider.vision.pixels import UnreadableImage, decoded

    assert grid is not None  # `readable_end` refuses images without a grid
    patch = int(image_processor.patch_size)
    try:
        picture = decoded(data)
    except UnreadableImage as error:
        raise ServiceError(f"an image of a row cannot be decoded: {error}") from error
    size = (grid[2] * patch, grid[1] * patch)
    if picture.size != size:
        picture = picture.resize(size, Resampling.BICUBIC)
    inputs = image_processor(images=[picture], return_tensors="pt")
    made = inputs["image_grid_thw"].tolist()
    if made != [list(grid)]:
        raise InvalidField(
            f"the engine has read an image as the grid {list(grid)}, and {trainer}'s processor makes {made[0]} of it",
            field=field,
            hint=f"use the same preprocessor_config.json in the service's and {trainer}'s folder of the model",
        )
    return TrainerImage(picture, inputs)


def readable_end(row: TrainingRow, end: int, media_ids: frozenset[int]) -> int:
    """Return the position at which to cut a row so that the model can read the row. This is the position of the first
    placeholder token before `end` that does not belong to a whole image, or `end` if there is no such token.

    The model would raise an error for such a placeholder. A row has such a placeholder if the model itself sampled the
    token, or if `end` is inside an image. Raises InvalidField if the engine did not report an image's position or
    grid."""
    images = row.sample.images
    if any(image.span is None or image.grid is None for image in images):
        raise InvalidField(
            f"session {row.sample.session_id} has an image whose place and grid the engine did not report",
            field="task",
            hint="use an engine of kind vllm or sglang, or tasks without images",
        )
    whole = {at for image in images if image.span and image.span[1] <= end for at in range(*image.span)}
    strays = (at for at, token in enumerate(row.ids[:end]) if token in media_ids and at not in whole)
    return next(strays, end)
