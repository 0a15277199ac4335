"""A whole service whose agents do nothing: their sessions run, and the benchmark makes their model calls.

The module measures nothing itself. Invariant: calls are served by the product as shipped (HTTP server, gateway,
conversation, pool, store), not by an imitation.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from outrider.api.server import serving
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.service.assembly import Opened, open_service
from outrider.spec import EngineSpec, GroupSpec

CONTEXT_TOKENS = 1 << 20


class ParkedAgent:
    """Writes its session's base URL as one line to the named pipe in its options, then waits until it is cancelled."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._pipe = Path(options["pipe"])

    async def init(self, context: HarnessContext) -> None:
        """Do nothing: there is nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        with self._pipe.open("a") as lines:
            lines.write(f"{context.endpoint.base_url}\n")
        never: asyncio.Future[HarnessOutcome] = asyncio.get_running_loop().create_future()
        return await never


class Parking(msgspec.Struct, frozen=True):
    """A parked service, the URL of its control API, and the base URLs of its sessions' models."""

    opened: Opened
    url: str
    base_urls: tuple[str, ...]


@asynccontextmanager
async def parked(tokenizer: Path, engine: EngineSpec, *, sessions: int, processes: int = 1) -> AsyncIterator[Parking]:
    """Run a service with `sessions` parked sessions in `processes` processes. The service's store is a file."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as data:
        config = Config(
            port=0,
            processes=processes,
            data=Path(data),
            plugins=PluginsConfig(allow=("*",)),
            model=ModelConfig(tokenizer=str(tokenizer), renderer="qwen3", context_tokens=CONTEXT_TOKENS),
            lanes=LanesConfig(init=sessions, run=sessions),
            engines=(engine,),
        )
        pipe = Path(data) / "urls"
        os.mkfifo(pipe)
        # The pipe is opened for reading and writing, so that the open call does not wait for a writer, and so that no
        # end of file arrives when an agent closes its end.
        with os.fdopen(os.open(pipe, os.O_RDWR)) as lines:
            async with open_service(config) as opened, serving(*opened) as url:
                await opened.service.submit(_group(pipe, sessions))
                urls = await asyncio.to_thread(lambda: tuple(lines.readline().strip() for _ in range(sessions)))
                yield Parking(opened, url, urls)


def _group(pipe: Path, sessions: int) -> GroupSpec:
    task = {
        "instruction": "Wait.",
        "harness": {"agent": "bench.parked:ParkedAgent", "options": {"pipe": str(pipe)}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": "bench.sessions:grade"},
        "limits": {"turns": 100_000, "response_tokens": 1 << 30},
    }
    return GroupSpec.model_validate({"task": task, "n": sessions})
