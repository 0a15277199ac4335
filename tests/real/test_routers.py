"""The real routers of vLLM and SGLang, in front of scripted engines, pass the same checks as the fake router."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import pytest

from engines.contract import collect
from engines.routers import (
    CHECKS,
    KINDS,
    SESSION_HEADERS,
    Kind,
    Router,
    RunningRouter,
    Worlds,
    refuses_what_it_would_drop,
    worlds_of,
)
from outrider.engines.base import Engine, SamplingParams, SetsVersion
from outrider.engines.pool.pool import EnginePool
from outrider.spec import EngineSpec
from outrider.trajectory import FinishReason
from support.environments import environment_with
from support.ports import free_port
from support.tokenizer import write_tokenizer

from .conftest import TEST_SECONDS
from .test_vllm import NONSENSE, request_for
from .vllm_cpu import Starved, VllmServer, promptly, unless_starved

pytestmark = pytest.mark.real

ENVIRONMENT = Path(__file__).parent.parent.parent / ".venv-routers"
VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
START_SECONDS = 60
LOOK_SECONDS = 0.1
LONG = 4000
CACHE_AWARE = ("cache_aware", "--balance-abs-threshold", "32", "--balance-rel-threshold", "1.5")
"""The policy that docs/engines.md recommends."""
STICKY: dict[Kind, tuple[str, ...]] = {
    "vllm": ("sticky_least_loaded",),
    "sglang": ("manual", "--assignment-mode", "min_group"),
}
"""The policy with which each router keeps a session on one worker, by the header that names the session.
docs/engines.md lists these policies."""

APART: dict[Kind, str] = {"vllm": "--vllm-pd-disaggregation", "sglang": "--pd-disaggregation"}


@pytest.fixture(scope="module")
def router_python() -> Path:
    """The Python of an environment with both routers, installed if they are missing. Skips if they cannot be
    installed."""
    wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
    # Only wheels are installed. No router is compiled on this machine.
    wheels_only = [word for name in VERSIONS for word in ("--only-binary", name)]
    return Path(environment_with(ENVIRONMENT, wanted, *wheels_only))


def real_router(python: Path, folder: Path, policy: Sequence[str] | None = None) -> Router:
    """Return a function that runs a real router. The routers' logs are in `folder`. `policy` defaults to STICKY."""

    @asynccontextmanager
    async def router(kind: Kind, urls: Sequence[str], *, apart: bool) -> AsyncGenerator[RunningRouter, None]:
        url = f"http://127.0.0.1:{free_port()}"
        command = [str(python), "-m", f"{kind}_router.launch_router"]
        command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--prometheus-port", str(free_port())]
        if apart:
            bootstrap = ["9001"] if kind == "sglang" else []
            command += [APART[kind], "--prefill", urls[0], *bootstrap]
            command += [word for decode in urls[1:] for word in ("--decode", decode)]
        else:
            command += ["--policy", *(policy or STICKY[kind]), "--worker-urls", *urls]
        log = folder / f"{kind}-{url.rpartition(':')[2]}.log"
        with running(command, log), log.open() as said:
            async with aiohttp.ClientSession(url) as session:

                async def listed() -> list[dict[str, Any]]:
                    async with session.get("/workers") as response:
                        return list((await response.json())["workers"])

                async def until(count: int) -> None:
                    async with asyncio.timeout(START_SECONDS):
                        while True:
                            try:
                                if len(await listed()) == count:
                                    return
                            except aiohttp.ClientError:  # the router does not listen yet
                                pass
                            await asyncio.sleep(LOOK_SECONDS)

                async def add(worker: str) -> None:
                    async with session.post("/workers", json={"url": worker}) as response:
                        assert response.ok, await response.text()

                async def remove(worker: str) -> None:
                    rows = await listed()
                    (row,) = [row for row in rows if row["url"] == worker]
                    name = row.get("id") or quote(worker, safe="")
                    async with session.delete(f"/workers/{name}") as response:
                        assert response.ok, await response.text()
                    await until(len(rows) - 1)

                try:
                    await until(len(urls))
                except TimeoutError:
                    raise RuntimeError(f"{kind}-router did not start:\n{said.read()[-4000:]}") from None
                yield RunningRouter(url, add, remove)

    return router


@contextmanager
def running(command: list[str], log: Path) -> Any:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def router(router_python: Path, tmp_path: Path) -> Router:
    return real_router(router_python, tmp_path)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_router_as_an_engine(
    kind: Kind, check: Callable[[Worlds], Awaitable[None]], router: Router, tokenizer_folder: Path
) -> None:
    await check(worlds_of(kind, router, tokenizer_folder))


@pytest.mark.parametrize("kind", KINDS)
async def test_cache_aware_follows_a_growing_prompt_of_ids(
    kind: Kind, router_python: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """A growing prompt stays on its worker even under other sessions' names, because the router compares ids and not
    headers. Without a match, each call would go to the first worker, because no worker has load."""
    worlds = worlds_of(kind, real_router(router_python, tmp_path, CACHE_AWARE), tokenizer_folder)
    prompts = {"a": "one two three four five " * 8, "b": "red green blue white black " * 8}
    async with worlds(replies=[{"reply": "Yes, that is so.", "stall": 1}]) as world, world.engine() as engine:
        begun = [engine.generate(world.request(name, prompt=prompt)) for name, prompt in prompts.items()]
        for chunks in begun:  # both calls are in flight, so that the second goes to the idle worker
            await anext(chunks)
        for worker in world.workers:
            worker.release()
        for chunks in begun:
            async for _ in chunks:
                pass
        for turn in range(3):
            for name in prompts:
                prompts[name] += f"and then {name} "
                await collect(engine.generate(world.request(f"{name}-{turn}", prompt=prompts[name])))
        used: dict[str, set[int]] = {"a": set(), "b": set()}
        for seen in world.generated():
            used[seen.headers[SESSION_HEADERS[kind]][0]].add(seen.worker)
        assert [len(workers) for workers in used.values()] == [1, 1]
        assert used["a"] != used["b"]


async def test_what_a_real_router_would_drop_is_refused(router: Router, tokenizer_folder: Path) -> None:
    await refuses_what_it_would_drop(worlds_of("sglang", router, tokenizer_folder))


@pytest.mark.timeout(TEST_SECONDS)
async def test_a_real_vllm_behind_its_real_router(vllm_url: VllmServer, router: Router) -> None:
    """Through the router, the engine has the same health, ids and log-probabilities as without the router, and a pause
    cuts a generation."""
    greedy = request_for(NONSENSE, SamplingParams(max_tokens=60, temperature=0.0, min_tokens=60))
    async with router("vllm", [vllm_url.url], apart=False) as running, EnginePool() as pool:
        await pool.add(EngineSpec(kind="vllm", name="direct", url=vllm_url.url))
        await pool.add(EngineSpec(kind="vllm", name="routed", url=running.url))
        direct, routed = (cast(Engine, pool.engine(name)) for name in ("direct", "routed"))
        assert await routed.health() == await direct.health()
        once, again = await collect(direct.generate(greedy)), await collect(routed.generate(greedy))
        assert again.ids == once.ids
        assert again.logprobs == pytest.approx(once.logprobs, abs=1e-4)

        async def check_pause() -> None:
            chunks = routed.generate(request_for(NONSENSE, SamplingParams(max_tokens=LONG, min_tokens=LONG)))
            await promptly(anext(chunks))
            try:
                await promptly(routed.pause("abort"))
            except Starved:
                await routed.resume()
                raise
            assert [chunk async for chunk in chunks][-1].finish is FinishReason.ABORT

        try:
            await unless_starved(check_pause)
            await cast(SetsVersion, routed).set_version(1)
            await routed.resume()
            assert (await direct.health()).version == 1
            assert {span.version for span in (await collect(routed.generate(greedy))).versions} == {1}
        finally:
            await cast(SetsVersion, direct).set_version(0)
            await direct.resume()
