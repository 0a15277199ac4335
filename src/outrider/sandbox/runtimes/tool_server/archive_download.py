"""Downloads an archive into a file on the host. A tool server sends the archive in parts.

This module does not look into the archive. Invariants: if the disk is slow, little more than BACKLOG bytes wait to be
written, because reading from the server pauses above BACKLOG. After a download, the file exists only if it has the
whole archive.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.tool_server.client import Done, ToolClient

BACKLOG = 4 << 20
SAVE_SECONDS = 600.0


async def download_archive(
    tools: ToolClient, method: str, args: Mapping[str, Any], target: Path, *, limit: int
) -> None:
    """Call `method`, and write the parts of its reply into the new file `target`. Only this user can read the file.

    Raises OSError if `target` cannot be created. Raises RuntimeFailure if the server fails or sends more than `limit`
    bytes, or if the file cannot be written."""
    whole = False

    def finish(fd: int) -> None:
        os.close(fd)
        if not whole:
            target.unlink(missing_ok=True)

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    async with opened_in_thread(partial(os.open, target, flags, 0o600), finish) as fd:
        download = ArchiveDownload(tools, fd)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(download.call(method, {**args, "limit": limit}, limit))
            group.create_task(download.write(call))
        if isinstance(download.fault, OSError):
            raise RuntimeFailure(
                f"the node cannot write {target}: {download.fault.strerror or download.fault}",
                hint="the disk with the node's folder needs room for the archives that are taken out of sandboxes",
            ) from download.fault
        if download.fault is not None:
            raise download.fault
        whole = True


class ArchiveDownload:
    """One download. It uses two tasks: `call` receives the parts, and `write` writes them. `fault` is the error of
    either task."""

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
            self._tools.pause()
        self._some.set()

    async def write(self, call: asyncio.Task[None]) -> None:
        """Write parts until `call` has ended. If a part cannot be written, `call` is cancelled."""
        try:
            while self._pieces or not self._ended:
                await self._some.wait()
                self._some.clear()
                await shielded(self._put)  # shielded, because the thread uses the descriptor until the thread ends
                if self.fault is not None:
                    break
        finally:
            self._dropped = True
            self._tools.resume()
            call.cancel()

    async def _put(self) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        try:
            await asyncio.to_thread(write_all, self._fd, pieces)
            self._tools.resume()
        except OSError as error:
            self.fault = error


def write_all(fd: int, pieces: list[bytes]) -> None:
    """Write all pieces to a file. The call blocks. Raises OSError."""
    # `writelines` writes in a loop, because a nearly full disk may first take only some of the bytes
    with open(fd, "wb", closefd=False) as file:
        file.writelines(pieces)
