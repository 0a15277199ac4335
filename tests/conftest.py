"""For all tests: which of them may run at the same time as others."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "real"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, two workers: one drives agents and engines of models, the other container engines.
    Within each one test runs after the other: what they look for on the machine afterwards must not be another's."""
    for item in items:
        if item.get_closest_marker("real"):
            group = "programs" if item.path.is_relative_to(PROGRAMS) else "sandboxes"
            item.add_marker(pytest.mark.xdist_group(group))
