"""A service whose sessions run in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.api.server import serving
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.lifecycle import GroupState
from outrider.nodes.remote_node import WAITS, NodeWaits, RemoteNode
from outrider.schemas import GroupView
from outrider.service.admission import validate_group
from outrider.service.assembly import open_service
from outrider.service.service import Service
from support.tokenizer import write_tokenizer

from .acts import AGENT, GRADER

RENDERER = "qwen3"
HASTY = RetryPolicy(first=0.01, longest=0.02)
PROCESSES = 2


class Running:
    """A running service, with the requests that tests make of it."""

    def __init__(self, service: Service, folder: Path, url: str) -> None:
        self.service = service
        self.folder = folder
        self.url = url
        self.nodes: Sequence[RemoteNode] = [place.node for place in service.scheduler.places._places.values()]  # type: ignore[misc]

    async def submit(self, *do: str, n: int = 1, **fields: Any) -> GroupView:
        runtime: dict[str, Any] = {"kind": "memory"} | fields.pop("runtime", {})
        task = {
            "instruction": "do it",
            "harness": {"agent": AGENT, "options": {"do": do, "folder": str(self.folder)}},
            "evaluator": {"kind": "callable", "path": GRADER},
            "runtime": runtime,
        }
        return await self.service.submit(validate_group({"task": task | fields, "n": n}))

    async def done(self, group: GroupView) -> GroupView:
        async with asyncio.timeout(120):
            while (view := await self.service.group(group.id, wait=30, samples=True)).state is not GroupState.DONE:
                pass
        return view

    async def here(self, name: str) -> None:
        """Return when an agent waits for the file `name`."""
        async with asyncio.timeout(60):
            while not (self.folder / f"{name}.here").exists():  # noqa: ASYNC110  # another process makes it
                await asyncio.sleep(0.01)

    async def at_door_on_both_nodes(self, n: int) -> tuple[GroupView, dict[str, str]]:
        """Submit a group of `n` sessions that wait at "door". Returns the group and the node of each session by the
        session's id; the sessions are on more than one node. A node that gets no CPU time for a while gets no session;
        then another group is submitted."""
        async with asyncio.timeout(60):
            while True:
                submitted = await self.submit("ask", "wait door", "ask", n=n)
                await self.here("door")
                nodes: dict[str, str] = {}
                while len(nodes) < n:
                    await asyncio.sleep(0.01)
                    view = await self.service.group(submitted.id, wait=0, samples=False)
                    nodes = {session.id: session.node for session in view.sessions if session.node is not None}
                if len(set(nodes.values())) > 1:
                    return submitted, nodes
                await self.service.cancel(submitted.id)

    def open(self, name: str) -> None:
        (self.folder / name).touch()


Starts = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def start(tmp_path: Path, tokenizer: Path) -> Starts:
    """`async with start(**settings) as running`: a service with two processes. `settings` are fields of `Config`, and
    `waits` are the service's waits for nodes."""

    @asynccontextmanager
    async def started(*, waits: NodeWaits = WAITS, **settings: Any) -> AsyncIterator[Running]:
        folder = tmp_path / "meeting"
        folder.mkdir(exist_ok=True)
        (tmp_path / "files").mkdir(exist_ok=True)
        defaults: dict[str, Any] = {
            "port": 0,
            "processes": PROCESSES,
            "plugins": PluginsConfig(allow=("*",)),
            "data": tmp_path / "data",
            "files": tmp_path / "files",
            "model": ModelConfig(tokenizer=str(tokenizer), renderer=RENDERER),
            "lanes": LanesConfig(init=16, run=64, eval=16),
        }
        config = Config(**defaults | settings)
        async with open_service(config, pauses=HASTY, node_waits=waits) as opened, serving(*opened) as url:
            yield Running(opened.service, folder, url)

    return started
