"""Keeps files after the agent's run: the artifacts that the task names, the files in the session's folders in the
sandbox, and the output of the graders.

Invariant: keeping files raises no exception except CancelledError. A file that cannot be kept is listed with the
reason, or the reason is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import posixpath
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure, ServiceError, storable
from outrider.harnesses.base import folders_in
from outrider.sandbox.runtimes.base import Runtime
from outrider.schemas import Artifact, ArtifactList, LeftOut
from outrider.spec import TaskSpec
from outrider.store.artifacts import GRADING_LOG, NETWORK_RECORD, KeepsArtifacts

log = logging.getLogger("outrider.session")

MAX_FILES_IN_MEMORY = 8
"""Maximum number of files in memory at once, for all sessions of a node together."""


LOG_BYTES = 256 << 10
"""Maximum size in bytes of a grading log. The note about the bytes that were cut out is not counted."""


class GradingLog:
    """The output of an attempt's graders: its first and its last LOG_BYTES / 2 bytes. Every evaluation except the first
    begins with a heading."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = 0
        self._evaluations = 0
        self._heading = b""

    def begin(self) -> None:
        """Begin the output of an evaluation. A later evaluation is that of the next step, or of the same step again."""
        self._evaluations += 1
        if self._evaluations > 1:
            self._heading = b"[evaluation %d]\n" % self._evaluations

    def add(self, output: bytes) -> None:
        if output:
            self._add(self._heading)
            self._heading = b""
            self._add(output)

    def _add(self, output: bytes) -> None:
        room = LOG_BYTES // 2 - len(self._head)
        self._head += output[:room]
        self._tail += output[room:]
        extra = max(0, len(self._tail) - LOG_BYTES // 2)
        del self._tail[:extra]
        self._cut += extra

    def content(self) -> bytes:
        note = b"\n[... %d bytes cut ...]\n" % self._cut if self._cut else b""
        return bytes(self._head + note + self._tail)


class ArtifactLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for the collections of an attempt's artifacts. `matches` is the maximum number of paths for one pattern.
    `seconds` limits one collection, and `total_bytes` all collections together."""

    file_bytes: int = 32 << 20
    total_bytes: int = 128 << 20
    matches: int = 1000
    seconds: float = 120.0


@dataclass(eq=False)
class KeptFiles:
    """The artifacts that the collections of one attempt have kept. There is one collection for each step of the task.

    artifacts: the artifacts by path. A later file with the same path replaces an earlier one.
    stored_bytes: the bytes of all files given to the store. They include replaced files, which stay on the disk.
    """

    artifacts: dict[str, Artifact] = field(default_factory=dict)
    stored_bytes: int = 0


async def make_folders(runtime: Runtime) -> None:
    """Create the session's folders in a started sandbox. If this fails, for example because the image's user lacks the
    permission, only a warning is logged. The agent may not need the folders."""
    folders = folders_in(runtime)
    try:  # writing a file creates its folder, and a hidden file is never collected as an artifact
        for folder in (folders.artifacts, folders.logs):
            await runtime.write(f"{folder}/.keep", b"")
    except (RuntimeFailure, OSError) as error:
        log.warning("a sandbox has no folders for artifacts and logs: %s", error)


class ArtifactCollector:
    """Copies the artifacts of a node's sessions from their sandboxes into `store`."""

    def __init__(self, store: KeepsArtifacts, limits: ArtifactLimits | None = None) -> None:
        self._store = store
        self._limits = limits or ArtifactLimits()
        self._reading = asyncio.Semaphore(MAX_FILES_IN_MEMORY)

    async def collect(
        self, runtime: Runtime, task: TaskSpec, session_id: str, attempt: int, kept: KeptFiles
    ) -> ArtifactList:
        """Keep the artifacts of an attempt and return the list of them. Call this once per step of the task, always
        with the same `kept`. New artifacts are added to `kept`, so the list also has the artifacts of earlier steps.
        Files that were left out are listed only for this step. The list is stored if it has entries or if the task
        names artifacts."""
        collection = ArtifactCollection(runtime, task, self._store, self._limits, session_id, attempt, kept)
        try:
            try:
                async with asyncio.timeout(self._limits.seconds):
                    async for path in collection.paths():
                        async with self._reading:
                            await collection.keep(path)
            except TimeoutError:
                collection.leave_out("", f"the files not listed could not be read within {self._limits.seconds:g} s")
            listed = collection.listed()
            if task.artifacts or listed.artifacts or listed.left_out:
                await self._store.keep_index(listed)
        except Exception as error:  # must not fail the session
            log.warning("the artifacts of session %s attempt %d are not kept: %s", session_id, attempt, error)
        return collection.listed()

    async def keep_carried(self, file: Path, name: str, listed: ArtifactList) -> ArtifactList:
        """Keep the local file `file`, which contains the files that were carried to the grading. Add `file` to the list
        as `name`, one of FOR_GRADERS. If `file` is too large, list it as left out. Returns the new list."""
        session_id, attempt, limit = listed.session_id, listed.attempt, self._limits.file_bytes
        assert attempt is not None
        try:
            size = (await asyncio.to_thread(file.stat)).st_size
            if size > limit:
                note = LeftOut(path=name, reason=f"it has {size} bytes; at most {limit} are kept")
                listed = msgspec.structs.replace(listed, left_out=(*listed.left_out, note))
            else:
                async with self._reading:
                    digest = await self._store.keep(session_id, attempt, await asyncio.to_thread(file.read_bytes))
                kept = Artifact(path=name, size=size, sha256=digest)
                listed = msgspec.structs.replace(listed, artifacts=(*listed.artifacts, kept))
            await self._store.keep_index(listed)
        except Exception as error:  # must not fail the session
            log.warning("the carried files of session %s attempt %d are not kept: %s", session_id, attempt, error)
        return listed

    async def keep_log(self, log_of_grading: GradingLog, listed: ArtifactList) -> ArtifactList:
        """Keep the output of the graders, if there is any, and add the output to the list. Returns the new list."""
        return await self._keep_own(GRADING_LOG, log_of_grading.content(), listed)

    async def keep_record(self, record: bytes, listed: ArtifactList) -> ArtifactList:
        """Keep the record of the session's network connections, if there is any, and add the record to the list.
        Returns the new list."""
        return await self._keep_own(NETWORK_RECORD, record, listed)

    async def _keep_own(self, name: str, data: bytes, listed: ArtifactList) -> ArtifactList:
        if not data:
            return listed
        session_id, attempt = listed.session_id, listed.attempt
        assert attempt is not None
        try:
            digest = await self._store.keep(session_id, attempt, data)
            kept = Artifact(path=name, size=len(data), sha256=digest)
            longer = msgspec.structs.replace(listed, artifacts=(*listed.artifacts, kept))
            await self._store.keep_index(longer)
        except Exception as error:  # must not fail the session
            log.warning("%s of session %s attempt %d is not kept: %s", name, session_id, attempt, error)
            return listed
        return longer

    async def fetch_carried(self, session_id: str, attempt: int, file: Path) -> None:
        """Write what `keep_carried` has stored for an attempt to the local path `file`. Raises OutriderError and
        OSError."""
        async with self._reading:
            data = await self._store.kept_for_graders(session_id, attempt)
            await asyncio.to_thread(file.write_bytes, data)


@dataclass(eq=False)
class ArtifactCollection:
    """Collects the artifacts of one attempt, once, into `kept`. It lists the files that were kept, and those that this
    collection left out, with the reason."""

    runtime: Runtime
    task: TaskSpec
    store: KeepsArtifacts
    limits: ArtifactLimits
    session_id: str
    attempt: int
    kept: KeptFiles
    _left_out: list[LeftOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folders = folders_in(self.runtime).parent

    def listed(self) -> ArtifactList:
        return ArtifactList(
            session_id=self.session_id,
            attempt=self.attempt,
            artifacts=tuple(self.kept.artifacts.values()),
            left_out=tuple(self._left_out),
        )

    async def paths(self) -> AsyncIterator[str]:
        """Yield the absolute paths in the sandbox that match the task's patterns or are in the session's folders, each
        path once."""
        seen: set[str] = set()
        own = f"{self._folders}/**"
        for pattern in (*self.task.artifacts, own):
            try:
                found = await self.runtime.glob(pattern, limit=self.limits.matches)
            except (RuntimeFailure, OSError) as error:
                self.leave_out(pattern, str(error))
                continue
            if not found and pattern != own:
                self.leave_out(pattern, "matches nothing")
            for name in found:
                path = posixpath.normpath(posixpath.join(self.task.runtime.workdir, name))
                if path not in seen:
                    seen.add(path)
                    yield path

    async def keep(self, path: str) -> None:
        """Store the bytes of a file, unless an earlier step has stored the same file. If the file cannot be stored,
        list it as left out, with the reason. An earlier step's file of the same path is then no longer listed, because
        it may be outdated. If the path is now missing or a folder, the earlier file stays listed."""
        earlier = self.kept.artifacts.get(path)
        bytes_left = self.limits.total_bytes - self.kept.stored_bytes
        # A file as large as the earlier file of this path is read even if there is no room for another file, because
        # the file may be unchanged.
        limit = min(self.limits.file_bytes, bytes_left if earlier is None else max(bytes_left, earlier.size))
        full = f" ({self.limits.total_bytes} bytes are kept in all)" if bytes_left < self.limits.file_bytes else ""
        try:
            path.encode()
            data = await self.runtime.read(path, limit=limit, follow=False)
        except IsADirectoryError:
            if not f"{path}/".startswith(f"{self._folders}/"):
                self.leave_out(path, "a folder: a pattern such as `folder/**` names the files in it")
            return
        except UnicodeEncodeError:
            self.leave_out(path, "its name is not UTF-8")
            return
        except FileNotFoundError as error:  # an earlier step's file of this path stays listed
            self.leave_out(path, f"{error}{full}")
            return
        except (RuntimeFailure, OSError) as error:
            self._leave_out_newer(path, f"{error}{full}")
            return
        if (
            earlier is not None
            and earlier.size == len(data)
            and earlier.sha256 == (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        ):
            return
        most = self.limits.matches * (len(self.task.artifacts) + 1)
        if earlier is None and len(self.kept.artifacts) >= most:
            self.leave_out(path, f"{most} files are kept in all")
            return
        if len(data) > bytes_left:
            self._leave_out_newer(path, f"{path} is larger than {bytes_left} bytes{full}")
            return
        self.kept.stored_bytes += len(data)  # even if `keep` fails, because the service may have stored the file
        try:
            digest = await self.store.keep(self.session_id, self.attempt, data)
        except (OSError, ServiceError) as error:
            self._leave_out_newer(path, f"the service cannot store it: {error}")
            return
        self.kept.artifacts[path] = Artifact(path=path, size=len(data), sha256=digest)

    def _leave_out_newer(self, path: str, reason: str) -> None:
        self.kept.artifacts.pop(path, None)
        self.leave_out(path, reason)

    def leave_out(self, path: str, reason: str) -> None:
        self._left_out.append(LeftOut(path=storable(path), reason=storable(reason)))
