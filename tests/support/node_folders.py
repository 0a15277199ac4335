"""A temporary folder for one test in place of the system's, and folders as killed nodes leave them there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from outrider.sandbox.node_folder import LOCK


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def dead_folder(temporary: Path, name: str) -> Path:
    """Make a folder as a killed node leaves it: the lock file exists, but no process holds the lock."""
    folder = temporary / name
    (folder / "s-1-1").mkdir(parents=True)
    (folder / LOCK).touch()
    return folder
