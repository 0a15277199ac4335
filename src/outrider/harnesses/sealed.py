"""Sealed folders: built once, by whoever comes first, and complete or not there at all.

It knows nothing of what is in them. They are built in place, because virtual environments name their own
folder; a seal written last is what makes a folder count. Invariant: a folder with its seal is complete, and of
any number of concurrent builders, in any number of processes, exactly one builds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from outrider.concurrency.build_once import locked

SEAL = ".outrider-sealed.json"


class Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a folder is built from; one built from anything else does not count."""

    packages: tuple[str, ...]
    node: str | None = None
    python: str | None = None
    after: tuple[tuple[str, ...], ...] = ()


def is_sealed(folder: Path, contents: Contents) -> bool:
    try:
        return msgspec.json.decode((folder / SEAL).read_bytes(), type=Contents) == contents
    except (OSError, msgspec.MsgspecError):
        return False


def unseal(folder: Path) -> None:
    """Make a folder that turned out broken not count, so that it is built again."""
    (folder / SEAL).unlink(missing_ok=True)


def build_in_place(folder: Path, contents: Contents, build: Callable[[], None]) -> None:
    """Return with `folder` sealed. `build` finds it empty; when it raises, nothing of it stays. Blocks while
    another process builds the same folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if is_sealed(folder, contents):
            return
        if folder.exists():
            shutil.rmtree(folder)
        try:
            folder.mkdir()
            build()
            draft = folder / f"{SEAL}.draft"
            draft.write_bytes(msgspec.json.encode(contents))
            draft.rename(folder / SEAL)
        except BaseException:  # also an interrupt: a folder is whole, or not there
            shutil.rmtree(folder, ignore_errors=True)
            raise
