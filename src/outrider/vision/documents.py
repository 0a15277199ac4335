"""Reads the pages of a PDF document as texts or as pictures.

The module needs pypdfium2 (the extra `documents`), and also Pillow for pictures. PDFium is native code, and the bytes
of a document come from an agent. So documents are read only in the confined process (`worker.py`). Invariant: the pages
depend only on the document's bytes, the image settings and the version of pypdfium2.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import msgspec

from outrider.tokens.rendering.image_grids import ImageSettings

if TYPE_CHECKING:
    import pypdfium2

MAX_BYTES = 32 << 20
MAX_PAGES = 100
"""Maximum size of a document, in bytes and in pages. Anthropic's API has the same limits."""
MAX_TEXT = 2_000_000
"""Maximum number of characters on all pages of a document together."""
MAX_PICTURES = 256 << 20
"""Maximum number of bytes of the pictures of all pages together."""
DOTS_PER_POINT = 200 / 72
"""Resolution of a page's picture: 200 dots per inch. Large pages have a lower resolution, because the model limits the
number of pixels of an image."""
UNPRINTABLE = {code: None for code in range(32) if chr(code) not in "\n\t"} | {0xFFFE: None, 0xFFFF: None}
"""Characters that are removed from a page's text. PDFium inserts some of them, such as U+0002 for a hyphen at the end
of a line."""


class UnreadableDocument(Exception):
    """Raised if a document cannot be read or is too large. The error message contains the reason."""


class Pages(msgspec.Struct, frozen=True):
    """The pages of a document, either as texts or as pictures (PNG)."""

    texts: list[str] = []
    pictures: list[bytes] = []


def pages_of(data: bytes, settings: ImageSettings | None) -> Pages:
    """Return the pages of a document: as pictures for a model with the image settings `settings`, or as texts if
    `settings` is None. Raises UnreadableDocument."""
    import pypdfium2

    if len(data) > MAX_BYTES:
        raise UnreadableDocument(f"the document has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        with pypdfium2.PdfDocument(data) as document:
            count = len(document)
            if not 0 < count <= MAX_PAGES:
                raise UnreadableDocument(f"the document has {count} pages: 1 to {MAX_PAGES} are read")
            if settings is None:
                return Pages(texts=_texts(document))
            return Pages(pictures=_pictures(document, settings))
    except pypdfium2.PdfiumError as error:
        raise UnreadableDocument(f"the document cannot be read: {str(error)[:200]}") from error
    except MemoryError as error:
        raise UnreadableDocument("the document takes too much memory") from error


def _texts(document: pypdfium2.PdfDocument) -> list[str]:
    texts = []
    for page in document:
        text = page.get_textpage().get_text_bounded().replace("\r\n", "\n").replace("\r", "\n")
        texts.append(text.encode("utf-8", "replace").decode().translate(UNPRINTABLE).strip())
        page.close()
        if sum(map(len, texts)) > MAX_TEXT:
            raise UnreadableDocument(f"the document has more than {MAX_TEXT:,} characters of text")
    if not any(texts):
        raise UnreadableDocument("the document has no text, as a scan has none, and this model reads no images")
    return texts


def _pictures(document: pypdfium2.PdfDocument, settings: ImageSettings) -> list[bytes]:
    pictures = []
    for page in document:
        width, height = page.get_size()
        if not (0 < width < math.inf and 0 < height < math.inf):
            raise UnreadableDocument(f"a page of the document is {width:g} by {height:g} points large")
        scale = min(DOTS_PER_POINT, math.sqrt(settings.most / (width * height)))
        try:
            settings.size_of(max(1, round(width * scale)), max(1, round(height * scale)))
        except ValueError as error:
            raise UnreadableDocument(f"a page of the document cannot be shown: {error}") from error
        file = io.BytesIO()
        page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB").save(file, "PNG", compress_level=1)
        page.close()
        pictures.append(file.getvalue())
        if sum(map(len, pictures)) > MAX_PICTURES:
            raise UnreadableDocument(f"the pictures of the document's pages have more than {MAX_PICTURES >> 20} MiB")
    return pictures
