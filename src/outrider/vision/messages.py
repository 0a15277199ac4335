"""The messages exchanged with the process that decodes images and reads documents (`worker.py`).

Each message is sent as its length (8 bytes, little-endian), followed by MessagePack.
"""

from __future__ import annotations

import msgspec

from outrider.tokens.rendering.image_grids import Grid, ImageForm, ImageSettings
from outrider.vision.documents import Pages

LENGTH = 8
"""Number of bytes that hold the length of a message."""


class ImageRequest(msgspec.Struct, frozen=True, tag="image"):
    """An image. `cpu_seconds` is the maximum processor time for it, in seconds."""

    data: bytes
    settings: ImageSettings
    form: ImageForm
    cpu_seconds: float


class DocumentRequest(msgspec.Struct, frozen=True, tag="document"):
    """A PDF document. If `settings` is None, the document's pages are returned as texts. Otherwise they are returned as
    pictures for a model with these image settings. `cpu_seconds` is the maximum processor time, in seconds."""

    data: bytes
    settings: ImageSettings | None
    cpu_seconds: float


class DocumentAnswer(msgspec.Struct, frozen=True):
    """The pages of a document, or the reason (`fault`) why it cannot be read."""

    pages: Pages | None = None
    fault: str = ""


class ImageAnswer(msgspec.Struct, frozen=True):
    """An image in the requested format (patches or PNG), and its size in patches (`grid`). `fault` is the reason if the
    image cannot be read."""

    grid: Grid | None = None
    item: bytes = b""
    fault: str = ""
