"""The fake E2B server, in its own process or in the test's event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.lab.fakes.e2b_server.app import FakeE2B, serving_e2b


def variables(url: str, key: str = FakeE2B.key) -> dict[str, str]:
    """Return the environment variables with which Outrider and E2B's SDK find the server."""
    return {"E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}


@asynccontextmanager
async def e2b(environment: pytest.MonkeyPatch, server: FakeE2B | None = None) -> AsyncIterator[FakeE2B]:
    """Run a server in this process, and set the environment variables with which clients find it."""
    async with serving_e2b(server or FakeE2B()) as server:
        for name, value in variables(server.url).items():
            environment.setenv(name, value)
        yield server


class E2BProcess:
    """A server in its own process, for several tests, each of which has its own event loop. `start` starts the server
    if necessary, and returns the environment variables for its clients."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._variables: dict[str, str] = {}

    def start(self) -> Mapping[str, str]:
        if self._process is None:
            tests = Path(__file__).parent.parent
            env = {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
            command = [sys.executable, "-m", "support.e2b"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            assert self._process.stdout is not None
            self._variables = variables(self._process.stdout.readline().strip())
        return self._variables

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.communicate(timeout=30)
            self._process = None


async def serve() -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving_e2b(FakeE2B()) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve())
