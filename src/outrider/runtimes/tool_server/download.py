"""An archive that a tool server sends in parts, written into a file of the host.

It does not know what is in it. Invariants: at most about BACKLOG bytes wait to be written, however slow the disk is,
because nothing more is read from the server meanwhile; and where the whole of it is not written, there is no file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from outrider.concurrency.cancellation import opened, shielded
from outrider.errors import RuntimeFailure
from outrider.runtimes.tool_server.client import Done, ToolClient

BACKLOG = 4 << 20
SAVE_SECONDS = 600.0


async def save_parts(tools: ToolClient, method: str, args: Mapping[str, Any], target: Path, *, limit: int) -> None:
    """Call, and write what it answers with into a new file that only this user can read. Raises OSError when there can
    be no such file, RuntimeFailure when the server has more than `limit` bytes or else fails, and when the file cannot
    be written."""
    whole = False
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    async with opened(partial(os.open, target, flags, 0o600), lambda fd: finish(fd, target, whole)) as fd:
        saving = Saving(tools, fd)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(saving.call(method, {**args, "limit": limit}, limit))
            group.create_task(saving.write(call))
        if isinstance(saving.fault, OSError):
            raise RuntimeFailure(
                f"the node cannot write {target}: {saving.fault.strerror or saving.fault}",
                hint="the disk of the node's own folder needs room for what is carried out of sandboxes",
            ) from saving.fault
        if saving.fault is not None:
            raise saving.fault
        whole = True


class Saving:
    """What has come and is not written yet, and what went wrong."""

    def __init__(self, tools: ToolClient, fd: int) -> None:
        self.fault: Exception | None = None
        self._tools = tools
        self._fd = fd
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._dropped = False
        self._some = asyncio.Event()

    async def call(self, method: str, args: Mapping[str, Any], room: int) -> None:
        try:
            await self._tools.call(method, args, Done, seconds=SAVE_SECONDS, on_part=self._keep, room=room)
        except OSError as error:
            self.fault = RuntimeFailure(f"cannot {method} in the sandbox: {error}", inside=True)
        except RuntimeFailure as error:
            self.fault = error
        finally:
            self._ended = True
            self._some.set()

    def _keep(self, data: bytes) -> None:
        if self._dropped:
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > BACKLOG:
            self._tools.hold()
        self._some.set()

    async def write(self, call: asyncio.Task[None]) -> None:
        """Until the call has ended; it is cancelled when nothing can be written."""
        try:
            while self._pieces or not self._ended:
                await self._some.wait()
                self._some.clear()
                await shielded(self._put)
                if self.fault is not None:
                    break
        finally:
            self._dropped = True
            self._tools.release()
            call.cancel()

    async def _put(self) -> None:
        """Not to be left before the thread has: it has the descriptor."""
        pieces, self._pieces, self._size = self._pieces, [], 0
        try:
            await asyncio.to_thread(write_all, self._fd, pieces)
            self._tools.release()
        except OSError as error:
            self.fault = error


def write_all(fd: int, pieces: list[bytes]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


def finish(fd: int, target: Path, whole: bool) -> None:
    os.close(fd)
    if not whole:
        target.unlink(missing_ok=True)
