"""Copies programs of a harness into a sandbox on another machine. Folders of this machine are copied to the same paths.

A path that already exists in the sandbox is not copied: the template may contain the programs. Programs are copied as
archives. Invariant: a node makes the archive of each path only once. The archive stays valid, because installed folders
do not change.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.e2b.api import E2BError
from outrider.sandbox.runtimes.e2b.envd import Envd, failure
from outrider.sandbox.runtimes.tool_server.client import ExecDone, ToolClient

ARCHIVE_AT = "/tmp/.outrider-programs"
PIECE = 1 << 18
LEVEL = 1
"""The compression level. It is low, because an archive is compressed once per node but sent once per sandbox."""
UNPACK_SECONDS = 600.0
UNPACK = (
    "import os,sys,tarfile\n"
    "with tarfile.open(sys.argv[1]) as archive:\n"
    " trusted={'filter':'fully_trusted'} if hasattr(tarfile,'fully_trusted_filter') else {}\n"
    " archive.extractall('/',**trusted)\n"
    "os.remove(sys.argv[1])\n"
)


class ProgramArchives:
    """Archives that one node has made of installed programs. They are stored in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Path, Path] = {}
        self._making = asyncio.Lock()

    async def of(self, path: Path) -> Path:
        """Return the archive of a file or folder. It is made when it is first needed. Raises OSError."""
        async with self._making:
            if path not in self._made:
                target = self._folder / f"programs-{len(self._made)}.tgz"
                await shielded(lambda: asyncio.to_thread(_archive, path, target))
                self._made[path] = target
        return self._made[path]


def _archive(path: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz", compresslevel=LEVEL) as archive:
        archive.add(path, str(path).lstrip("/"))


async def show_programs(tools: ToolClient, envd: Envd, archives: ProgramArchives, paths: Sequence[Path]) -> None:
    """Copy files and folders of this machine into the sandbox, unless the sandbox already has them. Raises
    RuntimeFailure."""
    for path in paths:
        if (await _run(tools, ["test", "-e", str(path)])).code == 0:
            continue
        try:
            await envd.upload(ARCHIVE_AT, _pieces(await archives.of(path)))
        except E2BError as error:
            raise failure(f"copy {path} into a sandbox", error) from error
        except OSError as error:
            raise RuntimeFailure(f"{path} cannot be copied into a sandbox: {error}") from error
        if (await _run(tools, ["python3", "-I", "-S", "-c", UNPACK, ARCHIVE_AT])).code != 0:
            raise RuntimeFailure(
                f"{path} cannot be unpacked in a sandbox", hint="the template needs more disk, or the programs inside"
            )


async def output(tools: ToolClient, command: list[str]) -> bytes:
    """Run a command in the sandbox and return its standard output."""
    return (await _run(tools, command)).out


async def _run(tools: ToolClient, command: list[str]) -> ExecDone:
    args: dict[str, Any] = {
        "argv": command,
        "script": "",
        "merged": True,
        "env": {},
        "cwd": "/",
        "stdin": b"",
        "ms": round(UNPACK_SECONDS * 1000),
        "cap": 4096,
    }
    return await tools.call("exec", args, ExecDone, seconds=UNPACK_SECONDS)


async def _pieces(archive: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(archive.open, "rb") as file:
        while data := await asyncio.to_thread(file.read, PIECE):
            yield data
