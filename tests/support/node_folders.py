"""A test's own temporary folder in place of the system's, and the folders that killed nodes leave in it."""

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
    """Make the folder that a killed node leaves: its lock is free."""
    folder = temporary / name
    (folder / "s-1-1").mkdir(parents=True)
    (folder / LOCK).touch()
    return folder
