"""The messages to and from the process that decodes images and reads documents (`worker.py`).

Each message has a length (8 bytes, little-endian), then MessagePack.
"""

from __future__ import annotations

import msgspec

from outrider.tokens.rendering.image_grids import Grid, ImageForm, ImageSettings
from outrider.vision.documents import Pages

LENGTH = 8
"""Number of bytes of the length before each message."""


class ImageRequest(msgspec.Struct, frozen=True, tag="image"):
    data: bytes
    settings: ImageSettings
    form: ImageForm


class DocumentRequest(msgspec.Struct, frozen=True, tag="document"):
    """A PDF. Its pages are read as pictures for a model with these image settings, or as texts if `settings` is
    None."""

    data: bytes
    settings: ImageSettings | None


class DocumentAnswer(msgspec.Struct, frozen=True):
    """The pages of a document, or the reason why it cannot be read."""

    pages: Pages | None = None
    fault: str = ""


class ImageAnswer(msgspec.Struct, frozen=True):
    """The image in the requested form (patches or PNG) and its grid. If the image cannot be read, `fault` is the
    reason."""

    grid: Grid | None = None
    item: bytes = b""
    fault: str = ""
