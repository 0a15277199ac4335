"""Decodes images and reads documents in a separate process, and caches the results.

Invariants: files are decoded only in the separate process, which is confined. If that process fails and the file is not
the cause, the error is a ServiceError. A ServiceError does not count against the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.turns import Turns
from outrider.environment import install_command
from outrider.errors import ServiceError
from outrider.messages import Document, DocumentPages, Image
from outrider.tokens.rendering.image_grids import Grid, ImageForm, ImageSettings
from outrider.vision.messages import LENGTH, DocumentAnswer, DocumentRequest, ImageAnswer, ImageRequest

if TYPE_CHECKING:
    from asyncio.subprocess import Process

KEPT_BYTES = 512 << 20
"""Maximum number of bytes of decoded images in the cache. An image that was dropped from the cache is decoded again."""
KEPT_PAGES = 256 << 20
"""Maximum number of bytes of document pages in the cache."""
KEPT_DOCUMENTS = 256
IMAGE_CPU_SECONDS = 10.0
"""Maximum processor time for an image, in seconds. A photograph of MAX_PIXELS pixels takes about one second. But
decoding a JPEG of only 200 KB may take minutes, because the file may scan all pixels thousands of times."""
DOCUMENT_CPU_SECONDS = 20.0
"""Maximum processor time for a document, in seconds. A hundred pages with one line of text each take less than a
second."""
IMAGE_SECONDS = 60.0
"""Maximum seconds for one file. After this time the process is ended, and the next request starts a new one. The
processor time of a file is limited to much less, so only a slow machine causes this timeout."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
MAX_ANSWER = 1 << 30
ITEM_HEAD = 512
"""Maximum number of bytes in `PreparedImage.item` besides the pixel values."""
BOOT = """
import sys, types
root, *paths = sys.argv[1:]
sys.path[:] = paths
packages = ("", ".evaluators", ".sandbox", ".sandbox.runtimes", ".tokens", ".tokens.rendering", ".vision")
for name in ("outrider" + package for package in packages):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + name.replace(".", "/")]
from outrider.vision.worker import main
main()
"""
"""The program that the separate process runs. Empty modules replace the parent packages, which would import many
modules that decoding does not need."""


class PreparedImage(msgspec.Struct, frozen=True):
    """A decoded image. `item` contains its patches or a PNG, in base64."""

    grid: Grid
    item: bytes


class UnreadImage(msgspec.Struct, frozen=True):
    """An image that cannot be decoded. `fault` is the reason."""

    fault: str


AnswerT = TypeVar("AnswerT", ImageAnswer, DocumentAnswer)


class DecodingProcess:
    """Runs the confined process that decodes files. The first request starts the process, and `close` ends it. The
    process handles one request at a time, so call `ask` only inside `async with turns.take(owner)`."""

    def __init__(self) -> None:
        self.turns = Turns(1)
        self._process: Process | None = None

    async def close(self) -> None:
        async with self.turns.take(""):
            await self._end()

    @property
    def id(self) -> int | None:
        """The process id, or None if the process is not running."""
        return None if self._process is None else self._process.pid

    async def ask(
        self, request: msgspec.Struct, answer: type[AnswerT], noun: str, *, seconds: float = IMAGE_SECONDS
    ) -> AnswerT:
        """Send a file to the process, and return its answer. `noun` names the file in error messages, for example "an
        image". Raises ServiceError if the process takes longer than `seconds`, or if the process fails and the file is
        not the cause."""
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        body = await asyncio.to_thread(msgspec.msgpack.encode, request)
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(len(body).to_bytes(LENGTH, "little"))
                process.stdin.write(body)
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
                if length > MAX_ANSWER:
                    raise ConnectionError("its answer is too long")
                content = await process.stdout.readexactly(length)
            return await asyncio.to_thread(msgspec.msgpack.decode, content, type=answer)
        except TimeoutError as error:
            await self._end()
            raise ServiceError(f"{noun} was not decoded within {seconds:g} s") from error
        except (OSError, EOFError, msgspec.DecodeError) as error:
            status = await self._end()
            if -status == signal.SIGPROF:
                return answer(fault=f"the {noun.split()[1]} takes too long to decode")
            if -status in CRASHES:  # the decoder crashed, so the file is the cause
                fault = f"the {noun.split()[1]} makes its decoder crash ({signal.Signals(-status).name})"
                return answer(fault=fault)
            raise ServiceError(
                f"the process that decodes images failed ({status}): {error}",
                hint=f"the machine may be out of memory; images need Pillow: {install_command('images')}",
            ) from error

    async def _start(self) -> Process:
        root = str(Path(__file__).parents[2])
        paths = [path for path in sys.path if os.path.isabs(path)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-c", BOOT, root, *paths),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            limit=1 << 20,
        )
        return self._process

    async def _end(self) -> int:
        """End the process if it is running. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(1.0):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()


class ImagePreparer:
    """Decodes images for one model in the separate process `process`. Each may take `cpu_seconds` of processor time."""

    def __init__(
        self, settings: ImageSettings, process: DecodingProcess, *, cpu_seconds: float = IMAGE_CPU_SECONDS
    ) -> None:
        self.settings = settings
        self.process = process
        self._cpu_seconds = cpu_seconds
        self._kept: OrderedDict[tuple[str, ImageForm], PreparedImage] = OrderedDict()
        self._bytes = 0

    def kept(self, digest: str, form: ImageForm) -> PreparedImage | None:
        """Return the decoded image from the cache, or None."""
        return self._kept.get((digest, form))

    async def prepare(
        self, image: Image, form: ImageForm = ImageForm.PATCHES, owner: str = ""
    ) -> PreparedImage | UnreadImage:
        """Decode an image for the model, or return it from the cache. Owners (sessions) take turns. Raises ServiceError
        if the process fails."""
        key = image.digest, form
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        async with self.process.turns.take(owner):
            if (known := self._kept.get(key)) is not None:
                return known
            request = ImageRequest(image.data, self.settings, form, self._cpu_seconds)
            answer = await shielded(lambda: self.process.ask(request, ImageAnswer, "an image"))
        if answer.grid is None:
            return UnreadImage(answer.fault)
        prepared = PreparedImage(answer.grid, answer.item)
        if key not in self._kept:
            self._kept[key] = prepared
            self._bytes += len(prepared.item)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped.item)
        return prepared


class DocumentReader:
    """Reads PDF documents for one model in the separate process `process`. `settings` are the model's image settings,
    or None if the model does not accept images. The pages of at most `most_kept` documents are in the cache. Each
    document may take `cpu_seconds` of processor time."""

    def __init__(
        self,
        settings: ImageSettings | None,
        process: DecodingProcess,
        *,
        most_kept: int = KEPT_DOCUMENTS,
        cpu_seconds: float = DOCUMENT_CPU_SECONDS,
    ) -> None:
        self._settings = settings
        self._cpu_seconds = cpu_seconds
        self._most_kept = most_kept
        self._process = process
        self._kept: OrderedDict[tuple[str, bool], DocumentPages | str] = OrderedDict()
        self._bytes = 0

    def pages(self, digest: str, *, pictures: bool) -> DocumentPages | str | None:
        """Return a document's pages from the cache, as pictures if `pictures` is True, otherwise as texts. If the
        document cannot be read, returns the reason as a text. If the document is not in the cache, returns None."""
        return self._kept.get((digest, pictures))

    async def read(self, document: Document, owner: str = "", *, pictures: bool) -> None:
        """Read a document into the cache, for `pages` to return. Owners (sessions) take turns. Raises ServiceError if
        the process fails."""
        key = document.digest, pictures
        async with self._process.turns.take(owner):
            if key in self._kept:
                self._kept.move_to_end(key)
                return
            request = DocumentRequest(document.data, self._settings if pictures else None, self._cpu_seconds)
            answer = await shielded(lambda: self._process.ask(request, DocumentAnswer, "a document"))
        found: DocumentPages | str = answer.fault
        if answer.pages is not None:
            found = DocumentPages(tuple(answer.pages.pictures or answer.pages.texts))
        self._kept[key] = found
        self._bytes += _size(found)
        while len(self._kept) > 1 and (self._bytes > KEPT_PAGES or len(self._kept) > self._most_kept):
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(found: DocumentPages | str) -> int:
    return sum(map(len, found.pages)) if isinstance(found, DocumentPages) else len(found)


def item_size(settings: ImageSettings, grid: Grid) -> int:
    """Estimate the maximum size of an image's `item` in bytes, from the image's number of patches. An item of patches
    has this size; a PNG is at most about half as large."""
    return settings.values_of(grid) * 4 // 3 + ITEM_HEAD


def has_pillow() -> bool:
    """Return True if Pillow is installed, without importing it."""
    return find_spec("PIL") is not None


def has_pdfium() -> bool:
    """Return True if pypdfium2 is installed, without importing it."""
    return find_spec("pypdfium2") is not None
