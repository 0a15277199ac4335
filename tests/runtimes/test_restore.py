"""Files of one sandbox are restored in another one, from honest and from malicious archives."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime

from .test_contract import ALL, REAL, text
from .test_leaks import first_process
from .world import World, snapshot


def traces(pid: int) -> tuple[int, str]:
    """Return the number of a process's descriptors, and its children."""
    return len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/task/{pid}/children").read_text()


SHOW = "find . -mindepth 1 -printf '%P %y %l\\n' | sort"


async def carried(world: World, kind: str, archive: bytes, *paths: str, before: str = "true") -> Runtime:
    """Return a new sandbox in which `before` was run and the archive was then restored."""
    sandbox = await world.start(kind)
    assert (await sandbox.exec(before, seconds=10)).exit_code == 0
    await put_back(world, sandbox, archive, *paths)
    return sandbox


async def put_back(world: World, sandbox: Runtime, archive: bytes, *paths: str) -> None:
    file = world.folder / "archive"
    file.write_bytes(archive)
    await sandbox.restore(file, paths)


def tar(*members: tuple[str, Any]) -> bytes:
    """Return an archive. Each member has a name, and bytes for a file, None for a folder, or fields of a TarInfo for
    anything else."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
                continue
            info.type = tarfile.DIRTYPE
            for field, value in (what or {}).items():
                setattr(info, field, value)
            archive.addfile(info)
    return sink.getvalue()


def link(target: str) -> dict[str, Any]:
    return {"type": tarfile.SYMTYPE, "linkname": target}


@pytest.fixture(params=REAL)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", ALL)
async def test_paths_become_what_they_were(world: World, kind: str) -> None:
    agent = await world.start(kind)
    await agent.write("src/deep/a", b"\0\xff" * 3_000_000)
    await agent.write("src/b", b"")
    await agent.write("one", b"1")
    await agent.write("not-carried", b"x")
    paths = ["src", "/work/one", "src/deep", "gone"]
    archive = await snapshot(agent, world.folder, *paths)
    fresh = await carried(
        world, kind, archive, *paths, before="mkdir -p src/old; echo x > src/old/f; echo x > gone; echo x > kept"
    )
    assert await fresh.read("src/deep/a") == b"\0\xff" * 3_000_000
    assert (await fresh.read("one"), await fresh.read("src/b"), await fresh.read("kept")) == (b"1", b"", b"x\n")
    assert (await text(fresh, "ls")).split() == ["kept", "one", "src"]
    assert (await text(fresh, "ls src")).split() == ["b", "deep"]


async def test_modes_times_and_links_are_kept(world: World, kind: str) -> None:
    agent = await world.start(kind)
    made = (
        "mkdir t t/closed; echo '#!/bin/sh\necho ran' > t/run; chmod 4755 t/run; ln t/run t/closed/again; "
        "touch -d @1000000000 t/old; ln -s closed/again t/into; ln -s /usr/bin/env t/env; ln -s ../out t/away; "
        "ln -s closed/../../out t/later; mkfifo t/pipe; chmod 500 t/closed"
    )
    assert (await agent.exec(made, seconds=10)).exit_code == 0
    fresh = await carried(world, kind, await snapshot(agent, world.folder, "t"), "t")
    lines = (await text(fresh, f"cd t; {SHOW}")).splitlines()
    assert lines == [
        "closed d ",
        "closed/again f ",
        "env l /usr/bin/env",
        "into l closed/again",
        "old f ",
        "run f ",
    ]
    assert await text(fresh, "stat -c %a,%h t/run; stat -c %Y t/old; t/into") == "755,2\n1000000000\nran\n"


async def test_the_working_folder_itself(world: World, kind: str) -> None:
    agent = await world.start(kind)
    await agent.write("a/b", b"1")
    fresh = await carried(world, kind, await snapshot(agent, world.folder, "."), ".", before="mkdir x y; touch x/1 z")
    assert await text(fresh, SHOW) == "a d \na/b f \n"
    assert await text(fresh, "pwd; cat a/b") == await text(fresh, "pwd") + "1"


EVIL = {
    "up": tar(("work/t/../../../../tmp/evil", b"x"), ("../evil", b"x"), ("work/t/..", None), ("", None)),
    "absolute": tar(("/tmp/evil", b"x"), ("//work/t/x", b"x"), ("/work/t/y", b"x")),
    "beside": tar(("work/taint", b"x"), ("work", b"x"), ("work/other", b"x"), ("wor", b"")),
    "through a link": tar(("work/t/l", link("/usr")), ("work/t/l/evil", b"x"), ("work/t/l/lib/evil", b"x")),
    "through a link to itself": tar(("work/t/s", link("../..")), ("work/t/s/evil", b"x")),
    "the root is a link": tar(("work/t", link("/usr")), ("work/t/evil", b"x")),
    "over a link": tar(("work/t/l", link("/usr/evil")), ("work/t/l", b"x")),
    "a hard link out": tar(("work/t/h", {"type": tarfile.LNKTYPE, "linkname": "work/kept"})),
    "a hard link to a link": tar(
        ("work/t/l", link("/usr/bin/env")), ("work/t/h", {"type": tarfile.LNKTYPE, "linkname": "work/t/l"})
    ),
    "special": tar(
        ("work/t/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("work/t/disk", {"type": tarfile.BLKTYPE, "devmajor": 8}),
        ("work/t/pipe", {"type": tarfile.FIFOTYPE}),
    ),
}


@pytest.mark.deep
async def test_nothing_gets_out_of_the_carried_paths(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    for name, evil in EVIL.items():
        assert (await sandbox.exec("rm -rf t; echo kept > kept; mkdir t", seconds=10)).exit_code == 0
        await put_back(world, sandbox, evil, "t")
        assert await sandbox.read("kept") == b"kept\n", name
        assert await text(sandbox, "ls -d /tmp/evil /usr/evil /usr/lib/evil /evil ../evil 2>/dev/null") == "", name
        assert set((await text(sandbox, "ls")).split()) <= {"kept", "t"}, name
        assert await text(sandbox, "find t ! -type f ! -type d ! -type l; find t -links +1 -type f") == "", name


async def test_links_lead_into_carried_paths_or_the_system_only(world: World, kind: str) -> None:
    aims = {
        "in": "a",
        "abs": "/work/t/a",
        "other": "../u/x",
        "tool": "/usr/bin/env",
        "sys": "../../usr/lib",
        "up": "../kept",
        "tmp": "/tmp/expected",
        "etc": "/etc/passwd",
        "sneak": "sys/../tmp/expected",
        "dot": "../..",
    }
    archive = tar(("work/t", None), *((f"work/t/{name}", link(aim)) for name, aim in aims.items()))
    sandbox = await carried(world, kind, archive, "t", "u")
    assert (await text(sandbox, "cd t; find . -type l -printf '%P\n' | sort")).split() == sorted(
        ["in", "abs", "other", "tool", "sys"]
    )


async def test_a_path_that_is_a_link_in_a_new_sandbox_is_refused(world: World, kind: str) -> None:
    with pytest.raises(RuntimeFailure, match="symbolic links"):
        await carried(world, kind, tar(("work/t", link("real"))), "t", before="mkdir real; ln -s real t")


@pytest.mark.parametrize("kind", ALL)
async def test_a_broken_archive_is_a_failure_of_the_sandbox(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    for broken in (b"", b"nothing of a tar", tar(("work/t/a", b"x" * 5000))[:3000]):
        with pytest.raises(RuntimeFailure, match="put back"):
            await put_back(world, sandbox, broken, "t")


class HeldExecutor(ThreadPoolExecutor):
    """The threads of an event loop. Job number `last` and all jobs after it wait for `go`."""

    def __init__(self, last: int) -> None:
        super().__init__(4)
        self.left = last
        self.go, self.reached = threading.Event(), asyncio.Event()

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.left -= 1
        if self.left > 0:
            return super().submit(job, *args, **kwargs)
        self.reached.set()
        return super().submit(lambda: (self.go.wait(), job(*args, **kwargs))[1])


@pytest.mark.parametrize("job", [3, 4])
async def test_a_restore_that_is_cancelled_between_two_calls_leaves_nothing(world: World, job: int) -> None:
    """The jobs open the archive, read a piece, read another piece, and so on."""
    sandbox = await world.start("namespace")
    file = world.folder / "archive"
    file.write_bytes(tar(("work/t/a", b"x" * 9_000_000)))
    left = traces(first_process())
    executor = HeldExecutor(job)
    asyncio.get_running_loop().set_default_executor(executor)
    restoring = asyncio.create_task(sandbox.restore(file, ["t"]))
    await executor.reached.wait()
    restoring.cancel()
    executor.go.set()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    async with asyncio.timeout(30):
        while traces(first_process()) != left:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.01)
    await sandbox.restore(file, ["t"])
    assert len(await sandbox.read("t/a")) == 9_000_000


async def test_a_failed_restore_leaves_the_sandbox_usable(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    await sandbox.write("f", b"")
    file = world.folder / "archive"
    file.write_bytes(tar(("work/t/a", b"x" * 9_000_000)))
    with pytest.raises(RuntimeFailure, match="put back"):
        await sandbox.restore(file, ["f/t"])
    await sandbox.restore(file, ["t"])
    assert len(await sandbox.read("t/a")) == 9_000_000
