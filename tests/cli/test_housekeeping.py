"""A service that lacks disk space, descriptors or its folder continues, reports the failure, and recovers. A
service that cannot start prints one error.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.test_serve import TRUSTED, flags
from cli.world import Cli, program
from outrider.client.client import AsyncClient
from outrider.errors import OutriderError
from outrider.schemas import ServiceStatus


class Running:
    """A service in a process of its own, with its temporary folder and a client that has an open connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, client: AsyncClient, url: str, temporary: Path) -> None:
        self.process = process
        self.client = client
        self.url = url
        self.temporary = temporary

    async def status(self) -> ServiceStatus:
        assert self.process.returncode is None
        return await self.client.status()

    async def until(self, holds: Callable[[ServiceStatus], bool]) -> ServiceStatus:
        async with asyncio.timeout(60):
            while not holds(status := await self.status()):  # noqa: ASYNC110  # the service is another process
                await asyncio.sleep(0.05)
        return status

    async def rewards(self, n: int = 2) -> list[float | None]:
        group = await self.client.submit({"task": tomllib.loads(TRUSTED), "n": n})
        [done] = await self.client.wait([group.id])
        return [each.result.verdict.reward if each.result and each.result.verdict else None for each in done.sessions]

    @contextmanager
    def limit(self, what: int, soft: int) -> Iterator[None]:
        _, hard = before = resource.prlimit(self.process.pid, what)
        resource.prlimit(self.process.pid, what, (soft, hard))
        try:
            yield
        finally:
            resource.prlimit(self.process.pid, what, before)

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@asynccontextmanager
async def running(folder: Path, *words: str) -> AsyncIterator[Running]:
    temporary = folder / "tmp"
    temporary.mkdir()
    process = await program("serve", *flags(folder), *words, env=os.environ | {"TMPDIR": str(temporary)})
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        async with AsyncClient(url) as client:
            service = Running(process, client, url, temporary)
            await service.status()
            yield service
        process.terminate()
        _, err = await process.communicate()
        assert process.returncode == 0
        (folder / "log").write_bytes(err)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def names(status: ServiceStatus) -> Sequence[str]:
    return [each.name for each in status.failing]


@pytest.mark.deep
async def test_a_cleaner_that_removes_the_nodes_folder_ends_nothing(tmp_path: Path, cli: Cli) -> None:
    async with running(tmp_path) as service:
        [folder] = service.temporary.glob("outrider-*")
        shutil.rmtree(folder)
        status = await service.until(lambda status: any(each.count > 2 for each in status.failing))
        shown = await cli("status", "--url", service.url)
        [failing] = status.failing
        assert (failing.name, failing.node) == ("node folder", "local")
        assert "No such file or directory" in failing.error
        assert status.nodes[0].capacity == 0  # the queue waits, because sandboxes would fail one after another
        assert "local: node folder" in shown.out
        folder.mkdir(mode=0o700)
        await service.until(lambda status: not status.failing and status.nodes[0].capacity > 0)
    log = (tmp_path / "log").read_text()
    assert log.count("node folder: failed, and is tried again") == 1
    assert log.count("node folder: works again") == 1
    assert "Traceback" not in log


@pytest.mark.deep
async def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        assert await service.rewards() == [1.0, 1.0]
        with service.limit(resource.RLIMIT_FSIZE, 0):  # every write to a file fails
            with pytest.raises(OutriderError):
                await service.client.submit({"task": tomllib.loads(TRUSTED), "n": 1})
            await service.until(lambda status: {"node folder", "audit log"} <= set(names(status)))
        await service.until(lambda status: "node folder" not in names(status))
        assert await service.rewards() == [1.0, 1.0]
        await service.until(lambda status: not status.failing)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.deep
async def test_without_descriptors_it_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        assert await service.rewards() == [1.0, 1.0]
        with service.limit(resource.RLIMIT_NOFILE, service.descriptors):
            waiting = [socket.create_connection(("127.0.0.1", urlsplit(service.url).port or 0)) for _ in range(20)]
            await service.until(lambda status: "node folder" in names(status))
            for each in waiting:
                each.close()
        await service.until(lambda status: not status.failing)
        async with AsyncClient(service.url) as another:  # new connections are accepted again
            assert (await another.status()).sessions["done"] == 2
        assert await service.rewards() == [1.0, 1.0]


@pytest.mark.deep
async def test_a_service_with_256_descriptors_is_crowded_and_lives(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    lanes = ("--init-lane", "40", "--run-lane", "64", "--eval-lane", "40")
    process = await program(
        "serve", *flags(tmp_path), *lanes, env=os.environ | {"TMPDIR": str(temporary)}, preexec_fn=few
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    async with AsyncClient(url) as client:
        group = await client.submit({"task": tomllib.loads(TRUSTED) | {"max_attempts": 20}, "n": 64})
        [done] = await client.wait([group.id])
    rewards = [each.result.verdict.reward for each in done.sessions if each.result and each.result.verdict]
    assert set(rewards) == {1.0}  # failed sessions have an error and no reward
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


CANNOT_START = {
    "a data folder that is a file": ("file", {}, 2, "cannot be used as the data folder", "--data DIR"),
    "a data folder below a file": ("file/data", {}, 2, "cannot be used as the data folder", "--data DIR"),
    "a data folder that nobody can make": ("/proc/outrider", {}, 2, "cannot be used as the data folder", "--data DIR"),
    "a temporary folder that is not there": ("data", {"TMPDIR": "/nowhere"}, 1, "TMPDIR is /nowhere", "unset"),
}


@pytest.mark.deep
@pytest.mark.parametrize(("data", "variables", "code", "error", "hint"), CANNOT_START.values(), ids=CANNOT_START.keys())
async def test_what_cannot_start_is_one_error_and_a_hint(
    tmp_path: Path, data: str, variables: dict[str, str], code: int, error: str, hint: str
) -> None:
    (tmp_path / "file").write_text("here")
    words = [data if word == str(tmp_path / "data") else word for word in flags(tmp_path)]
    process = await program("serve", *words, cwd=tmp_path, env=os.environ | variables)
    out, err = await process.communicate()
    first, second = [line for line in err.decode().splitlines() if line.startswith(("error", "hint", "Traceback"))]
    assert (process.returncode, out) == (code, b"")
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.deep
async def test_too_few_descriptors_are_one_error(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    process = await program("serve", *flags(tmp_path), preexec_fn=few)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.startswith(b"error: this process may have only 40 files open\nhint: ")


@pytest.mark.parametrize(
    "module",
    [
        "outrider.cli.commands",
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("renderers", "click", "msgspec")),
    ],
)
async def test_an_interrupt_while_it_is_imported_ends_it_quietly(tmp_path: Path, module: str) -> None:
    """The signal arrives while the module is looked up."""
    code = f"""
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from outrider.cli import main
sys.exit(main())
"""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "serve", *flags(tmp_path)), stdout=pipe, stderr=pipe
    )
    _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""
