"""Files that agents left and that were kept: in a folder, by session and attempt, under the SHA-256 of their bytes.

What a file was called in its sandbox is data in an index and never a name here. Invariant: what the index of an
attempt lists is there in full; without an index nothing of an attempt is listed. Everything here blocks.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from outrider.errors import NotFound
from outrider.schemas import ArtifactList

INDEX = "index.json"


class ArtifactStore:
    """`put` the files of an attempt, then its `index`. Session ids are the service's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, session_id: str, attempt: int, data: bytes) -> str:
        """Keep a file; its SHA-256 (hex). Raises OSError."""
        digest = hashlib.sha256(data).hexdigest()
        self._write(session_id, attempt, digest, data)
        return digest

    def index(self, listed: ArtifactList) -> None:
        """Say what an attempt left. Raises OSError."""
        assert listed.attempt is not None
        self._write(listed.session_id, listed.attempt, INDEX, msgspec.json.encode(listed))

    def listed(self, session_id: str, attempt: int | None = None) -> ArtifactList:
        """What an attempt left, of the newest that was asked for any if none is named; nothing where there is none."""
        attempts = self._attempts(session_id) if attempt is None else [attempt]
        for number in sorted(attempts, reverse=True):
            try:
                data = (self._place(session_id, number) / INDEX).read_bytes()
                return msgspec.json.decode(data, type=ArtifactList)
            except (FileNotFoundError, msgspec.DecodeError):  # not written, or not in full when the power went
                continue
        return ArtifactList(session_id=session_id, attempt=attempt, artifacts=(), left_out=())

    def file(self, session_id: str, path: str, attempt: int | None = None) -> Path:
        """Where the bytes of an artifact are, by its path in the sandbox. Raises NotFound."""
        listed = self.listed(session_id, attempt)
        for artifact in listed.artifacts:
            if artifact.path == path:
                assert listed.attempt is not None
                return self._place(session_id, listed.attempt) / artifact.sha256
        raise NotFound(
            f"session {session_id} has kept no {path!r}", hint=f"see what it has: outrider artifacts {session_id}"
        )

    def _attempts(self, session_id: str) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._folder / session_id) if name.isdigit()]
        except FileNotFoundError:
            return []

    def _place(self, session_id: str, attempt: int) -> Path:
        return self._folder / session_id / str(attempt)

    def _write(self, session_id: str, attempt: int, name: str, data: bytes) -> None:
        place = self._place(session_id, attempt)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place / f"{name}.draft"
        draft.write_bytes(data)
        draft.rename(place / name)
