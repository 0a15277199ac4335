"""A strict client of ProRL Agent's server, written from the server's contract and not from Outrider's code. Unknown and
missing fields are errors."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Status(Strict):
    status: str


class ServerStatus(Strict):
    status: Literal["running"]
    pending_jobs: int
    running: bool
    jobs: int
    init: int
    run: int
    eval: int


class Call(Strict):
    name: str
    arguments: dict[str, Any] | str


class ProrlMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[Call] | None = None
    token_ids: list[int]
    input_ids: list[int] | None = None
    logprobs: list[float] | None = None


class Timing(Strict):
    init_time: float
    run_time: float
    eval_time: float
    others_time: float
    counted_elapsed: float
    timeout_triggered: bool
    init: float
    run: float
    eval: float
    others: float
    timeout: bool


class Result(Strict):
    instance_id: str
    trajectory_id: int | str
    git_patch: str
    success: bool
    finish: bool
    resolved: bool | None
    report: dict[str, Any] | None
    messages: list[ProrlMessage]
    tools: list[dict[str, Any]]
    end_properly: bool
    error: str | None
    traceback: str | None
    critical_error: Literal["init", "run", "eval", "timeout", "final_result"] | None
    filter: bool
    timing: Timing


class Detail(Strict):
    detail: str


M = TypeVar("M", bound=Strict)


class Declined(Exception):
    """The server's reply has a status other than 200."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class ProrlClient:
    def __init__(self, url: str, **settings: Any) -> None:
        self.url = url
        self._settings = settings

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(**self._settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        json = {} if body is None else {"json": body}
        async with self._http.request(method, f"{self.url}{path}", **json) as reply:
            return reply.status, await reply.read()

    async def call(self, kind: type[M], method: str, path: str, body: Any = None) -> M:
        status, content = await self.send(method, path, body)
        if status != 200:
            raise Declined(status, Detail.model_validate_json(content).detail)
        return kind.model_validate_json(content)

    async def start(self) -> str:
        return (await self.call(Status, "POST", "/start")).status

    async def stop(self) -> str:
        return (await self.call(Status, "POST", "/stop")).status

    async def status(self) -> ServerStatus:
        return await self.call(ServerStatus, "GET", "/status")

    async def cancel(self, job_id: str) -> str:
        return (await self.call(Status, "POST", "/cancel", {"job_id": job_id})).status

    async def add_llm_server(self, address: str) -> str:
        return (await self.call(Status, "POST", "/add_llm_server", {"address": address})).status

    async def clear_llm_server(self) -> str:
        return (await self.call(Status, "POST", "/clear_llm_server")).status

    async def process(
        self, instance: dict[str, Any], sampling_params: dict[str, Any] | None = None, job_id: str | None = None
    ) -> Result:
        body: dict[str, Any] = {"instance": instance, "sampling_params": sampling_params or {}}
        if job_id is not None:
            body["job_id"] = job_id
        result = await self.call(Result, "POST", "/process", body)
        if result.messages:
            assert result.messages[-1].role == "assistant"
        for message in result.messages:
            assert message.logprobs is None or len(message.logprobs) == len(message.token_ids)
        return result
