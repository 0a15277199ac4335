"""For all tests: which of them may run at the same time as others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PROGRAMS = f"{Path(__file__).parent.name}/real/"


class TwoHalves(LoadScopeScheduling):
    """For two workers: one drives agents and engines of models, the other container engines. Within each one test runs
    after the other: what they look for on the machine afterwards must not be another's."""

    def _split_scope(self, nodeid: str) -> str:
        return "programs" if nodeid.startswith(PROGRAMS) else "sandboxes"


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoHalves | None:
    return TwoHalves(config, log) if config.getvalue("dist") == "loadscope" else None
