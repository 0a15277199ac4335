"""The pages of PDF documents, and the process that reads them."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from PIL import Image

from outrider.errors import ServiceError
from outrider.media import document
from outrider.messages import DocumentPages
from outrider.tokens.rendering.image_grids import ImageSettings
from outrider.vision.preparer import DecodingProcess, DocumentReader
from support.pdfs import drawn_for_ever, pdf, written

pytest.importorskip("pypdfium2")
SETTINGS = ImageSettings(
    patch=16, merge=2, frames=2, least=4096, most=262144, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2)
)
LOOP = written([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 >>"])
ENCRYPTED = pdf(["x"]).replace(
    b"/Root 1 0 R",
    b"/Root 1 0 R /ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>"
    % (b"00" * 32, b"11" * 32),
)


@asynccontextmanager
async def a_reader(
    process: DecodingProcess | None = None, **options: Any
) -> AsyncIterator[tuple[DocumentReader, DecodingProcess]]:
    process = process or DecodingProcess()
    try:
        yield DocumentReader(SETTINGS, process, **options), process
    finally:
        await process.close()


async def read(reader: DocumentReader, data: bytes, *, pictures: bool = False) -> DocumentPages | str:
    shown = document(data, "field", "reason")
    await reader.read(shown, pictures=pictures)
    pages = reader.pages(shown.digest, pictures=pictures)
    assert pages is not None
    return pages


async def test_pages_are_texts_or_pictures_and_the_same_in_every_process() -> None:
    data = pdf(["Hello world", "", "the end"])
    found = []
    for _ in range(2):
        async with a_reader() as (reader, _process):
            found.append([await read(reader, data, pictures=pictures) for pictures in (False, True)])
    assert found[0] == found[1]
    texts, pictures = found[0]
    assert texts == DocumentPages(("Hello world", "", "the end"))
    assert isinstance(pictures, DocumentPages)
    assert [page[:4] for page in pictures.pages] == [b"\x89PNG"] * 3
    assert len(set(pictures.pages)) == 3


@pytest.mark.parametrize(
    ("data", "pictures", "reason"),
    [
        (b"", False, "cannot be read"),
        (b"%PDF-1.7 and so on", True, "cannot be read"),
        (pdf(["x"])[:150], True, "cannot be read"),
        (ENCRYPTED, False, "cannot be read"),
        (LOOP, True, "cannot be read"),
        (pdf(["x"] * 101), False, "101 pages: 1 to 100 are read"),
        (pdf([""]), False, "has no text, as a scan has none"),
        (pdf(["x"], size=(10_000, 10)), True, "at most 200 times as long"),
        (pdf(["x"]) + bytes(32 << 20), False, "more than 33,554,432"),
    ],
)
async def test_documents_that_cannot_be_read_have_a_reason(data: bytes, pictures: bool, reason: str) -> None:
    async with a_reader() as (reader, process):
        fault = await read(reader, data, pictures=pictures)
        assert isinstance(fault, str)
        assert reason in fault
        before = process.id
        assert await read(reader, pdf(["good"])) == DocumentPages(("good",))
        assert process.id == before  # the same process has read both documents


async def test_a_page_of_any_size_has_no_more_pixels_than_an_image() -> None:
    async with a_reader() as (reader, _):
        for size in ((14_000, 14_000), (300, 200), (10, 10)):
            pages = await read(reader, pdf(["x"], size=size), pictures=True)
            assert isinstance(pages, DocumentPages)
            [page] = pages.pages
            assert isinstance(page, bytes)
            width, height = Image.open(io.BytesIO(page)).size
            assert width * height <= SETTINGS.most * 1.02


class CountingProcess(DecodingProcess):
    """Counts the requests."""

    asked = 0

    async def ask(self, *arguments: Any, **named: Any) -> Any:
        self.asked += 1
        return await super().ask(*arguments, **named)


async def test_each_document_is_read_once_and_few_are_kept() -> None:
    process = CountingProcess()
    first, *others = [document(pdf([f"page {number}"]), "field", "reason") for number in range(3)]
    async with a_reader(process, most_kept=2) as (reader, _):
        await asyncio.gather(*(reader.read(first, str(owner), pictures=False) for owner in range(4)))
        assert process.asked == 1
        for other in others:
            await reader.read(other, pictures=False)
        assert reader.pages(first.digest, pictures=False) is None
        assert reader.pages(others[-1].digest, pictures=False) == DocumentPages(("page 2",))
    assert process.asked == 3


async def test_a_killed_process_is_the_services_fault_and_a_crash_is_the_documents() -> None:
    async with a_reader() as (reader, process):
        await read(reader, pdf(["one"]))
        for number, error in ((signal.SIGKILL, ServiceError), (signal.SIGSEGV, None)):
            assert process.id is not None
            os.kill(process.id, number)
            other = pdf(["two"], shift=int(number))
            if error is not None:
                with pytest.raises(error, match="failed"):
                    await read(reader, other)
                assert await read(reader, other) == DocumentPages(("two",))
            else:  # SIGSEGV, as if the document had made PDFium crash
                assert "makes its decoder crash" in str(await read(reader, other))


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_a_document_that_takes_minutes_to_draw_is_given_up() -> None:
    data = drawn_for_ever(3000)
    assert len(data) < 10_000
    async with a_reader(cpu_seconds=1.0) as (reader, _):
        assert await read(reader, data, pictures=True) == "the document takes too long to decode"
        assert await read(reader, pdf(["good"])) == DocumentPages(("good",))
