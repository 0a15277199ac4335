"""For all tests: how many examples a property is tried on, what is made once, which tests may run beside others."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from support.disk import Disk, a_disk
from support.flaky import pytest_addoption, pytest_sessionstart, pytest_terminal_summary
from support.in_memory import use_memory

if TYPE_CHECKING:
    from support.postgresql import PostgresqlServer

__all__ = ["pytest_addoption", "pytest_sessionstart", "pytest_terminal_summary"]  # hooks: see support/flaky.py

REAL = Path(__file__).parent / "real"
"""Every test in this folder is marked `real`."""
PROGRAMS = f"{REAL.parent.name}/{REAL.name}/"
WITH_SANDBOXES = {
    f"{PROGRAMS}test_{name}.py"
    for name in (
        "eval",
        "harbor_folders",
        "harbor_parity",
        "human_eval",
        "release_pairs",
        "slurm_fleet",
        "storm_killed",
    )
}
"""Files in tests/real whose tests look for what their sandboxes have left on the machine, or start many of them."""
WITH_MODELS = {
    f"{PROGRAMS}test_{name}.py"
    for name in ("rollouts", "routers", "vllm", "vllm_dialects", "vllm_policy", "vllm_tool_choice")
}
"""Files in tests/real that share a vLLM, which a worker starts once."""

ALWAYS: dict[str, Any] = {
    # Neither says anything of the code under test on a machine that has other things to do.
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
# The same few examples on every machine. `make test-nightly`: many, and others each time; a failure prints how to try
# its example again.
settings.register_profile("fast", max_examples=25, derandomize=True, **ALWAYS)
settings.register_profile("nightly", max_examples=200, print_blob=True, **ALWAYS)
settings.load_profile("fast")  # unless --hypothesis-profile names the other


def pytest_configure(config: pytest.Config) -> None:
    use_memory(config)
    # A shell starts what runs in its background deaf to Ctrl-C, which our tests send to programs that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what is imported and collected stays: to look through it again and again takes seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest row of tests/real that one worker runs begin early."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in WITH_MODELS)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Every worker collects all tests, and what tests/real imports takes longest: nothing there is asked for."""
    return True if "not real" in config.option.markexpr and collection_path == REAL else None


@pytest.fixture
def others_objects_set_aside() -> None:
    """For tests that measure how long something takes: the garbage collector no longer looks through what thousands of
    tests before have left, which takes a tenth of a second of whichever thread it runs in."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ipython_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OUTRIDER_HOME for all tests that open an IPython, of every worker: to make what they show takes seconds."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ipython-home"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """One that can lose its power."""
    with a_disk(tmp_path / "disk", 64) as disk:
        if disk is None:
            pytest.skip("this machine lets nobody mount an ext4 file system that is in a file")
        yield disk


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One server for all tests of a worker: it takes a second to make. A test that ends it starts it again."""
    from support.postgresql import postgresql_server  # here: the tests of trainers have no asyncpg

    with postgresql_server() as server:
        yield server


class RealPrograms(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Tests of container engines, Slurm and sandboxes run one after the other, because what they look for on the
    machine afterwards must not be another's; so do those of the one vLLM. Each other file is its own, so that the
    worker that is done first takes the next one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith(PROGRAMS) or file in WITH_SANDBOXES:
            return "sandboxes"
        return "models" if file in WITH_MODELS else file


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RealPrograms | None:
    return RealPrograms(config, log) if config.getvalue("dist") == "loadscope" else None
