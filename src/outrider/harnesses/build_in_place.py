"""Builds a folder at its final path, once, whoever comes first.

It knows nothing of what is in the folder. It cannot build elsewhere and rename, as concurrency/build_once.py does,
because the files of a virtual environment name its folder; a marker file that is written last says that a folder is
complete. Invariant: a folder with its marker is complete, after a loss of power, too, and of any number of builders in
any number of processes exactly one builds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from outrider.concurrency.build_once import locked, sync_file_system

MARKER = ".outrider-sealed.json"


class Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a folder is built from. The marker records it: a folder built from anything else is not complete."""

    packages: tuple[str, ...]
    node: str | None = None
    python: str | None = None
    after: tuple[tuple[str, ...], ...] = ()


def is_complete(folder: Path, contents: Contents) -> bool:
    """Whether the folder was built from `contents`, to the end."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Contents) == contents
    except (OSError, msgspec.MsgspecError):
        return False


def invalidate(folder: Path) -> None:
    """Make a folder that is broken count as incomplete, so that it is built again."""
    (folder / MARKER).unlink(missing_ok=True)


def build_in_place(folder: Path, contents: Contents, build: Callable[[], None]) -> None:
    """Return once `folder` is complete, after building it if it is not. `build` finds it empty; when it raises, the
    folder is removed. Blocks while another process builds the same folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if is_complete(folder, contents):
            return
        if folder.exists():
            shutil.rmtree(folder)
        try:
            folder.mkdir()
            build()
            draft = folder / f"{MARKER}.draft"
            draft.write_bytes(msgspec.json.encode(contents))
            sync_file_system(folder)
            draft.rename(folder / MARKER)
        except BaseException:  # also an interrupt
            shutil.rmtree(folder, ignore_errors=True)
            raise
