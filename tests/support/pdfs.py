"""PDF documents for tests, written by hand."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any


def pdf(pages: Sequence[str], *, size: tuple[float, float] = (300, 200), shift: int = 0) -> bytes:
    """Return a PDF with a line of text on each page. `shift` moves the lines, so the same texts can make different
    files."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 18 Tf 20 {100 + shift} Td ({text}) Tj ET".encode() if text else b""
        content = zlib.compress(drawn)
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size[0]:g} {size[1]:g}] /Contents {5 + 2 * number} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>".encode(),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content),
        ]
    return written(objects)


def written(objects: Sequence[bytes]) -> bytes:
    """Return a PDF of these objects, which are numbered from 1. The first object is the catalogue."""
    file = b"%PDF-1.7\n"
    places = []
    for number, item in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return file + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, table, len(objects) + 1, len(file))
    )


def drawn_for_ever(commands: int) -> bytes:
    """Return a PDF of a few kilobytes with one page. The page has `commands` large transparent figures, which take
    minutes to draw."""
    figure = b"/G gs 0 0 14000 14000 re f 0 0 m 14000 9000 100 9000 9000 100 c 10 14000 l f\n"
    content = zlib.compress(figure * commands, 9)
    return written(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 14000 14000] /Contents 4 0 R /Resources << /ExtGState"
            b" << /G << /ca 0.5 /BM /Luminosity >> >> >> >>",
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content),
        ]
    )


def block(dialect: str, data: bytes) -> dict[str, Any]:
    """Return a document as a part of a message or tool result of the dialect."""
    encoded = base64.b64encode(data).decode()
    url = f"data:application/pdf;base64,{encoded}"
    match dialect:
        case "chat":
            return {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
        case "responses":
            return {"type": "input_file", "filename": "a.pdf", "file_data": url}
        case "messages":
            return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": encoded}}
        case _:
            return {"inlineData": {"mimeType": "application/pdf", "data": encoded}}
