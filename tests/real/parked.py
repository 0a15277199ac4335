"""A service with one session whose agent only waits: the test makes the session's model calls over HTTP.

The module does not depend on a dialect or an engine. Invariant: the whole service handles each call, and the session
ends when the test ends it or fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import Config, ModelConfig, PluginsConfig
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.schemas import GroupView
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.trajectory import Turn, Verdict

PARK_SECONDS = 60.0


class ParkedAgent:
    """Connects to the local port in its options, sends its session's base URL, and exits when the connection ends."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._port = int(options["port"])

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(f"{context.endpoint.base_url}\n".encode())
            await reader.read()
        finally:
            writer.close()
        return HarnessOutcome()


def grade(outcome: Outcome) -> Verdict:
    """The evaluator, which gives every outcome the reward 1."""
    return Verdict(reward=1.0)


class ParkedSession:
    """A running session. `base_url` is the URL of its model, without the dialect's path."""

    def __init__(self, service: Service, client: AsyncClient, group_id: str, base_url: str, line: Line) -> None:
        self.base_url = base_url
        self._service = service
        self._client = client
        self._group_id = group_id
        self._line = line

    async def end(self) -> GroupView:
        """End the session, and wait until it is graded. Returns its group with the samples."""
        self._line.hang_up()
        async with asyncio.timeout(PARK_SECONDS):
            await self._client.wait([self._group_id])
        return await self._client.group(self._group_id, samples=True)

    async def turns(self) -> list[Turn]:
        """Return the session's stored turns."""
        (session,) = await self._service.store.sessions(self._group_id)
        return await self._service.store.turns(session.id)


class Line:
    """The test's end of the connection to the agent. `base_url` is a future for the URL that the agent sends."""

    def __init__(self) -> None:
        self.base_url = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.base_url.set_result((await reader.readline()).decode().strip())

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()


@asynccontextmanager
async def a_parked_session(
    folder: Path, policy: Path, engine: EngineSpec, *, renderer: str
) -> AsyncIterator[ParkedSession]:
    """Start a service, and yield a running session of it. `policy` is a folder with a tokenizer."""
    model = ModelConfig(tokenizer=str(policy), renderer=renderer)
    config = Config(port=0, data=folder, model=model, engines=(engine,), plugins=PluginsConfig(allow=("*",)))
    line = Line()
    listener = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    async with (
        listener,
        open_service(config) as (service, node),
        serving(service, node) as url,
        AsyncClient(url) as client,
    ):
        try:
            group = await client.submit(_group(listener.sockets[0].getsockname()[1]))
            async with asyncio.timeout(PARK_SECONDS):
                base_url = await line.base_url
            yield ParkedSession(service, client, group.id, base_url, line)
        finally:
            line.hang_up()


def _group(port: int) -> dict[str, Any]:
    task = {
        "instruction": "Wait.",
        "harness": {"agent": f"{__name__}:{ParkedAgent.__name__}", "options": {"port": port}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": f"{__name__}:{grade.__name__}"},
        "branches": {"retry": "train"},  # so that all tokens train and are compared with the model
        "max_attempts": 1,
    }
    return {"task": task, "n": 1}
