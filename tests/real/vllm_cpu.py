"""A real vLLM server on the CPU, for as long as a block lasts.

The server runs in a separate Python environment, which `scripts/install_vllm_cpu.py` makes. The module does not depend
on Outrider. Invariant: when the block is left, no process of the server and none of its files in temporary folders
remain.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest

from support.ports import free_port

INSTALLER = Path(__file__).parents[2] / "scripts" / "install_vllm_cpu.py"
EXIT_CANNOT = 3
CONTEXT_TOKENS = 16384
START_SECONDS = 480
STOP_SECONDS = 15
STOP_POLL_SECONDS = 0.05
TAIL_BYTES = 4000
ERROR_LINES = 120
PROMPT_SECONDS = 1.0
ATTEMPTS = 6
STARVED = "vLLM answered nothing until its generations had ended: the machine is too loaded for this test"
# If the tests are killed, Linux sends SIGTERM to the server (PR_SET_PDEATHSIG is 1), and the server exits.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

T = TypeVar("T")


@dataclass(frozen=True)
class VllmServer:
    """A ready server: its root URL, the model's served name, the folder that it serves, whether
    `/inference/v1/generate` is open, its log file, which exists as long as the server, and further options."""

    url: str
    model: str
    model_folder: Path
    token_route: bool
    log: Path
    switches: tuple[str, ...] = ()


def vllm_environment(*, install: bool) -> Path:
    """Return the folder of the environment with vLLM for CPU. If `install` is True, a missing environment is installed.
    Skips the test if there is no environment."""
    command = [sys.executable, str(INSTALLER), *([] if install else ["--check"])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == EXIT_CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{INSTALLER.name} broke:\n{done.stdout}\n{done.stderr}"
    return Path(done.stdout.splitlines()[-1])


@asynccontextmanager
async def vllm_server(
    prefix: Path,
    model_folder: Path,
    *,
    model: str = "policy",
    token_route: bool = True,
    context_tokens: int = CONTEXT_TOKENS,
    switches: Sequence[str] = (),
) -> AsyncIterator[VllmServer]:
    """Serve `model_folder` with the vLLM installed in `prefix`: float32, eager, tool calls parsed.

    `token_route` is whether `/inference/v1/generate` is open; `switches` are further options of the server. Raises
    RuntimeError with the end of the server's log if the server is not ready in time, or if the server exits before the
    block ends.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        log = Path(folder) / "server.log"
        server = VllmServer(
            url=f"http://127.0.0.1:{port}",
            model=model,
            model_folder=model_folder,
            token_route=token_route,
            log=log,
            switches=tuple(switches),
        )
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *_command(prefix, server, port, context_tokens),
                env=_environment(prefix, folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            await _ready(server, process, log)
            yield server
            await asyncio.sleep(0.1)  # this loop may not have run since the process has ended
            if process.returncode is not None:
                raise RuntimeError(f"vLLM exited with {process.returncode} during the tests:\n{_tail(log)}")
        finally:
            await asyncio.shield(_stop(process))


class SharedVllm:
    """One server for many tests. vLLM for CPU sometimes crashes on a busy machine. A server that has ended during a
    test is replaced before the next test, and the errors in its log are printed."""

    def __init__(self, prefix: Path, model_folder: Path) -> None:
        self._prefix = prefix
        self._model_folder = model_folder
        self._running = AsyncExitStack()
        self._server: VllmServer | None = None

    async def server(self) -> VllmServer:
        """Return a server that is healthy."""
        await self.drop_if_ended()
        if self._server is None:
            self._server = await self._running.enter_async_context(vllm_server(self._prefix, self._model_folder))
        return self._server

    async def drop_if_ended(self) -> None:
        """If the server is no longer healthy, print the errors in its log, and stop its remaining processes."""
        if self._server is None:
            return
        async with aiohttp.ClientSession() as http:
            if await _healthy(http, self._server):
                return
        print(f"vLLM has ended:\n{_first_errors(self._server.log)}")
        await self.close()

    async def close(self) -> None:
        self._server = None
        try:
            await self._running.aclose()
        except RuntimeError as error:
            print(str(error).partition("\n")[0])


def _command(prefix: Path, server: VllmServer, port: int, context_tokens: int) -> list[str]:
    # The `vllm` program of this wheel does not start, because it looks for a distribution named `vllm`.
    flags = {
        "--model": str(server.model_folder),
        "--served-model-name": server.model,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(context_tokens),
        "--dtype": "float32",
        "--generation-config": "vllm",
        "--max-logprobs": "20",
        "--tool-call-parser": "hermes",
    }
    switches = ["--enforce-eager", "--enable-auto-tool-choice"]
    if server.token_route:
        switches.append("--enable-scale-out")
    valued = [part for flag in flags.items() for part in flag]
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [str(prefix / "bin" / "python"), "-c", LAUNCH, *module, *valued, *switches, *server.switches]


def _environment(prefix: Path, temporary: str) -> dict[str, str]:
    return {
        **os.environ,
        "TMPDIR": temporary,  # vLLM leaves sockets and rendezvous files in this folder
        "VLLM_CACHE_ROOT": str(prefix / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(prefix / "cache" / "inductor"),  # saves 18 s of the first request
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "2",
    }


async def _ready(server: VllmServer, process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until the server has replied to a first request, which compiles the sampler and takes seconds."""
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as http:
            while not await _healthy(http, server):
                if process.returncode is not None:
                    raise RuntimeError(f"vLLM exited with {process.returncode}:\n{_tail(log)}")
                await asyncio.sleep(0.25)
            body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 0, "seed": 1}
            async with http.post(f"{server.url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise RuntimeError(f"vLLM's first reply: {reply.status} {await reply.text()}\n{_tail(log)}")
    except TimeoutError as error:
        raise RuntimeError(f"vLLM was not ready after {START_SECONDS} s:\n{_tail(log)}") from error


async def _healthy(http: aiohttp.ClientSession, server: VllmServer) -> bool:
    try:
        async with http.get(f"{server.url}/health") as reply:
            return reply.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the whole process group, first with SIGTERM, so that shared memory is released."""
    if _signal(process.pid, signal.SIGTERM):
        for _ in range(int(STOP_SECONDS / STOP_POLL_SECONDS)):
            await asyncio.sleep(STOP_POLL_SECONDS)
            if not _signal(process.pid, 0):
                break
        else:
            _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group. Returns False if the group has no process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


class Starved(Exception):
    """vLLM did not answer while it sampled. The threads of its engine's process that read requests and send tokens do
    not always get Python's lock beside a tiny model's short steps, least of all on a loaded machine. Then the first
    token comes with the last one, and neither a pause nor a hang-up has an effect."""


async def promptly(answer: Awaitable[T]) -> T:
    """Return the answer of a vLLM that is sampling. Raises Starved if the answer took PROMPT_SECONDS or more."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    found = await answer
    if clock() - begun >= PROMPT_SECONDS:
        raise Starved
    return found


async def unless_starved(check: Callable[[], Awaitable[None]]) -> None:
    """Run a check of a generation that is cut off, and repeat it while vLLM is starved. Skips the test if vLLM is
    starved in all ATTEMPTS runs."""
    for _ in range(ATTEMPTS):
        with suppress(Starved):
            await check()
            return
    pytest.skip(STARVED)


def _first_errors(log: Path) -> str:
    """Return the first errors of a log, which contain the cause of a crash. Later errors only report that the engine's
    process has ended."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if " ERROR " in line or "Fatal" in line]
    return "\n".join(lines[:ERROR_LINES]) or _tail(log)


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
