"""A storm of sessions in real sandboxes, whose node is killed repeatedly: no session is lost, and no traces are left.

The environment variable STORM_SESSIONS sets the number of sessions (default: 5,000). The shares of the fates stay the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from outrider.client.client import AsyncClient
from outrider.errors import ServiceError
from outrider.sandbox.runtimes.guest.isolation import syscalls
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.schemas import GroupView
from outrider.spec import GroupSpec
from service.sandboxed import ENDINGS, FATES, MARK, NAP
from service.storm import RULES, assert_over, draw
from service.traces import Traces, traces
from service.world import RENDERER, World, a_world, result_of
from support.tokenizer import write_tokenizer

from .storm_node import COUNTED

TESTS = Path(__file__).parent.parent
SESSIONS = int(os.environ.get("STORM_SESSIONS", "5000"))
KILLS = 20
WAVE = 8
"""Number of groups that are submitted together. They are submitted when at most this many groups are unfinished."""
CANCELLED = 0.2
END_SECONDS = 60.0
"""Maximum seconds until the processes of a killed node have ended. They do not end at once."""

T = TypeVar("T")


class Nodes:
    """Nodes that run on the same data, one after the other. `start` starts the next node, `kill` kills the running
    node, and `ask` makes a call to the running node."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, held: AsyncExitStack) -> None:
        self.folder = folder
        self.tally = folder / "tally"
        self.log = folder / "log"
        self.pids: list[int] = []
        self.kills = 0
        self._tasks = tasks
        self._held = held
        self._up = asyncio.Event()

    async def start(self) -> None:
        tokenizer, data = self.folder / "tokenizer", self.folder / "data"
        flags = "--port 0 --allow-plugin * "
        flags += f"--data {data} --tokenizer {tokenizer} --renderer {RENDERER}"
        lanes = "--init-lane 4 --run-lane 12 --eval-lane 4"
        command = [sys.executable, "-m", "real.storm_node", str(self.tally), *flags.split(), *lanes.split()]
        engine = {"kind": "scripted", "options": {"replies": [*RULES]}}
        env = {**os.environ, "TMPDIR": tempfile.gettempdir(), "OUTRIDER_ENGINES": json.dumps([engine])}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, cwd=TESTS, env=env, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        self.pids.append(self._process.pid)
        self._tasks.create_task(self._ready(self._process))

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        """Connect a client when the node is ready, unless the node is killed first."""
        kills = self.kills
        assert process.stdout is not None
        said = re.search(r"ready at (\S+)", (await process.stdout.readline()).decode())
        if self.kills == kills:
            assert said, self.log.read_text()[-4000:]
            # The next node has another address, but with the default patience, a call would be repeated at this address
            # for minutes. Without any patience, a call fails on a kept connection that the node has just closed.
            self._client = await self._held.enter_async_context(AsyncClient(said[1], patience=5))
            self._up.set()

    async def kill(self) -> None:
        self.kills += 1
        self._up.clear()
        self._process.kill()
        await self._process.wait()

    async def ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Make a call, and repeat it at the next node if the node is killed before it replies. Returns the reply."""
        while True:
            while not self._up.is_set():  # a node may be killed between its event and the end of this wait
                await self._up.wait()
            kills = self.kills
            try:
                return await call(self._client)
            except ServiceError:
                if self.kills == kills:
                    raise


class Progress:
    """The number of finished groups."""

    def __init__(self) -> None:
        self.done = 0
        self._changed = asyncio.Condition()

    async def add(self, count: int) -> None:
        async with self._changed:
            self.done += count
            self._changed.notify_all()

    async def until(self, count: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.done >= count)


class Storm:
    """Submits, cancels and follows groups while the nodes are killed. `accepted` are the ids of the submitted groups,
    and `told` the finished groups in the order of the results."""

    def __init__(self, nodes: Nodes, groups: Sequence[GroupSpec], rng: random.Random) -> None:
        self.groups = groups
        self.accepted: list[str] = []
        self.told: list[GroupView] = []
        self._nodes = nodes
        self._rng = rng
        self._progress = Progress()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._submit(tasks))
            tasks.create_task(self._follow())
            tasks.create_task(self._kill())

    async def _submit(self, tasks: asyncio.TaskGroup) -> None:
        """Submit the groups in waves. If a node is killed before it replies, the group is submitted again with its
        key."""
        for number, group in enumerate(self.groups):
            if number % WAVE == 0:
                await self._progress.until(number - WAVE)
            spec = group.model_copy(update={"idempotency_key": f"{MARK}-{number}"})
            view = await self._nodes.ask(lambda client, spec=spec: client.submit(spec, patience=5))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            self.accepted.append(view.id)
            if number >= len(FATES) and self._rng.random() < CANCELLED:
                tasks.create_task(self._cancel(view.id, self._rng.uniform(0, 10)))

    async def _cancel(self, group: str, after: float) -> None:
        await asyncio.sleep(after)
        await self._nodes.ask(lambda client: client.cancel(group))

    async def _follow(self) -> None:
        while len(self.told) < len(self.groups):
            after = len(self.told)
            page = await self._nodes.ask(lambda client, after=after: client.results(after=after, wait=10))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            assert [view.cursor for view in page.groups] == list(range(after + 1, after + 1 + len(page.groups)))
            self.told += page.groups
            await self._progress.add(len(page.groups))

    async def _kill(self) -> None:
        """Kill the node at random moments, sometimes while it starts. One kill is left for the end of the test."""
        for moment in sorted(self._rng.uniform(0, len(self.groups)) for _ in range(KILLS - 1)):
            await self._progress.until(moment)
            await asyncio.sleep(self._rng.uniform(0, 2))
            await self._nodes.kill()
            await self._nodes.start()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files. Its path is short, because a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def adopting() -> Iterator[None]:
    """Makes this process adopt processes whose parents were killed, so that the test can reap the processes of a killed
    node."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    yield
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 0)


def reap() -> None:
    """Reap adopted processes that have ended. Do not call this while other code waits for child processes."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            """There may be more to reap."""


async def dead(before: Traces, look: Callable[[], Traces]) -> None:
    """Wait until no process of a killed node is left."""
    async with asyncio.timeout(END_SECONDS):
        while (await asyncio.to_thread(look)).processes != before.processes:
            reap()


async def all_results(world: World) -> list[GroupView]:
    views: list[GroupView] = []
    while groups := (await world.service.results(after=len(views), wait=0, limit=50, samples=True)).groups:
        views += groups
    return views


def counted(group: GroupSpec) -> GroupSpec:
    runtime = group.task.runtime.model_copy(update={"kind": COUNTED})
    return group.model_copy(update={"task": group.task.model_copy(update={"runtime": runtime})})


@pytest.mark.real
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("adopting")
async def test_sessions_of_mixed_fates_on_a_node_that_is_killed(tmp_path: Path, temporary: Path) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    rng = random.Random(20)
    groups = [counted(group) for group in draw(rng, FATES, SESSIONS)]
    write_tokenizer(tmp_path / "tokenizer")
    before = traces(temporary, MARK, NAP)
    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as held:
        nodes = Nodes(tmp_path, tasks, held)
        await nodes.start()
        storm = Storm(nodes, groups, rng)
        await storm.run()
        seconds = time.monotonic() - begun
        await nodes.kill()
    assert nodes.kills == KILLS
    assert not re.findall(r"^.* ERROR .*$|^Traceback.*$", nodes.log.read_text(), re.MULTILINE)
    assert len(set(storm.accepted)) == len(groups)
    assert {view.id for view in storm.told} == set(storm.accepted)

    def look() -> Traces:
        return traces(temporary, MARK, NAP, nodes=nodes.pids)

    await dead(before, look)
    async with a_world(tmp_path, tmp_path / "tokenizer") as w:
        views = await all_results(w)
        endings = await assert_over(w, groups, views)
    assert look() == before
    attempts = sum(result_of(session).attempt for view in views for session in view.sessions)
    started = nodes.tally.stat().st_size
    print(
        f"{SESSIONS} sessions in {len(groups)} groups, {KILLS} kills, {seconds:.0f} s, {started} sandboxes started "
        f"for {attempts} attempts: {dict(endings)}"
    )
    assert endings.keys() >= ENDINGS
