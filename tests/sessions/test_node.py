"""A node's own start and end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.threads import cancelled_late

from .test_sweeps import a_node, temporary

__all__ = ["temporary"]


def traces() -> tuple[set[str], int]:
    """Processes that this one has started, and its descriptors."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for path in tasks for pid in path.read_text().split()}, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_node_whose_start_is_cancelled_leaves_nothing(temporary: Path, number: int) -> None:
    """While its folder is made, and in the sweeps that follow."""
    before = traces()
    node = a_node(temporary)
    assert await cancelled_late(node.__aenter__(), number=number)
    assert os.listdir(temporary) == []
    assert traces() == before
    async with node:
        assert len(os.listdir(temporary)) == 1
    assert os.listdir(temporary) == []
