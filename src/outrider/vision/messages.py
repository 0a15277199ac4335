"""The messages to and from the process that decodes images and reads documents (`worker.py`).

Each message has a length (8 bytes, little-endian), then MessagePack.
"""

from __future__ import annotations

import msgspec

from outrider.tokens.rendering.image_grids import Grid, ImageForm, ImageSettings
from outrider.vision.documents import Pages

LENGTH = 8
"""Number of bytes in which a message's length is written."""


class ImageRequest(msgspec.Struct, frozen=True, tag="image"):
    data: bytes
    settings: ImageSettings
    form: ImageForm


class DocumentRequest(msgspec.Struct, frozen=True, tag="document"):
    """A PDF. Its pages are read as pictures if the model reads images with `settings`, and otherwise as texts."""

    data: bytes
    settings: ImageSettings | None


class DocumentAnswer(msgspec.Struct, frozen=True):
    """The pages of a document, or the reason why it cannot be read."""

    pages: Pages | None = None
    fault: str = ""


class ImageAnswer(msgspec.Struct, frozen=True):
    """The image in the requested form and its grid, or the reason why the image cannot be read."""

    grid: Grid | None = None
    item: bytes = b""
    fault: str = ""
