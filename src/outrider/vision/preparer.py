"""Has images decoded in a separate process, and keeps the results of recent images.

Invariants: an image is decoded by a confined process and never here; a failure of the process that the image did not
cause is a ServiceError, and no fault of the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.turns import Turns
from outrider.environment import install_command
from outrider.errors import ServiceError
from outrider.messages import Image
from outrider.tokens.rendering.image_grids import Grid, ImageForm, ImageSettings

if TYPE_CHECKING:
    from asyncio.subprocess import Process

KEPT_BYTES = 512 << 20
"""Maximum bytes of results that are kept. The image of a dropped result is decoded again."""
IMAGE_SECONDS = 60.0
"""Seconds after which the process is restarted. An image has at most 10 s of processor time (`worker.py`), so a longer
time is the fault of the machine and not of the image."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
MAX_ANSWER = 1 << 30
LENGTH = 8
ITEM_HEAD = 512
"""Maximum bytes of an item besides its pixel values."""
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
"""Program of the process. Empty modules replace the parent packages, because the real packages import many modules that
decoding does not need."""


class PreparedImage(msgspec.Struct, frozen=True):
    """`item` is the image in the requested form, in base64."""

    grid: Grid
    item: bytes


class UnreadImage(msgspec.Struct, frozen=True):
    """An image that cannot be decoded. `fault` is the reason."""

    fault: str


class _Request(msgspec.Struct, frozen=True):
    data: bytes
    settings: ImageSettings
    form: ImageForm


class _Answer(msgspec.Struct, frozen=True):
    grid: Grid | None = None
    item: bytes = b""
    fault: str = ""


class ImagePreparer:
    """Decodes the images for one model. The first image starts the process; `close` ends it."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._kept: OrderedDict[tuple[str, ImageForm], PreparedImage] = OrderedDict()
        self._bytes = 0
        self._process: Process | None = None
        self._turns = Turns(1)

    async def close(self) -> None:
        async with self._turns.take(""):
            await self._end()

    @property
    def process_id(self) -> int | None:
        """The id of the process that decodes, None while there is none."""
        return None if self._process is None else self._process.pid

    def kept(self, digest: str, form: ImageForm) -> PreparedImage | None:
        """Return the result for an image if it is kept."""
        return self._kept.get((digest, form))

    async def prepare(
        self, image: Image, form: ImageForm = ImageForm.PATCHES, owner: str = ""
    ) -> PreparedImage | UnreadImage:
        """Return the image as the model reads it. Owners (sessions) take turns. Raises ServiceError if the process
        fails."""
        key = image.digest, form
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        async with self._turns.take(owner):
            if (known := self._kept.get(key)) is not None:
                return known
            answer = await shielded(lambda: self._ask(image.data, form))
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

    async def _ask(self, data: bytes, form: ImageForm) -> _Answer:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        body = await asyncio.to_thread(msgspec.msgpack.encode, _Request(data, self.settings, form))
        try:
            async with asyncio.timeout(IMAGE_SECONDS):
                process.stdin.write(len(body).to_bytes(LENGTH, "little"))
                process.stdin.write(body)
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
                if length > MAX_ANSWER:
                    raise ConnectionError("its answer is too long")
                answer = await process.stdout.readexactly(length)
            return await asyncio.to_thread(msgspec.msgpack.decode, answer, type=_Answer)
        except TimeoutError as error:
            await self._end()
            raise ServiceError(f"an image was not decoded within {IMAGE_SECONDS:g} s") from error
        except (OSError, EOFError, msgspec.DecodeError) as error:
            status = await self._end()
            if -status == signal.SIGPROF:
                return _Answer(fault="the image takes too long to decode")
            if -status in CRASHES:  # the image is the cause, because the same process has decoded others
                return _Answer(fault=f"the image makes its decoder crash ({signal.Signals(-status).name})")
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
        """End the process, if there is one. Returns its status."""
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


def item_size(settings: ImageSettings, grid: Grid) -> int:
    """Return about how many bytes the `item` of an image has at most, from its grid. Patches have this number, and a
    PNG has no more than the half."""
    return settings.values_of(grid) * 4 // 3 + ITEM_HEAD


def has_pillow() -> bool:
    """Return whether Pillow is installed. Pillow is not imported."""
    return find_spec("PIL") is not None
