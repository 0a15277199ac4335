"""Settings and fixtures of all tests: the profiles of Hypothesis, shared resources, and the tests that may run in
parallel."""

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
"""Files in tests/real whose tests check what their sandboxes leave on the machine, or start many sandboxes."""
WITH_MODELS = {
    f"{PROGRAMS}test_{name}.py"
    for name in ("rollouts", "routers", "vllm", "vllm_dialects", "vllm_policy", "vllm_tool_choice")
}
"""Files in tests/real whose tests share one vLLM server. One worker runs all of them and starts the server once."""

ALWAYS: dict[str, Any] = {
    # On a busy machine, a slow example is no fault of the code under test.
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
# `fast` tries the same few examples on every machine. `nightly` (`make test-nightly`) tries more examples, others in
# each run, and prints how to repeat a failed example.
settings.register_profile("fast", max_examples=25, derandomize=True, **ALWAYS)
settings.register_profile("nightly", max_examples=200, print_blob=True, **ALWAYS)
settings.load_profile("fast")  # the default, which --hypothesis-profile overrides


def pytest_configure(config: pytest.Config) -> None:
    use_memory(config)
    # A shell starts its background jobs with SIGINT ignored, and programs that the tests start would inherit this. The
    # tests send SIGINT to such programs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # imported modules and collected tests stay alive: scanning them again and again takes seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of WITH_MODELS first. One worker runs all of them, and no other worker has so much to run."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in WITH_MODELS)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import tests/real if none of its tests are selected. Every worker collects all tests, and these imports
    take longest."""
    return True if "not real" in config.option.markexpr and collection_path == REAL else None


@pytest.fixture
def others_objects_set_aside() -> None:
    """Exclude all existing objects from garbage collection, for tests that measure durations. Thousands of earlier
    tests have left objects. To scan them takes a tenth of a second, in any thread in which a collection runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ipython_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OUTRIDER_HOME for all tests that open an IPython, shared by all workers, because making its contents takes
    seconds."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ipython-home"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk that can lose its power."""
    with a_disk(tmp_path / "disk", 64) as disk:
        if disk is None:
            pytest.skip("this machine lets nobody mount an ext4 file system that is in a file")
        yield disk


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One PostgreSQL server for all tests of a worker, because making a server takes a second. A test that stops the
    server starts it again."""
    from support.postgresql import postgresql_server  # imported here, because the tests of trainers have no asyncpg

    with postgresql_server() as server:
        yield server


class RealPrograms(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Distributes tests over workers. Tests of container engines, Slurm and sandboxes run one after the other, because
    they check what is left on the machine; so do the tests that share a vLLM server. Every other file of tests/real is
    distributed by itself, so that the first idle worker takes the next file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith(PROGRAMS) or file in WITH_SANDBOXES:
            return "sandboxes"
        return "models" if file in WITH_MODELS else file


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RealPrograms | None:
    return RealPrograms(config, log) if config.getvalue("dist") == "loadscope" else None
