"""Control groups: how they are found, made and removed, and swept if their node has died."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes import limits
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups, Hierarchies
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import Resources

ALL = Resources(cpus=1.5, memory_mb=64, pids=100)


@pytest.fixture
def real() -> Hierarchies:
    found = cgroups.find()
    if not found.folders:
        pytest.skip("this process can make no control groups")
    return found


def groups_of(found: Hierarchies, name: str) -> list[Path]:
    return [path for folder in set(found.folders.values()) for path in folder.glob(f"{name}/*") if path.is_dir()]


def test_version_1_is_found_controller_by_controller(tmp_path: Path) -> None:
    for name in ("memory/a", "pids", "cpuacct"):
        (tmp_path / name).mkdir(parents=True)
    found = cgroups.find(mount=tmp_path, own="4:memory:/a\n3:cpu,cpuacct:/\n2:pids:/\n0::/x\n")
    assert found == Hierarchies(1, {"memory": tmp_path / "memory/a", "pids": tmp_path / "pids"})
    assert str(found) == "control groups v1 (memory, pids)"


@pytest.mark.parametrize(
    ("resources", "expected"),
    [(Resources(), 8192), (Resources(disk_mb=20_000), 24_096), (Resources(memory_mb=64), 64)],
)
def test_memory_is_always_bounded(resources: Resources, expected: int) -> None:
    assert cgroups.settings(2, resources)["memory"]["memory.max"] == str(expected << 20)
    assert cgroups.settings(1, resources)["memory"]["memory.limit_in_bytes"] == str(expected << 20)
    assert limits.counted_memory(resources, ()) == limits.rlimits(resources, {})["RLIMIT_DATA"] == expected << 20
    assert limits.counted_memory(resources, cgroups.CONTROLLERS) == 0


def test_buffers_of_sockets_are_bounded_in_version_1() -> None:
    for memory, expected in ((64, 16), (4096, 64)):
        found = cgroups.settings(1, Resources(memory_mb=memory))["memory"]
        assert found["memory.kmem.tcp.limit_in_bytes"] == str(expected << 20)


async def test_what_a_kernel_does_not_account_for_is_left_out(real: Hierarchies, tmp_path: Path) -> None:
    """An optional limit without a file is left out, such as swap on many machines. For any other limit, a missing file
    is an error."""
    async with Cgroups(Host(tmp_path)) as made:
        (folder, *_) = made.make("s1", ALL).folders
        for name in cgroups.OPTIONAL:
            if not (folder / name).exists():
                cgroups._set(folder / name, "1000")
        with pytest.raises(OSError, match="Permission denied"):
            cgroups._set(folder / "memory.limits", "1000")


def test_a_bound_that_nobody_named_takes_nothing_from_the_files() -> None:
    assert limits.writable_bounds(Resources(disk_mb=20_000))[0] == 20_000 << 20
    assert limits.writable_bounds(Resources(disk_mb=20_000, memory_mb=100))[0] == 75 << 20


def test_version_2_is_used_where_it_is_ours(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    own = tmp_path / "user/unit"
    own.mkdir(parents=True)
    assert cgroups.find(mount=tmp_path, own="0::/user/unit\n") == cgroups.NONE
    (own / "cgroup.controllers").write_text("cpuset memory pids io\n")
    (own / "cgroup.procs").touch()
    assert cgroups.find(mount=tmp_path, own="0::/user/unit\n") == Hierarchies(2, {"memory": own, "pids": own})
    (own / cgroups.OWN).mkdir()
    assert cgroups.find(mount=tmp_path, own=f"0::/user/unit/{cgroups.OWN}\n").folders["memory"] == own


async def test_version_2_moves_its_process_into_a_leaf(tmp_path: Path) -> None:
    """A plain folder stands for the file system of version 2, which this kernel may not have."""
    (tmp_path / "cgroup.procs").write_text("12\n")
    (tmp_path / "cgroup.subtree_control").touch()
    made = Cgroups(Host(tmp_path), hierarchies=Hierarchies(2, {"cpu": tmp_path, "memory": tmp_path, "pids": tmp_path}))
    await made.__aenter__()
    assert (tmp_path / cgroups.OWN / "cgroup.procs").read_text() == "12"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    group = made.make("s1-1", ALL)
    (entrance,) = group.entrances
    folder = Path(entrance).parent
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "pids.max": "100",
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
    }


async def test_a_group_is_made_with_its_limits_and_goes(real: Hierarchies, tmp_path: Path) -> None:
    host = Host(tmp_path)
    async with Cgroups(host) as made:
        group = made.make("s1-1", ALL)
        folders = groups_of(real, host.name)
        assert folders
        if "pids" in real.folders:
            assert (real.folders["pids"] / host.name / "s1-1" / "pids.max").read_text() == "100\n"
        await group.remove()
        assert not groups_of(real, host.name)
    assert not any((folder / host.name).exists() for folder in real.folders.values())


async def test_what_runs_in_a_group_goes_with_it(real: Hierarchies, tmp_path: Path) -> None:
    async with Cgroups(Host(tmp_path)) as made:
        group, other = made.make("s1-1", ALL), made.make("s2-1", ALL)
        child = await asyncio.create_subprocess_exec("sleep", "60")
        group.add(child.pid)
        await group.remove()
        assert await child.wait() == -9
        child = await asyncio.create_subprocess_exec("sleep", "60")
        other.add(child.pid)
    assert await child.wait() == -9, "the node's end is that of all its groups"


LEFT_BEHIND = """
import asyncio, os, subprocess, sys
from pathlib import Path
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import Resources

async def main():
    host = Host(Path(sys.argv[1]))
    made = await Cgroups(host).__aenter__()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdin=-3, stdout=-3)
    made.make("s1-1", Resources()).add(child.pid)
    print(host.name, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


async def test_what_a_dead_node_left_is_swept_and_a_living_ones_is_not(real: Hierarchies, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_BEHIND, str(tmp_path)]
    pipe = asyncio.subprocess.PIPE
    node = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert node.stdout is not None
    name = (await node.stdout.readline()).decode().strip()
    await asyncio.to_thread(cgroups.sweep)
    assert groups_of(real, name)
    node.kill()
    await node.communicate()
    await asyncio.to_thread(cgroups.sweep)
    assert not groups_of(real, name)


async def test_a_group_that_cannot_be_removed_is_a_failure_of_the_runtime(tmp_path: Path) -> None:
    """The other groups are still removed. Plain folders stand for the groups: they can only be removed when they are
    empty."""
    parents = {name: tmp_path / name for name in ("memory", "pids")}
    for parent in parents.values():
        parent.mkdir()
    async with Cgroups(Host(tmp_path / "node"), hierarchies=Hierarchies(1, parents)) as made:
        group = made.make("s1-1", ALL)
        (*_, last) = folders = [Path(entrance).parent for entrance in group.entrances]
        for file in last.iterdir():
            file.unlink()
        with pytest.raises(RuntimeFailure, match=r"memory.*cannot be removed"):
            await group.remove()
        assert [folder for folder in folders if folder.exists()] == folders[:1]
        for file in folders[0].iterdir():
            file.unlink()
        await group.remove()


def test_limits_that_cannot_be_set_leave_nothing(tmp_path: Path) -> None:
    made = Cgroups(Host(tmp_path), hierarchies=Hierarchies(1, {"pids": tmp_path / "missing"}))
    with pytest.raises(RuntimeFailure, match="cannot be set"):
        made.make("s1-1", Resources())
    assert os.listdir(tmp_path) == []
