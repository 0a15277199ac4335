"""Takes the files that a task wants kept out of an agent's sandbox, when its run has ended and however it has.

It knows no harness and no grading. Invariant: it never fails but by being cancelled; what could not be kept is listed
with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import AsyncIterator

import msgspec

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Runtime
from outrider.schemas import Artifact, ArtifactList, LeftOut
from outrider.spec import TaskSpec
from outrider.store.artifacts import ArtifactStore

log = logging.getLogger("outrider.session")

AT_ONCE = 8
"""Files that a node holds in memory."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one file and of all of an attempt, how many paths one pattern may match, and how long all may take."""

    file: int = 32 << 20
    total: int = 128 << 20
    matches: int = 1000
    seconds: float = 120.0


class Collector:
    """A node's. `collect` once an attempt."""

    def __init__(self, store: ArtifactStore, bounds: Bounds | None = None) -> None:
        self._store = store
        self._bounds = bounds or Bounds()
        self._reading = asyncio.Semaphore(AT_ONCE)

    async def collect(self, runtime: Runtime, task: TaskSpec, session_id: str, attempt: int) -> None:
        if not task.artifacts:
            return
        haul = Haul(runtime, task, session_id, attempt, self._bounds)
        try:
            try:
                async with asyncio.timeout(self._bounds.seconds):
                    await self._collect(haul)
            except TimeoutError:
                haul.leave_out("", f"what is not listed could not be had within {self._bounds.seconds:g} s")
            await asyncio.to_thread(self._store.index, haul.listed())
        except Exception as error:  # the session is what matters
            log.warning("the artifacts of session %s attempt %d are not kept: %r", session_id, attempt, error)

    async def _collect(self, haul: Haul) -> None:
        async for path in haul.paths():
            async with self._reading:
                data = await haul.read(path)
                if data is None:
                    continue
                try:
                    digest = await asyncio.to_thread(self._store.put, haul.session_id, haul.attempt, data)
                except OSError as error:
                    haul.leave_out(path, f"the service cannot store it: {error}")
                else:
                    haul.keep(path, len(data), digest)


class Haul:
    """What one attempt leaves."""

    def __init__(self, runtime: Runtime, task: TaskSpec, session_id: str, attempt: int, bounds: Bounds) -> None:
        self.session_id = session_id
        self.attempt = attempt
        self._runtime = runtime
        self._patterns = task.artifacts
        self._workdir = task.runtime.workdir
        self._kept: list[Artifact] = []
        self._left_out: list[LeftOut] = []
        self._bounds = bounds
        self._room = bounds.total

    def listed(self) -> ArtifactList:
        return ArtifactList(
            session_id=self.session_id,
            attempt=self.attempt,
            artifacts=tuple(self._kept),
            left_out=tuple(self._left_out),
        )

    async def paths(self) -> AsyncIterator[str]:
        """What the patterns match, each once, as absolute paths in the sandbox."""
        seen: set[str] = set()
        for pattern in self._patterns:
            try:
                found = await self._runtime.glob(pattern, limit=self._bounds.matches)
            except (RuntimeFailure, OSError) as error:
                self.leave_out(pattern, str(error))
                continue
            if not found:
                self.leave_out(pattern, "matches nothing")
            for name in found:
                path = posixpath.normpath(posixpath.join(self._workdir, name))
                if path not in seen:
                    seen.add(path)
                    yield path

    async def read(self, path: str) -> bytes | None:
        """None, and the reason noted, for what cannot be had."""
        limit = min(self._bounds.file, self._room)
        try:
            path.encode()
            return await self._runtime.read(path, limit=limit, follow=False)
        except IsADirectoryError:
            self.leave_out(path, "a folder: a pattern such as `folder/**` names what is in it")
        except UnicodeEncodeError:
            self.leave_out(path, "its name is not UTF-8")
        except (RuntimeFailure, OSError) as error:
            full = f" ({self._bounds.total} bytes are kept in all)" if limit < self._bounds.file else ""
            self.leave_out(path, f"{error}{full}")
        return None

    def keep(self, path: str, size: int, digest: str) -> None:
        self._room -= size
        self._kept.append(Artifact(path=path, size=size, sha256=digest))

    def leave_out(self, path: str, reason: str) -> None:
        self._left_out.append(LeftOut(path=_readable(path), reason=_readable(reason)))


def _readable(text: str) -> str:
    """With the bytes of a name that is not UTF-8 spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
