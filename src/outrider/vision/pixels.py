"""Decodes images, and divides them into patches for models of the Qwen-VL families.

The module needs Pillow (the extra `images`). The results equal those of the image processor in `transformers` (a test
compares them). As in vLLM, transparent pixels become white, and images are rotated according to their EXIF orientation.
Invariant: the number of patches depends only on the settings and on the size of the rotated image
(`ImageSettings.size_of`).
"""

from __future__ import annotations

import base64
import io
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.tokens.rendering.image_grids import Grid, ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The accepted image formats. Other formats are refused, because an agent's file may exploit a bug in any decoder."""
MAX_PIXELS = 50_000_000
"""Maximum number of pixels of an image before it is scaled. A file of a few kilobytes may decode to billions of
pixels."""
RAW_VIEW = 3
"""The number of the MessagePack extension type that vLLM uses for the bytes of a tensor."""


class UnreadableImage(Exception):
    """Raised if an image cannot be decoded or is too large. The error message contains the reason."""


class Pixels(msgspec.Struct, frozen=True):
    """The patches of an image before normalisation. `levels` contains colour values from 0 to 255, in the shape
    (patches, colours x frames x patch x patch)."""

    grid: Grid
    levels: npt.NDArray[np.uint8]

    def values(self, settings: ImageSettings) -> npt.NDArray[np.float32]:
        """Return the normalised pixel values that are the model's input, in the same shape as `levels`."""
        per_colour = self.levels.reshape(len(self.levels), 3, -1) / np.float64(255)
        mean, std = (np.asarray(colours).reshape(1, 3, 1) for colours in (settings.mean, settings.std))
        normalised: npt.NDArray[np.float32] = ((per_colour - mean) / std).astype(np.float32)
        return normalised.reshape(self.levels.shape)


def decoded(data: bytes) -> Picture:
    """Decode an image to RGB. Only the first frame of an animation is decoded. Raises UnreadableImage."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise UnreadableImage(f"the image has {width}x{height} pixels, more than {MAX_PIXELS:,}")
                image.load()
                with suppress(Exception):  # an image with damaged EXIF data is not rotated, as in vLLM
                    ImageOps.exif_transpose(image, in_place=True)
                if image.mode == "RGB" and "transparency" not in image.info:
                    return image.copy()
                shown = image.convert("RGBA")
                white = Image.new("RGBA", shown.size, (255, 255, 255, 255))
                return Image.alpha_composite(white, shown).convert("RGB")
        except UnidentifiedImageError as error:
            raise UnreadableImage(f"the image is none of {', '.join(FORMATS)}") from error
        # Pillow's decoders raise many types of errors for damaged files.
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise UnreadableImage(f"the image cannot be decoded: {str(error)[:200]}") from error
        except MemoryError as error:
            raise UnreadableImage("the image takes too much memory") from error


def scaled(data: bytes, settings: ImageSettings) -> Picture:
    """Decode an image and scale it to the size that the model reads. Raises UnreadableImage."""
    from PIL import Image

    image = decoded(data)
    try:
        size = settings.size_of(*image.size)
    except ValueError as error:
        raise UnreadableImage(str(error)) from error
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def pixels_of(data: bytes, settings: ImageSettings) -> Pixels:
    """Return the patches of an image. Raises UnreadableImage."""
    image = scaled(data, settings)
    patch, merge = settings.patch, settings.merge
    rows, columns = image.height // patch, image.width // patch
    # The shape is (height, width, colour).
    levels = np.asarray(image)
    # Patches that the model merges into one token become neighbours.
    parts = levels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(parts[:, :, :, :, :, None], settings.frames, axis=5)
    return Pixels((1, rows, columns), np.ascontiguousarray(repeated.reshape(rows * columns, -1)))


def png_item(data: bytes, settings: ImageSettings) -> tuple[Grid, bytes]:
    """Return the size of an image in patches, and a PNG of the scaled image in base64. Raises UnreadableImage, also if
    a server with the same image settings would scale the PNG again. So the patches that the server makes equal those of
    `pixels_of`."""
    image = scaled(data, settings)
    try:
        again = settings.size_of(*image.size)
    except ValueError as error:
        raise UnreadableImage(str(error)) from error
    if again != image.size:
        raise UnreadableImage("the image is too narrow: the engine would scale it again")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return (1, image.height // settings.patch, image.width // settings.patch), base64.b64encode(file.getvalue())


def vllm_item(pixels: Pixels) -> bytes:
    """Return an image in the format of vLLM's `features.kwargs_data`: a `MultiModalKwargsItem` in base64. The colour
    values are not normalised. vLLM normalises them itself (`--mm-device-do-normalize`, the default since 0.32)."""
    levels = pixels.levels
    grid = np.asarray(pixels.grid, dtype=np.int64)
    item = {
        "pixel_values": {
            "data": _tensor("uint8", levels),
            "field": ("flat", {"slices": [[(0, len(levels), None)]], "dim": 0, "keep_on_cpu": False}),
        },
        "image_grid_thw": {"data": _tensor("int64", grid), "field": ("batched", {"keep_on_cpu": True})},
    }
    return base64.b64encode(msgspec.msgpack.encode(item))


def _tensor(kind: str, values: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    return kind, values.shape, msgspec.msgpack.Ext(RAW_VIEW, values.tobytes())
