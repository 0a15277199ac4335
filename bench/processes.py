"""The other processes of a benchmark: an engine behind vLLM's protocol, a service of parked sessions, and the floors.

    python -m bench.processes upstream TOKENIZER REPLY_TOKENS
    python -m bench.processes batch    TOKENIZER PROTOCOL TOKENS_PER_SECOND EVENT_TOKENS REPLY_TOKENS
    python -m bench.processes gateway  TOKENIZER PROTOCOL UPSTREAM_URL SESSIONS PROCESSES
    python -m bench.processes proxy    UPSTREAM_URL
    python -m bench.processes relay    UPSTREAM_URL
    python -m bench.processes service  TOKENIZER DATA RUN_LANE STORE_URL PAUSES
    python -m bench.processes echo
    python -m bench.processes pages    SERVICE_URL GROUP SESSION

Each program prints its URLs, one per line (`pages` prints the URL of the service), and ends when its standard input
ends, so that no program outlives its parent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvicorn
import uvloop

from bench.batch_engine import BatchEngine
from bench.corpus import Corpus
from bench.floors import Proxy, Receive, RoundTrip, Scope, Send, relay, round_trips
from bench.page_readers import PageReader, five_pages
from bench.parked import CONTEXT_TOKENS, parked
from bench.processor_time import descendants_of, ticks_of
from outrider.api import server
from outrider.cli.event_loop import short_pauses
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig, SandboxesConfig
from outrider.engines.base import EngineOptions
from outrider.lab.fakes.engine_servers.app import EngineProtocol, engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.service.assembly import open_service
from outrider.spec import EngineSpec

ROOT = Path(__file__).parent.parent
START_SECONDS = 60.0
STOP_SECONDS = 10.0
TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A running process. `control` is the control API of a service of parked sessions."""

    def __init__(self, child: asyncio.subprocess.Process, urls: tuple[str, ...]) -> None:
        self.urls = urls
        self.control = ""
        self.kill = child.kill
        self._child = child
        self._pid = child.pid

    @property
    def ended(self) -> bool:
        return self._child.returncode is not None

    def cpu_seconds(self) -> float:
        """Return the processor time used so far by all threads of the process, in seconds (proc(5), fields utime and
        stime)."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def cpu_seconds_of_all(self) -> float:
        """Return the processor time of this process and of the processes that it has started, in seconds."""
        return sum(map(ticks_of, (self._pid, *descendants_of(self._pid)))) / TICKS

    def memory_mib(self) -> float:
        """Return the present resident memory in MiB (proc(5), VmRSS)."""
        return self._status("VmRSS")

    def peak_memory_mib(self) -> float:
        """Return the peak resident memory in MiB (proc(5), VmHWM)."""
        return self._status("VmHWM")

    def _status(self, field: str) -> float:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self._pid}/status").read_text().splitlines())
        return int(lines[field].split()[0]) / 1024


class World(msgspec.Struct, frozen=True):
    """An upstream and a gateway in front of it, in processes of their own."""

    upstream: Process
    gateway: Process


class Floors(msgspec.Struct, frozen=True):
    """The floors in front of an upstream, in place of a gateway, in processes of their own."""

    proxy: Process
    relay: Process


@asynccontextmanager
async def world(corpus: Corpus, *, reply_tokens: int, sessions: int) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        folder = str(corpus.folder)
        upstream = await stack.enter_async_context(_process(1, "upstream", folder, str(reply_tokens)))
        gateway = await stack.enter_async_context(service_of(corpus, upstream.urls[0], sessions=sessions))
        yield World(upstream, gateway)


@asynccontextmanager
async def upstream(corpus: Corpus, *, reply_tokens: int) -> AsyncIterator[Process]:
    async with _process(1, "upstream", str(corpus.folder), str(reply_tokens)) as process:
        yield process


@asynccontextmanager
async def batch_engine(
    corpus: Corpus, protocol: EngineProtocol, *, tokens_per_second: float, event_tokens: int, reply_tokens: int
) -> AsyncIterator[Process]:
    """Run an engine with the pace of a batch engine (`batch_engine.py`). Its replies are as long as a request allows,
    up to `reply_tokens`."""
    numbers = map(str, (tokens_per_second, event_tokens, reply_tokens))
    async with _process(1, "batch", str(corpus.folder), protocol, *numbers) as process:
        yield process


@asynccontextmanager
async def service_of(
    corpus: Corpus, engine_url: str, *, sessions: int, protocol: EngineProtocol = "vllm", processes: int = 1
) -> AsyncIterator[Process]:
    """Run a service of parked sessions that uses an engine's server. The URLs of the process are the base URLs of its
    sessions."""
    arguments = (str(corpus.folder), protocol, engine_url, str(sessions), str(processes))
    async with _process(sessions + 1, "gateway", *arguments) as process:
        *urls, process.control = process.urls
        process.urls = tuple(urls)
        yield process


@asynccontextmanager
async def service_process(
    tokenizer: Path, data: Path, run_lane: int, store_url: str, *, pauses: str = ""
) -> AsyncIterator[Process]:
    """Run a service on a scripted engine. If the URL of the store is empty, the store is in the folder `data`. The
    caller may kill the process. If `pauses` is "python", garbage is collected as Python does by default."""
    async with _process(1, "service", str(tokenizer), str(data), str(run_lane), store_url, pauses) as process:
        yield process


@asynccontextmanager
async def floors(url: str) -> AsyncIterator[Floors]:
    async with _process(1, "proxy", url) as proxy, _process(1, "relay", url) as relay:
        yield Floors(proxy, relay)


@asynccontextmanager
async def a_round_trip() -> AsyncIterator[RoundTrip]:
    """Yield round trips to the server of `echo`."""
    async with echo() as server, round_trips(server.urls[0]) as trips:
        yield trips


@asynccontextmanager
async def echo() -> AsyncIterator[Process]:
    """Run a server that replies to every request with a few bytes and runs no code of Outrider."""
    async with _process(1, "echo") as process:
        yield process


@asynccontextmanager
async def open_pages(service: str, group: str, session: str) -> AsyncIterator[Process]:
    """Run the readers of five pages of a service, of which one shows a group and one a session."""
    async with _process(1, "pages", service, group, session) as process:
        yield process
        if process.ended:
            raise RuntimeError("the readers of pages have failed: see their error above")


@asynccontextmanager
async def _process(urls: int, *arguments: str) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.processes", *arguments), stdin=pipe, stdout=pipe, cwd=ROOT
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            lines = [(await child.stdout.readline()).decode().strip() for _ in range(urls)]
        if not all(lines):
            raise RuntimeError(f"the process {arguments[0]!r} ended before it was ready")
        yield Process(child, tuple(lines))
    finally:
        child.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


async def _serve_upstream(folder: str, reply_tokens: str) -> None:
    corpus = Corpus(Path(folder))
    reply = {"ids": corpus.reply(int(reply_tokens))}
    engine = ScriptedEngine(
        EngineOptions(name="upstream", tokenizer=folder, options={"replies": [reply], "context_tokens": CONTEXT_TOKENS})
    )
    async with serving(engine_app(engine, "vllm", ServeSettings(tokenizer=corpus.tokenizer))) as url:
        await _until_told([url])


async def _serve_batch(
    folder: str, protocol: EngineProtocol, tokens_per_second: str, event_tokens: str, reply_tokens: str
) -> None:
    corpus = Corpus(Path(folder))
    script = {
        "replies": [{"ids": corpus.reply(int(reply_tokens))}],
        "chunk_tokens": int(event_tokens),
        "context_tokens": CONTEXT_TOKENS,
    }
    engine = BatchEngine(
        ScriptedEngine(EngineOptions(name="batch", tokenizer=folder, options=script)),
        tokens_per_second=float(tokens_per_second),
        event_tokens=int(event_tokens),
    )
    # The engine has no tokenizer, because the client does not read the texts that it would decode.
    async with serving(engine_app(engine, protocol, ServeSettings(incremental=True))) as url:
        await _until_told([url])


async def _serve_gateway(folder: str, protocol: EngineProtocol, url: str, sessions: str, processes: str) -> None:
    spec = EngineSpec(kind=protocol, url=url)
    async with (
        parked(Path(folder), spec, sessions=int(sessions), processes=int(processes)) as parking,
        short_pauses(lambda: False, parking.opened.service.failures),
    ):
        await _until_told([*parking.base_urls, parking.url])


async def _serve_service(tokenizer: str, data: str, run_lane: str, store_url: str, pauses: str = "") -> None:
    config = Config(
        port=0,
        data=Path(data),
        store=store_url or None,
        model=ModelConfig(tokenizer=tokenizer, renderer="qwen3", context_tokens=CONTEXT_TOKENS),
        lanes=LanesConfig(run=int(run_lane)),
        # These limits may exceed the machine's resources, because the sandboxes are simulated in memory and use none.
        sandboxes=SandboxesConfig(cpus=float(run_lane), memory_mb=int(run_lane) * 1024),
        plugins=PluginsConfig(allow=("*",)),
        engines=(
            EngineSpec(
                kind="scripted", options={"replies": ["It is done.<|im_end|>"], "context_tokens": CONTEXT_TOKENS}
            ),
        ),
    )
    async with (
        open_service(config) as opened,
        server.serving(*opened) as url,
        # With "python", Python's own collector runs, as the baseline for the pauses.
        nullcontext()
        if pauses == "python"
        else short_pauses(lambda: not opened.service.scheduler.under_way, opened.service.failures),
    ):
        await _until_told([url])


async def _serve_proxy(url: str) -> None:
    proxy = Proxy(url)
    await _serve_bare(proxy)
    await proxy.close()


async def _serve_relay(url: str) -> None:
    async with relay(url) as own:
        await _until_told([own])


async def _serve_echo() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            """The whole request is read first."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    await _serve_bare(answer)


async def _open_pages(url: str, group: str, session: str) -> None:
    async with AsyncExitStack() as stack:
        https = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(5)]
        pages = five_pages(group, session)
        readers = [PageReader(http, url, reads) for http, reads in zip(https, pages, strict=True)]
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(reader.run()) for reader in readers]
            for reader in readers:
                await reader.opened.wait()
            await _until_told([url])
            for task in reading:
                task.cancel()


async def _serve_bare(app: Any) -> None:
    """Serve the application with unmodified uvicorn."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # With uvicorn's default of 5 seconds, a connection could be closed at the moment when a slow client uses it
        # again.
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=75
        )
        server = uvicorn.Server(config)
        serving_it = asyncio.create_task(server.serve(sockets=[listening]))
        await _until_told([f"http://127.0.0.1:{listening.getsockname()[1]}"])
        server.should_exit = True
        await serving_it


async def _until_told(urls: list[str] | tuple[str, ...]) -> None:
    print(*urls, sep="\n", flush=True)
    ended = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "upstream": _serve_upstream,
    "batch": _serve_batch,
    "gateway": _serve_gateway,
    "service": _serve_service,
    "proxy": _serve_proxy,
    "relay": _serve_relay,
    "echo": _serve_echo,
    "pages": _open_pages,
}


async def _main(role: str, *arguments: str) -> None:
    await ROLES[role](*arguments)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(*sys.argv[1:]))
