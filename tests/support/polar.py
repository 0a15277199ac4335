"""A client of Polar, written from Polar's wire format and not from Outrider's code. It refuses unknown fields, missing
fields, and values of other types."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

M = TypeVar("M", bound="Strict")
State = Literal[
    "REGISTERED",
    "INITIALIZING",
    "READY",
    "RUNNING",
    "POST_RUN",
    "BUILDING",
    "EVALUATING",
    "COMPLETED",
    "ERROR",
    "TIMEOUT",
]
Ended = Literal["COMPLETED", "TIMEOUT", "ERROR"]
TaskState = Literal["running", "completed", "failed", "cancelling", "cancelled"]
Mask = Literal[0, 1]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SessionTiming(Strict):
    register_to_init_queue_ms: float = Field(ge=0)
    init_ms: float = Field(ge=0)
    run_ms: float = Field(ge=0)
    postrun_ms: float = Field(ge=0)


class Trace(Strict):
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[Mask]
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    finish_reason: str | None
    response_logprobs: list[float] | None
    reward: float | None
    metadata: dict[str, Any]

    def model_post_init(self, _: Any) -> None:
        assert len(self.loss_mask) == len(self.response_ids)
        assert self.response_logprobs is None or len(self.response_logprobs) == len(self.response_ids)


class Trajectory(Strict):
    status: Ended
    metadata: dict[str, Any]
    traces: list[Trace]
    error: str | None


class SessionResult(Strict):
    session_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")
    task_id: str
    status: Ended
    trajectory: Trajectory
    timing: SessionTiming
    node_id: str | None
    error: str | None
    metadata: dict[str, Any]


class Submitted(Strict):
    task_id: str
    status: TaskState


class TaskResult(Strict):
    task_id: str
    status: TaskState
    results: list[SessionResult]
    result_paths: list[str]


class TaskStatus(TaskResult):
    total_sessions: int
    completed_sessions: int


class ListedTask(Strict):
    task_id: str
    status: TaskState
    harness: str | None
    model: str | None
    num_samples: int
    completed_sessions: int
    errored_sessions: int
    mean_reward: float | None
    mean_traces: float | None
    mean_completions: float | None
    created_at: float
    updated_at: float
    source: str


class Tasks(Strict):
    tasks: list[ListedTask]


class TaskSession(Strict):
    session_id: str
    task_id: str
    status: State
    node_id: str | None
    reward: float | None
    timing: SessionTiming | None
    error: str | None


class TaskSessions(Strict):
    task_id: str
    sessions: list[TaskSession]


class Metrics(Strict):
    init_queue_depth: int
    init_inflight: int
    ready_depth: int
    run_inflight: int
    postrun_queue_depth: int
    postrun_inflight: int


class GatewayNodeInfo(Strict):
    node_id: str
    gateway_url: str
    max_init_workers: int = Field(ge=1)
    max_run_workers: int = Field(ge=1)
    max_postrun_workers: int = Field(ge=1)
    heartbeat_interval_seconds: float
    metrics: Metrics
    dispatch_reservations: int
    healthy: bool
    draining: bool
    last_heartbeat: float


class Pipeline(Strict):
    pending_sessions: int


class Nodes(Strict):
    nodes: list[GatewayNodeInfo]


class RolloutStatus(Strict):
    tasks: dict[str, TaskState]
    pipeline: Pipeline
    nodes: Nodes


class Health(Strict):
    status: Literal["ok"]
    nodes: int


class Inference(Strict):
    paused: bool
    inflight: int
    base_url: str | None
    engine: str | None


class GatewayHealth(Strict):
    status: str
    node_id: str
    gateway_url: str
    inference: Inference
    metrics: Metrics
    active_status_counts: dict[State, int]
    active_sessions: int
    available_init: int
    available_run: int
    available_postrun: int
    completion_persistence: dict[str, Any] | None


class GatewaySession(Strict):
    session_id: str
    task_id: str
    status: State
    age_seconds: float
    idle_seconds: float
    completion_count: int
    model_requested: str | None
    model_used: str | None
    api_type: str | None
    created_at: float
    node_id: str | None


class GatewaySessions(Strict):
    sessions: list[GatewaySession]
    node_id: str


class SessionInfo(Strict):
    session_id: str
    task_id: str
    created_at: float
    completion_count: int
    status: State
    result: SessionResult | None = None


class Dispatched(Strict):
    session_id: str
    task_id: str
    status: Literal["REGISTERED"]
    node_id: str


class CompletionRecord(Strict):
    completion_id: str
    timestamp: float
    request: dict[str, Any]
    original_request: dict[str, Any]
    response: dict[str, Any]
    metadata: dict[str, Any]


class Completions(Strict):
    session_id: str
    completions: list[CompletionRecord]
    node_id: str


class DeletedSession(Strict):
    session_id: str
    deleted: bool
    messages_deleted: int


class Refusal(Strict):
    detail: str


class Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class PolarClient:
    """Calls the routes of Polar at `url`. Raises `Refused` if the status is not 200."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def call(self, kind: type[M], method: str, path: str, body: Any = None, **query: Any) -> M:
        return kind.model_validate_json(await self.text(method, path, body, **query))

    async def text(self, method: str, path: str, body: Any = None, **query: Any) -> bytes:
        async with self._http.request(method, f"{self._url}{path}", json=body, params=query) as reply:
            text = await reply.read()
            if reply.status != 200:
                raise Refused(reply.status, Refusal.model_validate_json(text).detail)
            return text

    async def submit(self, task: dict[str, Any]) -> Submitted:
        return await self.call(Submitted, "POST", "/rollout/task/submit", task)

    async def task(self, task_id: str) -> TaskStatus:
        return await self.call(TaskStatus, "GET", f"/rollout/task/{task_id}")

    async def cancel(self, task_id: str, **query: Any) -> TaskStatus:
        return await self.call(TaskStatus, "DELETE", f"/rollout/task/{task_id}", **query)

    async def nodes(self) -> list[GatewayNodeInfo]:
        return TypeAdapter(list[GatewayNodeInfo]).validate_json(await self.text("GET", "/nodes"))

    async def events(self, path: str = "/events", **headers: str) -> Any:
        """Yield the name, id and data of each event."""
        async with self._http.get(f"{self._url}{path}", headers=headers) as reply:
            assert (reply.status, reply.content_type) == (200, "text/event-stream")
            fields: dict[str, str] = {}
            async for line in reply.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif fields:
                    yield fields["event"], fields.get("id"), json.loads(fields["data"])
                    fields = {}
