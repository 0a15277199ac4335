"""Stores artifacts: files that a task asks to keep from its sandbox. The path of an artifact's file is
SESSION/ATTEMPT/SHA-256, below one folder.

Each attempt has an index file, which lists the artifacts' paths in the sandbox. These paths are never used as file
names on this machine. Functions other than coroutines block on the disk.

Invariants: every file that an index lists is stored in full, even after a loss of power; an attempt without an index
has no artifacts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from outrider.errors import NotFound
from outrider.schemas import ArtifactList

INDEX = "index.json"

CARRIED = "outrider:carried"
"""Name of the archive of files that are copied from the agent's sandbox to the graders'. It has no leading slash, so it
cannot be the path of a file in a sandbox."""
PATCH = "outrider:patch.diff"
"""Name of the artifact that holds a repository's diff, if the graders get the diff instead of files."""
GRADING_LOG = "outrider:grading.log"
"""Name of the artifact that holds the output of the graders."""
NETWORK_RECORD = "outrider:network.jsonl"
"""Name of the artifact that holds the recorded HTTP requests and replies of the sandbox, if the task asks for a
recording."""
LOGGED = (GRADING_LOG, NETWORK_RECORD)
"""Names of the logs that Outrider itself writes."""
FOR_GRADERS = (CARRIED, PATCH)
"""Names of the artifacts that carry data from the agent's sandbox to the graders. An attempt has at most one of
them."""


class KeepsArtifacts(Protocol):
    """The methods of `ArtifactStore` that an attempt uses. They raise OSError. If the store is in another process, they
    also raise OutriderError."""

    async def keep(self, session_id: str, attempt: int, data: bytes) -> str: ...
    async def keep_index(self, listed: ArtifactList) -> None: ...
    async def kept_for_graders(self, session_id: str, attempt: int) -> bytes: ...


class ArtifactStore:
    """The artifacts of all sessions, in one folder. Call `put` for each file of an attempt, then `index` once. Callers
    must pass only ids of stored sessions, because the ids become names of folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, session_id: str, attempt: int, data: bytes) -> str:
        """Store a file. Returns its SHA-256 (hex). Raises OSError."""
        digest = hashlib.sha256(data).hexdigest()
        self._write(session_id, attempt, digest, data)
        return digest

    def index(self, listed: ArtifactList) -> None:
        """Write an attempt's index, the list of its artifacts. Raises OSError."""
        assert listed.attempt is not None
        self._write(listed.session_id, listed.attempt, INDEX, msgspec.json.encode(listed))
        place = self._place(listed.session_id, listed.attempt)
        # After this, the new entries of the folders survive a loss of power.
        for folder in (place, place.parent, self._folder):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    async def keep(self, session_id: str, attempt: int, data: bytes) -> str:
        """Run `put` in a thread."""
        return await asyncio.to_thread(self.put, session_id, attempt, data)

    async def keep_index(self, listed: ArtifactList) -> None:
        """Run `index` in a thread."""
        await asyncio.to_thread(self.index, listed)

    async def kept_for_graders(self, session_id: str, attempt: int) -> bytes:
        """Return the data that this attempt keeps for the graders (the artifact named in FOR_GRADERS). A thread reads
        the file. Raises NotFound if there is no such artifact, and OSError."""

        def read() -> bytes:
            names = [artifact.path for artifact in self.listed(session_id, attempt).artifacts]
            name = next((name for name in FOR_GRADERS if name in names), CARRIED)
            return self.file(session_id, name, attempt).read_bytes()

        return await asyncio.to_thread(read)

    def listed(self, session_id: str, attempt: int | None = None) -> ArtifactList:
        """Return the artifacts of an attempt. The default is the newest attempt that has an index. If there is no
        index, the list is empty."""
        attempts = [attempt] if attempt is not None else []
        if attempt is None:
            with suppress(FileNotFoundError):
                attempts = [int(name) for name in os.listdir(self._folder / session_id) if name.isdigit()]
        for number in sorted(attempts, reverse=True):
            try:
                data = (self._place(session_id, number) / INDEX).read_bytes()
                return msgspec.json.decode(data, type=ArtifactList)
            except FileNotFoundError:
                continue
        return ArtifactList(session_id=session_id, attempt=attempt, artifacts=(), left_out=())

    def file(self, session_id: str, path: str, attempt: int | None = None) -> Path:
        """Return the file on this machine that holds an artifact. `path` is the artifact's path in the sandbox. Raises
        NotFound."""
        listed = self.listed(session_id, attempt)
        for artifact in listed.artifacts:
            if artifact.path == path:
                assert listed.attempt is not None
                return self._place(session_id, listed.attempt) / artifact.sha256
        raise NotFound(
            f"session {session_id} has kept no {path!r}", hint=f"see its artifacts: outrider artifacts {session_id}"
        )

    def sessions(self) -> list[str]:
        """Return the ids of the sessions that have artifacts."""
        try:
            return sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return []

    def remove(self, session_ids: Iterable[str]) -> None:
        """Delete all artifacts of the given sessions. Raises OSError."""
        for session_id in session_ids:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._folder / session_id)

    def _place(self, session_id: str, attempt: int) -> Path:
        return self._folder / session_id / str(attempt)

    def _write(self, session_id: str, attempt: int, name: str, data: bytes) -> None:
        place = self._place(session_id, attempt)
        for folder in (self._folder, place.parent, place):  # `mkdir` does not apply `mode` to parents
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place / f"{name}.draft"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(place / name)
