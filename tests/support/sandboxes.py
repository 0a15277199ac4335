"""A real sandbox without a node around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from outrider.sandbox.runtimes.base import Runtime, SandboxContext
from outrider.sandbox.runtimes.host_process.process import ProcessRuntime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec


@asynccontextmanager
async def process_sandbox(folder: Path, env: dict[str, str] | None = None) -> AsyncIterator[Runtime]:
    """Start a sandbox below `folder` with the environment variables `env`, and stop the sandbox at the end."""
    directory = folder / "sandbox"
    directory.mkdir()
    async with Host(folder) as host:
        context = SandboxContext(
            session_id="session-1",
            attempt=1,
            directory=directory,
            host=host,
            gateway_url="http://127.0.0.1:9",
            gateway_socket=folder / "gateway.sock",
        )
        runtime = ProcessRuntime.create(RuntimeSpec(kind="process", env=env or {}), context)
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()
