"""A sandbox is stopped once and its folder is removed, even if a step fails or is cancelled."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from outrider.concurrency.chores import Chores, Failures
from outrider.config import Config
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.lab.fakes.memory_runtime.runtime import MemoryLedger, MemoryRuntime
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.network.door import Door
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.runtimes.base import Availability, ExecResult, Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandboxes, run_step
from outrider.spec import PrepareCommand, RuntimeSpec

STOPPED_ONCE = {("s", 1): 1}


class Counted(MemoryRuntime):
    """A memory runtime with the test's own ledger. `stop` raises OSError if the spec's `env` has STOP_FAILS."""

    ledger: ClassVar[MemoryLedger] = MemoryLedger()

    async def stop(self) -> None:
        await super().stop()
        if "STOP_FAILS" in self._spec.env:
            raise OSError("busy")


def spec(**fields: Any) -> RuntimeSpec:
    return RuntimeSpec.model_validate({"kind": "sandboxes.test_sandbox:Counted", **fields})


@asynccontextmanager
async def some_sandboxes(folder: Path, *, network: NetworkRules | None = None) -> AsyncIterator[Sandboxes]:
    Counted.ledger = MemoryLedger()
    paths = HostPaths.of(folder)
    async with Host(folder) as host, Chores(Failures()) as background:
        yield Sandboxes(host=host, background=background, paths=paths, gateway_socket=folder / "s", network=network)


async def test_it_is_ready_once_and_stopped_once(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        sandbox = await sandboxes.make(spec(prepare=[{"run": "echo x >> prepared"}]), "s", 1)
        await sandbox.ready()
        await sandbox.ready()
        assert await sandbox.runtime.read("prepared") == b"x\n"
        assert os.listdir(tmp_path) == ["s-1"]
        await sandbox.stop()
        await sandbox.stop()
    assert (Counted.ledger.stopped, os.listdir(tmp_path)) == (STOPPED_ONCE, [])


async def test_what_cannot_be_prepared_is_stopped(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        with pytest.raises(RuntimeFailure, match="prepare step 0"):
            await (await sandboxes.make(spec(prepare=[{"run": "false"}]), "s", 1)).ready()
    assert (Counted.ledger.stopped, os.listdir(tmp_path)) == (STOPPED_ONCE, [])


async def test_what_is_cancelled_while_it_is_prepared_is_stopped(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        sandbox = await sandboxes.make(spec(prepare=[{"run": "sleep 60"}]), "s", 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await sandbox.ready()
    assert (Counted.ledger.stopped, os.listdir(tmp_path)) == (STOPPED_ONCE, [])


async def test_the_folder_goes_although_a_runtime_cannot_stop(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        sandbox = await sandboxes.make(spec(env={"STOP_FAILS": "1"}), "s", 1)
        await sandbox.ready()
        with pytest.raises(OSError, match="busy"):
            await sandbox.stop()
    assert os.listdir(tmp_path) == []


class Networked(Counted):
    filters_network = True


async def test_a_cancellation_while_the_door_closes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, close = asyncio.Event(), Door.close

    async def noted(door: Door) -> None:
        closing.set()
        await close(door)

    monkeypatch.setattr(Door, "close", noted)
    rules = NetworkRules(Config.model_validate({"network": {"allow": ["docs.example"]}}))
    async with some_sandboxes(tmp_path, network=rules) as sandboxes:
        networked = spec(kind="sandboxes.test_sandbox:Networked", network={"allow": ["docs.example"]})
        sandbox = await sandboxes.make(networked, "s", 1)
        await sandbox.ready()
        stopping = asyncio.create_task(sandbox.stop())
        await closing.wait()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert os.listdir(tmp_path) == []


async def test_a_sandbox_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        with pytest.raises(ValueError, match="of no use"):
            await sandboxes.make(spec(kind="sandboxes.test_sandbox:Unmakeable"), "s", 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("process", {"image": "debian"}, "image"),
        ("process-landlock", {"rootfs": "/usr"}, "rootfs"),
        ("process", {"mounts": [{"source": "/usr"}]}, "mounts"),
        ("process", {"users": 2}, "users"),
        ("process", {"resources": {"gpus": 1}}, "resources.gpus"),
        ("process", {"network": {"allow": ["docs.example"]}}, "network"),
        ("e2b", {"image": "base", "users": 2}, "users"),
    ],
)
async def test_what_this_machines_kind_cannot_give_is_an_error_of_the_runtime(
    tmp_path: Path, kind: str, fields: dict[str, Any], field: str
) -> None:
    """The service may have checked the task against another kind of sandbox, its own default."""
    async with some_sandboxes(tmp_path) as sandboxes:
        with pytest.raises(RuntimeUnavailable, match=f"'{kind}' sandboxes") as failed:
            await sandboxes.make(spec(kind=kind, **fields), "s", 1, field="task.evaluator.runtime")
        assert failed.value.field == f"task.evaluator.runtime.{field}"
        assert failed.value.hint
    assert os.listdir(tmp_path) == []


class Absent(MemoryRuntime):
    @classmethod
    def available(cls) -> Availability:
        return Availability(ok=False, detail="its daemon is gone", hint="start it")


ABSENT = "sandboxes.test_sandbox:Absent"


@pytest.mark.parametrize(
    ("fields", "kind", "error", "says", "field"),
    [
        ({"kind": "process", "image": "debian"}, "process", RuntimeUnavailable, "'process' sandboxes", "image"),
        ({"kind": "of_nobody"}, "process", RuntimeUnavailable, "unknown runtime", "kind"),
        ({"kind": ABSENT}, "process", RuntimeFailure, "its daemon is gone", "kind"),
        ({"kind": "namespace", "image": "lost"}, "process", RuntimeUnavailable, "no image 'lost'", "image"),
        ({"mounts": [{"source": "/etc"}]}, "process", RuntimeUnavailable, "may name", "mounts.0.source"),
        ({"mounts": [{"source": "HERE/gone"}]}, "process", RuntimeUnavailable, "not on this node", "mounts.0.source"),
        ({"rootfs": "HERE/gone"}, "process", RuntimeUnavailable, "not a folder on this node", "rootfs"),
        ({"image": "HERE/gone"}, "process", RuntimeUnavailable, "not on this node", "image"),
        ({"prepare": [{"upload": "gone", "to": "x"}]}, "process", RuntimeFailure, "'gone'", "prepare.0.upload"),
        ({"prepare": [{"upload": "given", "to": "x"}]}, "process", None, "", ""),
        ({"kind": ABSENT}, ABSENT, None, "", ""),
        ({"kind": "kubernetes", "image": "x"}, "process", None, "", ""),
    ],
)
async def test_a_graders_sandbox_is_checked_without_being_made(
    tmp_path: Path, fields: dict[str, Any], kind: str, error: type[RuntimeFailure] | None, says: str, field: str
) -> None:
    """The availability of the kind is not checked if the agent's sandbox is of the same kind, or if the sandboxes of
    the kind run elsewhere."""
    (tmp_path / "given").touch()
    asked = spec(**json.loads(json.dumps({"kind": "memory", **fields}).replace("HERE", str(tmp_path))))
    async with some_sandboxes(tmp_path) as sandboxes:
        sandboxes.paths = HostPaths.of(tmp_path, [tmp_path])
        checked = sandboxes.check(asked, field="task.evaluator.runtime", agent=spec(kind=kind))
        if error is None:
            await checked
        else:
            with pytest.raises(RuntimeFailure, match=says) as failed:
                await checked
            assert (type(failed.value), failed.value.field) == (error, f"task.evaluator.runtime.{field}")
    assert os.listdir(tmp_path) == ["given"]


class Unmakeable(MemoryRuntime):
    @classmethod
    def create(cls, *_: Any) -> Any:
        raise ValueError("of no use")


async def test_the_address_of_the_gateway_is_the_one_of_the_innermost_block(tmp_path: Path) -> None:
    async with some_sandboxes(tmp_path) as sandboxes:
        made = []
        with sandboxes.gateway_at("http://one"):
            with sandboxes.gateway_at("http://two"):
                made.append(await sandboxes.make(spec(), "two", 1))
            made.append(await sandboxes.make(spec(), "one", 1))
        assert [sandbox.runtime.endpoint for sandbox in made] == ["http://two", "http://one"]
        for sandbox in made:
            await sandbox.stop()


class Failing:
    """A sandbox whose command fails `failures` times and then succeeds."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries = 0

    async def exec(self, *_: Any, **__: Any) -> ExecResult:
        self.tries += 1
        return ExecResult(exit_code=int(self.tries <= self.failures), stdout=b"", stderr=b"")


@pytest.mark.parametrize(
    ("failures", "fields", "tries"),
    [
        (4, {"grace_seconds": 3600, "grace_pause_seconds": 0, "pause_seconds": 3600}, 5),
        (4, {"grace_seconds": 3600, "pause_seconds": 0}, 5),
        (4, {"attempts": 5, "pause_seconds": 0, "grace_pause_seconds": 3600}, 5),
        (4, {"attempts": 4, "pause_seconds": 0}, None),
        (9, {"attempts": 2, "pause_seconds": 0, "grace_seconds": 0.1, "grace_pause_seconds": 0.2}, None),
    ],
)
async def test_a_health_check_fails_when_failures_that_count_are_too_many(
    failures: int, fields: dict[str, Any], tries: int | None
) -> None:
    """Failures of runs that start within `grace_seconds` do not count. The pause after them is `grace_pause_seconds` if
    it is set."""
    runtime = Failing(failures)
    step = PrepareCommand.model_validate({"run": "x", **fields})
    if tries is None:
        with pytest.raises(RuntimeFailure, match=rf"the check exited with 1, the last of {step.attempts} times"):
            await run_step(cast(Runtime, runtime), step, name="the check")
        assert runtime.tries == step.attempts + bool(step.grace_seconds)
    else:
        await run_step(cast(Runtime, runtime), step, name="the check")
        assert runtime.tries == tries
