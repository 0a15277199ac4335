"""Fixtures for the tests of the service: a tokenizer, an empty folder for temporary files, and a running service."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

from support.tokenizer import write_tokenizer

from .world import World, a_world


class MakeWorld(Protocol):
    def __call__(self, replies: Any = ..., **settings: Any) -> AbstractAsyncContextManager[World]: ...


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files. Its path is short, because the path of a Unix socket has at most 107
    bytes."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def world(tmp_path: Path, tokenizer: Path) -> MakeWorld:
    """`async with world(replies, **settings)`: a service on the data folder of this test."""

    def make(*replies: Any, **settings: Any) -> AbstractAsyncContextManager[World]:
        return a_world(tmp_path, tokenizer, *replies, **settings)

    return make
