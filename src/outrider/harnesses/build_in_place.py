"""Builds a folder at its final path, once for all processes that request it.

The files of a virtual environment contain the path of their folder. So the folder cannot be built elsewhere and then
renamed, as concurrency/build_once.py does. Instead, a marker file is written last. Invariant: a folder with its marker
is complete, even after a power loss; at most one process at a time builds a folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from outrider.concurrency.build_once import locked, sync_file_system

MARKER = ".outrider-sealed.json"


class BuildInputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inputs from which a folder is built. The marker file records these inputs. If a marker file records other
    inputs, its folder counts as incomplete."""

    packages: tuple[str, ...]
    node: str | None = None
    python: str | None = None
    after: tuple[tuple[str, ...], ...] = ()


def is_complete(folder: Path, contents: BuildInputs) -> bool:
    """Return True if the folder was completely built from the inputs `contents`."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=BuildInputs) == contents
    except (OSError, msgspec.MsgspecError):
        return False


def invalidate(folder: Path) -> None:
    """Remove the marker of a broken folder, so that the next request builds the folder again."""
    (folder / MARKER).unlink(missing_ok=True)


def build_in_place(folder: Path, contents: BuildInputs, build: Callable[[], None]) -> None:
    """Build `folder` unless it is complete. The folder is emptied before `build` is called, and removed if `build`
    raises. The call blocks while another process builds the same folder."""
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
        except BaseException:  # this also removes the incomplete folder after KeyboardInterrupt
            shutil.rmtree(folder, ignore_errors=True)
            raise
