"""Encrypts tasks before they are stored, because the environment variables of a task may contain secrets.

The key is not in the database, so a copy of the database reveals no secrets. Data is sealed (encrypted) for a named
place in the database, such as `the task of group GROUP`. Invariant: data that was sealed for one place cannot be opened
for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Protocol, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outrider.errors import InvalidField, ServiceError, UnreadableTask

KEY_FILE = "task.key"
KEY_BYTES, ID_BYTES, NONCE_BYTES = 32, 8, 12
DIGEST_BYTES, DIGEST_LENGTH = 24, 32
"""Length of a keyed digest (see `TaskKey.keyed_digest`), in bytes and in base64 characters."""
SEALED = b"\0sealed1"
"""Prefix of sealed (encrypted) bytes. No JSON text begins with this prefix. The key's id, the nonce and the output of
AES-256-GCM follow."""
SEALED_URL = "sealed1:"
"""Prefix of a sealed URL. The receiver (host and port), a space, and the sealed bytes in base64 follow."""
HINT = (
    "bring back the key with which the service ran before: the file task.key of its data folder, or OUTRIDER_TASK_KEY"
)
NEW_KEY_HINT = (
    "if it is lost, make another one: openssl rand -base64 32 > {path}. "
    "Sessions that are still queued then end with unreadable_task; finished groups keep their samples"
)


class KeySource(Protocol):
    """Loads the key that encrypts tasks, or makes a new key."""

    def load(self) -> TaskKey | None:
        """Return the key, or None if it was not made yet or is lost. Raises ServiceError if the key cannot be read."""
        ...

    def make(self) -> TaskKey:
        """Make a new key and store it. Raises ServiceError if it cannot be stored."""
        ...

    def missing(self) -> ServiceError:
        """Return the error to raise if the database has sealed tasks but the key is missing."""
        ...


class TaskKey:
    """Seals (encrypts) and opens data with one key. It is also a `KeySource` that returns itself."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._cipher = AESGCM(key)
        self._id = hmac.digest(key, b"id of a task key", hashlib.sha256)[:ID_BYTES]
        self._digest_key = hmac.digest(key, b"key of marks", hashlib.sha256)

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a key of KEY_BYTES bytes from base64. Raises ValueError if the text is not such a key."""
        try:
            return cls(base64.b64decode(text.strip(), validate=True))
        except binascii.Error as error:
            raise ValueError("it is not base64") from error

    def load(self) -> TaskKey:
        return self

    def make(self) -> TaskKey:
        return self

    def missing(self) -> ServiceError:
        return ServiceError("the key of the stored tasks is missing", hint=HINT)

    def seal(self, data: bytes, place: str) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return b"".join((SEALED, self._id, nonce, self._cipher.encrypt(nonce, data, place.encode())))

    def open(self, sealed: bytes, place: str) -> bytes:
        """Decrypt data that was sealed for `place`. Raises UnreadableTask if the data is damaged, or was sealed with
        another key or for another place."""
        head, body = len(SEALED) + ID_BYTES, len(SEALED) + ID_BYTES + NONCE_BYTES
        if not sealed.startswith(SEALED) or sealed[len(SEALED) : head] != self._id:
            raise UnreadableTask(f"{place} is encrypted with another key than this service has", hint=HINT)
        try:
            return self._cipher.decrypt(sealed[head:body], sealed[body:], place.encode())
        except (InvalidTag, ValueError) as error:  # ValueError means that the data is truncated
            hint = "restore the database from a copy, or submit the task again"
            raise UnreadableTask(
                f"{place} is damaged, or was changed by somebody without the key", hint=hint
            ) from error

    def keyed_digest(self, place: str) -> str:
        """Return a digest of `place` with DIGEST_LENGTH characters. Nobody can compute it without the key."""
        found = hmac.digest(self._digest_key, place.encode(), hashlib.sha256)[:DIGEST_BYTES]
        return base64.urlsafe_b64encode(found).decode()

    def seal_url(self, url: str, receiver: str, place: str) -> str:
        return f"{SEALED_URL}{receiver} {base64.b64encode(self.seal(url.encode(), place)).decode()}"

    def open_url(self, sealed: str, place: str) -> str:
        """Decrypt a URL that `seal_url` has encrypted for the same `place`. Raises UnreadableTask, as `open` does."""
        try:
            return self.open(base64.b64decode(sealed.rpartition(" ")[2]), place).decode()
        except binascii.Error as error:
            raise UnreadableTask(f"{place} is damaged") from error


class KeyFile:
    """A key in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> TaskKey | None:
        try:
            return TaskKey.parse(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ServiceError(f"{self._path} holds no key of tasks: {error}", hint=self._hint()) from error

    def make(self) -> TaskKey:
        text = base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n"
        new = self._path.with_suffix(".new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)  # otherwise, a loss of power could undo the rename, and no task could be read again
            finally:
                os.close(folder)
        except OSError as error:
            raise ServiceError(f"the key of the tasks cannot be written to {self._path}: {error}") from error
        return TaskKey.parse(text.decode())

    def missing(self) -> ServiceError:
        return ServiceError(
            f"the tasks in the database are encrypted, and their key is not in {self._path}", hint=self._hint()
        )

    def _hint(self) -> str:
        return f"{HINT}; {NEW_KEY_HINT.format(path=self._path)}"


def receiver_of_sealed(url: str) -> str:
    """Return the host and port of a sealed URL. This needs no key."""
    return url.removeprefix(SEALED_URL).partition(" ")[0]


def given_key(text: str) -> TaskKey:
    """Read the key from a setting. Raises InvalidField if the text is not a key."""
    try:
        return TaskKey.parse(text)
    except ValueError as error:
        hint = "make one with: openssl rand -base64 32"
        raise InvalidField(f"a key is {KEY_BYTES} bytes in base64: {error}", field="task_key", hint=hint) from error
