"""A client and a server of Harbor's run API, written from the API's contract and not from Outrider's code. Both refuse
unknown and missing fields."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

STATUSES = ("completed", "failed", "timeout")
OFFLINE = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/work"\n'
REWARDS = """#!/bin/bash
test -f /work/answer.txt && reward=1 || reward=0.25
echo "{\\"reward\\": $reward, \\"speed\\": 0.5}" > /logs/verifier/reward.json
"""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RolloutDetail(Strict):
    prompt_token_ids: list[list[int]]
    completion_token_ids: list[list[int]]
    logprobs: list[list[float]]


class TokenUsage(Strict):
    n_input_tokens: int
    n_output_tokens: int
    n_cache_tokens: int | None
    cost_usd: float | None


class AgentRunResponse(Strict):
    run_id: str
    status: Literal["completed", "failed", "timeout"]
    rewards: dict[str, float] | None
    rollout_details: list[RolloutDetail] | None
    token_usage: TokenUsage | None
    metadata: dict[str, Any] | None
    error: str | None
    result_uri: str | None
    retry_count: int = Field(ge=0)


class RunBegun(Strict):
    run_id: str


class RunStatus(Strict):
    status: Literal["pending", "running", "completed", "failed", "timeout"]
    rewards: dict[str, float] | None = None
    error: str | None = None


def task_folder(
    folder: Path, *, toml: str = OFFLINE, test: str = REWARDS, instruction: str = "Write the answer.\n"
) -> Path:
    """Write a Harbor task into `folder`, and return the folder. By default, the task's tests write two rewards."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text(test)
    return folder


def packed(folder: Path) -> bytes:
    """Return a tar.gz archive of the folder. The paths in the archive begin with the folder's name."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        archive.add(folder, folder.name)
    return written.getvalue()


class HarborClient:
    """A client that calls a run server as verl's recipe does."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.http = http
        self.url = url
        self.headers = dict(headers or {})

    async def post(self, path: str, metadata: Any, archive: bytes, **headers: str) -> tuple[int, bytes]:
        form = aiohttp.FormData()
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        form.add_field("metadata", text, content_type="application/json")
        form.add_field("task_archive", io.BytesIO(archive), filename="task.tar.gz", content_type="application/gzip")
        async with self.http.post(self.url + path, data=form, headers=self.headers | headers) as reply:
            return reply.status, await reply.read()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.http.get(self.url + path, headers=self.headers) as reply:
            return reply.status, await reply.read()

    async def run(self, metadata: Any, archive: bytes) -> AgentRunResponse:
        """Start a run and wait for its end, in one request."""
        code, body = await self.post("/api/v1/runs", metadata, archive)
        assert code == 200, body
        return AgentRunResponse.model_validate_json(body)

    async def begin(self, metadata: Any, archive: bytes, **headers: str) -> str:
        code, body = await self.post("/api/v1/runs/async", metadata, archive, **headers)
        assert code == 200, body
        return RunBegun.model_validate_json(body).run_id

    async def status(self, run_id: str) -> RunStatus:
        code, body = await self.get(f"/api/v1/runs/async/{run_id}/status")
        assert code == 200, body
        return RunStatus.model_validate_json(body)

    async def ended(self, run_id: str) -> RunStatus:
        for _ in range(1000):
            if (found := await self.status(run_id)).status in STATUSES:
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"run {run_id} does not end")

    async def result(self, run_id: str) -> AgentRunResponse:
        code, body = await self.get(f"/api/v1/runs/async/{run_id}/result")
        assert code == 200, body
        return AgentRunResponse.model_validate_json(body)


class AgentSpec(Strict):
    """The fields of an agent that a run server accepts."""

    name: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    override_timeout_sec: float | None = None
    override_setup_timeout_sec: float | None = None
    max_timeout_sec: float | None = None
    llm_proxy_url: str | None = None
    kwargs: dict[str, Any] = {}


class VerifierSpec(Strict):
    override_timeout_sec: float | None = None
    max_timeout_sec: float | None = None
    disable: bool = False


class AgentRunRequest(Strict):
    job_id: str
    task_id: str
    task_path: str
    agent: AgentSpec
    timeout_multiplier: float = Field(default=1, ge=0.1)
    max_retries: int = Field(default=0, ge=0, le=10)
    verifier: VerifierSpec = VerifierSpec()
    environment_overrides: dict[str, Any] | None = None
    environment_kwargs: dict[str, Any] | None = None
    llm_proxy_url: str | None = None


Work = Callable[[AgentRunRequest, dict[str, bytes]], Awaitable[dict[str, Any]]]
"""Function that carries out a run. It gets the request and the contents of the task's files by path, and returns fields
of the response."""


class HarborServer:
    """A run server. The first `late` requests for the status of a run get a 404. While `down` is set, requests for a
    status get a 503. While `results_lost` is set, requests for a result get a 404."""

    def __init__(self, work: Work, *, late: int = 1) -> None:
        self.work = work
        self.late = late
        self.requests: dict[str, AgentRunRequest] = {}
        self.looks: dict[str, int] = {}
        self.runs: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.down = False
        self.results_lost = False

    async def submit(self, request: web.Request) -> web.Response:
        form = await request.post()
        if set(form) != {"metadata", "task_archive"}:
            return web.json_response({"detail": f"the parts are {sorted(form)}"}, status=422)
        metadata, archive = form["metadata"], form["task_archive"]
        assert isinstance(metadata, str)
        assert isinstance(archive, web.FileField)
        assert archive.filename == "task.tar.gz"
        assert None not in json.loads(metadata).values()
        asked = AgentRunRequest.model_validate_json(metadata)
        with tarfile.open(fileobj=archive.file, mode="r:gz") as tar:
            read = {each.name: tar.extractfile(each) for each in tar if each.isfile()}
            files = {name: file.read() for name, file in read.items() if file is not None}
        run_id = f"run-{len(self.runs)}"
        self.requests[run_id], self.looks[run_id] = asked, 0
        self.runs[run_id] = asyncio.get_running_loop().create_task(self._run(run_id, asked, files))
        return web.json_response({"run_id": run_id})

    async def _run(self, run_id: str, asked: AgentRunRequest, files: dict[str, bytes]) -> dict[str, Any]:
        response = {"run_id": run_id, "status": "completed", "retry_count": 0}
        return response | await self.work(asked, files)

    async def status(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run_id"]
        if self.down:
            return web.Response(status=503)
        self.looks[run_id] += 1
        if self.looks[run_id] <= self.late:
            return web.json_response({"detail": "not found"}, status=404)
        if not self.runs[run_id].done():
            return web.json_response({"status": "running"})
        found = self.runs[run_id].result()
        return web.json_response({name: found[name] for name in ("status", "rewards", "error") if name in found})

    async def result(self, request: web.Request) -> web.Response:
        run = self.runs[request.match_info["run_id"]]
        if not run.done() or self.results_lost:
            return web.json_response({"detail": "none"}, status=404)
        return web.json_response(run.result())


@asynccontextmanager
async def harbor_server(work: Work, **options: Any) -> AsyncIterator[tuple[HarborServer, str]]:
    server = HarborServer(work, **options)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/harbor/api/v1/runs/async", server.submit)
    app.router.add_get("/harbor/api/v1/runs/async/{run_id}/status", server.status)
    app.router.add_get("/harbor/api/v1/runs/async/{run_id}/result", server.result)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/harbor"
    finally:
        for task in server.runs.values():
            task.cancel()
        await runner.cleanup()
