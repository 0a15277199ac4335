"""Computes how a model divides an image into patches, from the image's size and the settings in the model's folder.

The rule is that of the Qwen-VL families. An image is scaled so that its sides are multiples of a merged patch's side,
its number of pixels is between a minimum and a maximum, and its proportions hardly change. Each merged patch becomes
one placeholder token.

The module does not read pixels. Invariant: the grid of patches depends only on the image's size and the settings, so a
prompt's placeholders are known before the image is decoded.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidField

IMAGE_FAMILIES = frozenset({"qwen3-vl", "qwen3.5", "qwen3.6"})
"""Model families whose images can be sent to engines that take token ids. All of them use the same image processor."""
PLACEHOLDER = "<|image_pad|>"
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")
"""Prefixes of the names of image processors that follow the rule of this module."""
MAX_PROPORTION = 200
"""Maximum ratio of an image's longer side to its shorter side."""

Grid = tuple[int, int, int]
"""The number of an image's patches in three dimensions: time (always 1), height and width."""


class ImageForm(StrEnum):
    """The format in which an engine takes the images of a prompt that consists of ids."""

    PATCHES = "patches"
    """The image's patches, in the format of vLLM's features: a `MultiModalKwargsItem` in base64."""
    PNG = "png"
    """The scaled image as a PNG, in base64. The server does not scale the image again, and divides it into the same
    patches as this module."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model's image processor.

    patch: the side of a patch, in pixels.
    merge: `merge` x `merge` patches become one token.
    frames: how many times a patch of a still image is repeated.
    least, most: the minimum and maximum number of pixels of the scaled image.
    mean, std: a number for each of the three colours, for normalising values from 0 to 1."""

    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is scaled. Raises ValueError if the image is too long and
        narrow."""
        if max(width, height) > MAX_PROPORTION * min(width, height):
            raise ValueError(f"an image may be at most {MAX_PROPORTION} times as long as it is wide")
        unit = self.patch * self.merge
        scaled_width, scaled_height = round(width / unit) * unit, round(height / unit) * unit
        if scaled_width * scaled_height > self.most:
            ratio = math.sqrt(width * height / self.most)
            scaled_width = max(unit, math.floor(width / ratio / unit) * unit)
            scaled_height = max(unit, math.floor(height / ratio / unit) * unit)
        elif scaled_width * scaled_height < self.least:
            ratio = math.sqrt(self.least / (width * height))
            scaled_width = math.ceil(width * ratio / unit) * unit
            scaled_height = math.ceil(height * ratio / unit) * unit
        return scaled_width, scaled_height

    def values_of(self, grid: Grid) -> int:
        """Return the number of pixel values in all patches of an image. Each value is one byte before it is
        normalised."""
        return math.prod(grid) * 3 * self.frames * self.patch**2

    def tokens_of(self, grid: Grid) -> int:
        """Return the number of placeholder tokens for an image."""
        return math.prod(grid) // self.merge**2


def read_image_settings(folder: Path, family: str, tokens: int) -> ImageSettings | None:
    """Return the image settings of a model, limited to `tokens` tokens for each image. Returns None if the family or
    the model does not support images, or if `tokens` is 0. Raises InvalidField if this module does not support the
    model's settings."""
    found = _settings(folder) if tokens and family in IMAGE_FAMILIES else None
    if found is None:
        return None
    kind = str(found.get("image_processor_type", PROCESSORS[0]))
    changed = [name for name in ("do_resize", "do_rescale", "do_normalize") if found.get(name, True) is not True]
    if not kind.startswith(PROCESSORS) or changed or found.get("resample", 3) != 3:
        raise InvalidField(
            f"the image processor in {folder} ({kind}) is not one of the Qwen-VL families'",
            field="model.image_tokens",
            hint="0 serves the model without images",
        )
    size = found.get("size") or {}
    try:
        patch, merge = int(found.get("patch_size", 14)), int(found.get("merge_size", 2))
        settings = ImageSettings(
            patch=patch,
            merge=merge,
            frames=int(found.get("temporal_patch_size", 2)),
            least=int(found.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
            most=int(found.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
            mean=_colours(found.get("image_mean", (0.48145466, 0.4578275, 0.40821073))),
            std=_colours(found.get("image_std", (0.26862954, 0.26130258, 0.27577711))),
        )
        if min(patch, merge, settings.frames, settings.least, *settings.std) <= 0:
            raise ValueError("a number must be positive")
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidField(
            f"the image processor in {folder} cannot be read: {error}",
            field="model.image_tokens",
            hint="0 serves the model without images",
        ) from error
    most = min(settings.most, tokens * (patch * merge) ** 2)
    return msgspec.structs.replace(settings, most=most, least=min(settings.least, most))


def _settings(folder: Path) -> dict[str, Any] | None:
    for name in SETTINGS_FILES:
        try:
            found = json.loads((folder / name).read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InvalidField(f"cannot read {folder / name}: {error}", field="model.image_tokens") from error
        found = found.get("image_processor", found) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    return None


def _colours(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
