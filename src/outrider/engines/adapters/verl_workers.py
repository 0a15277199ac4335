"""The engine for verl's workers. A worker is a program that connects to the service, and answers the model calls that
the service sends.

Invariants:

- If a worker loses its connection, its calls do not wait: they go to another worker at once, or fail with
  EngineUnavailable if there is none.
- A call goes to another worker only if the earlier worker has sent no reply, or has replied with an error that the
  earlier worker itself may have caused.
- The ids of a reply are passed on only if the reply also has the ids of the prompt, and one log-probability for each
  id. Without these, the reply is text and never used for training, and its ids appear at most in the worker's report.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

import msgspec

from outrider.engines.adapters.openai import written_message
from outrider.engines.adapters.options import read_options
from outrider.engines.adapters.policy_versions import LabelSpan, spans_of
from outrider.engines.adapters.server_api import checked_logprobs, finish_of
from outrider.engines.base import Capability, ChatChunk, ChatRequest, EngineHealth, EngineOptions, SamplingParams
from outrider.errors import (
    ContextOverflow,
    EngineError,
    EngineMisbehaved,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
    RequestError,
)
from outrider.messages import Message, Role, ToolCall
from outrider.trajectory import LogprobKind, TokenMode, VersionSpan, WorkerReport, pack_ids, pack_logprobs

REFUSED: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "constraint": None,
}
"""Sampling parameters that the workers' protocol cannot express, with their usual values. A request with any other
value is refused."""

FINAL: dict[str, type[EngineError]] = {
    ContextOverflow.code: ContextOverflow,
    EngineRejected.code: EngineRejected,
    RequestError.code: EngineRejected,
    InvalidField.code: EngineRejected,
}
"""The error to raise for an `error_code` in a worker's reply. With these codes, the call would fail on any other
worker, too, so it is not sent again."""


class VerlWorkersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the engine for verl's workers. `call_seconds` is the maximum length of a call in seconds,
    `logprobs` the kind of the workers' log-probabilities."""

    call_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    logprobs: LogprobKind = LogprobKind.SAMPLING


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class CompletionResponse(msgspec.Struct, tag_field="type", tag="completion_response"):
    """A worker's reply to a call. Only Outrider's own workers send `prompt_token_ids` and the keys after it."""

    request_id: str
    completion_text: str | None = None
    content_text: str | None = None
    tool_calls: list[_Call] | None = None
    finish_reason: str | None = None
    error: Any = None
    token_ids: list[int] | None = None
    log_probs: list[float | None] | None = None
    timing: dict[str, float | None] | None = None
    worker_id: str | None = None
    node_id: str | int | None = None
    gpu_id: str | int | None = None
    rank_info: Any = None
    prompt_token_ids: list[int] | None = None
    weight_version: int | None = None
    weight_version_spans: list[VersionSpan] | None = None
    reasoning_text: str | None = None
    error_code: str | None = None


class VerlWorker:
    """A worker's connection. `send` queues a message to the worker. `keeps_ids` is True if the worker begins the prompt
    of a call with the call's `required_prefix_token_ids`."""

    def __init__(self, worker_id: str, send: Callable[[dict[str, Any]], None], *, keeps_ids: bool = False) -> None:
        self.worker_id = worker_id
        self.send = send
        self.keeps_ids = keeps_ids
        self.calls: dict[str, asyncio.Future[CompletionResponse]] = {}

    def take(self, response: CompletionResponse) -> None:
        """Give a reply to the call that waits for it. If the call was given up, the reply is dropped."""
        call = self.calls.get(response.request_id)
        if call is not None and not call.done():
            call.set_result(response)

    def lost(self) -> None:
        """Fail all open calls of the worker."""
        for call in self.calls.values():
            if not call.done():
                call.set_exception(EngineUnavailable(f"worker {self.worker_id!r} has lost its connection"))


class VerlWorkersEngine:
    """Implements `ChatEngine`, `SetsVersion` and `AwaitsWorkers`. A call goes to the worker with the least load."""

    mode = TokenMode.CAPTURE
    awaits_workers = True
    capabilities = frozenset({Capability.KEEPS_IDS})

    def __init__(self, options: EngineOptions) -> None:
        if options.url is not None:
            raise InvalidField(f"engine {options.name!r} has no URL: its workers connect to this service", field="url")
        own = read_options(VerlWorkersOptions, options.options)
        self.name = options.name
        self.logprob_kind = own.logprobs
        self._seconds = own.call_seconds
        self._workers: list[VerlWorker] = []
        self._numbers = itertools.count()
        self._version = 0

    @property
    def connected(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Do nothing, because workers connect by themselves."""

    async def close(self) -> None:
        for worker in self._workers:
            worker.lost()
        self._workers.clear()

    def attach(self, worker: VerlWorker) -> None:
        self._workers.append(worker)

    def detach(self, worker: VerlWorker) -> None:
        """Send no more calls to a worker, and fail its open calls."""
        if worker in self._workers:
            self._workers.remove(worker)
        worker.lost()

    async def set_version(self, version: int) -> None:
        """Set the version of replies that report no version."""
        self._version = version

    async def health(self) -> EngineHealth:
        if not self._workers:
            return EngineHealth(ok=False, detail=self._nobody().message)
        return EngineHealth(ok=True, detail=f"{self.connected} workers", version=self._version)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        check_sampling(request)
        version = self._version
        tried: set[VerlWorker] = set()
        failure: EngineUnavailable | None = None
        while True:
            free = [worker for worker in self._workers if worker not in tried]
            if not free:
                raise failure or self._nobody()
            worker = min(free, key=lambda each: len(each.calls))
            try:
                response = await self._answer(worker, request)
            except EngineUnavailable as error:
                tried.add(worker)
                failure = error
                continue
            yield self._chunk(request, response, version)
            return

    async def _answer(self, worker: VerlWorker, request: ChatRequest) -> CompletionResponse:
        """Send a request to a worker and return its reply. The time of sending and the duration are added to the
        reply's `timing`.

        Raises EngineUnavailable if the worker is lost, fails or does not answer in time. If the reply has an error code
        of FINAL, raises that error."""
        number = f"{request.request_id}-{next(self._numbers)}"
        answer: asyncio.Future[CompletionResponse] = asyncio.get_running_loop().create_future()
        worker.calls[number] = answer
        try:
            call = call_of(request, number)
            if worker.keeps_ids and request.known_ids:
                call["required_prefix_token_ids"] = request.known_ids
            dispatched, began = time.time(), time.monotonic()
            worker.send(call)
            async with asyncio.timeout(self._seconds):
                response = await answer
        except TimeoutError:
            raise EngineUnavailable(
                f"worker {worker.worker_id!r} did not answer in {self._seconds:g} s",
                hint="raise the engine's option call_seconds, or attach more workers",
            ) from None
        finally:
            del worker.calls[number]
        if response.error is not None:
            kind = FINAL.get(response.error_code or "", EngineUnavailable)
            raise kind(f"worker {worker.worker_id!r} failed: {str(response.error)[:1000]}")
        times = {"dispatched_at": dispatched, "relay_round_trip_ms": 1000 * (time.monotonic() - began)}
        worker_id = response.worker_id or worker.worker_id
        return msgspec.structs.replace(response, timing=(response.timing or {}) | times, worker_id=worker_id)

    def _chunk(self, request: ChatRequest, response: CompletionResponse, version: int) -> ChatChunk:
        if response.finish_reason is None:
            raise EngineMisbehaved(f"engine {self.name!r}: a worker sent a reply without finish_reason")
        content = response.completion_text if response.content_text is None else response.content_text
        reply = Message(
            role=Role.ASSISTANT,
            content=content or "",
            reasoning=response.reasoning_text or None,
            tool_calls=tuple(
                ToolCall(call.id or f"call_{request.request_id}_{index}", call.function.name, _text(call.function))
                for index, call in enumerate(response.tool_calls or [])
            ),
        )
        ids, finish = response.token_ids or [], finish_of(response.finish_reason, self.name)
        logprobs = checked_logprobs(ids, response.log_probs, self.name) if ids and response.log_probs else []
        report = WorkerReport(
            worker_id=response.worker_id,
            node_id=response.node_id,
            gpu_id=response.gpu_id,
            rank_info=response.rank_info,
            timing=response.timing or {},
        )
        if not (logprobs and response.prompt_token_ids):
            if logprobs:
                kept = {"output_ids": _packed(ids, self.name), "logprobs": pack_logprobs(logprobs)}
                report = msgspec.structs.replace(report, **kept)
            return ChatChunk(
                text=reply.content, reasoning=reply.reasoning or "", finish=finish, reply=reply, report=report
            )
        served = version if response.weight_version is None else response.weight_version
        labels = [LabelSpan(str(span.version), span.start, span.end) for span in response.weight_version_spans or ()]
        return ChatChunk(
            text=reply.content,
            reasoning=reply.reasoning or "",
            finish=finish,
            reply=reply,
            prompt_ids=response.prompt_token_ids,
            output_ids=ids,
            logprobs=logprobs,
            versions=spans_of(labels, length=len(ids), version=served, unlabelled=served),
            usage={"prompt_tokens": len(response.prompt_token_ids), "completion_tokens": len(ids)},
            report=report,
        )

    def _nobody(self) -> EngineUnavailable:
        return EngineUnavailable(f"engine {self.name!r}: no worker is connected", hint="connect one to /ws/worker")


def check_sampling(request: ChatRequest) -> None:
    """Raise EngineRejected for a sampling parameter that the workers' protocol cannot express, or if the request
    switches the model's reasoning on or off."""
    sampling: SamplingParams = request.sampling
    for name, usual in REFUSED.items():
        if getattr(sampling, name) != usual:
            raise EngineRejected(
                f"verl's workers take no {name}", hint=f"leave {name} out, or attach an engine that takes {name}"
            )
    if request.thinking is not None:
        raise EngineRejected("verl's workers cannot switch the model's reasoning", hint="leave the switch out")


def call_of(request: ChatRequest, number: str) -> dict[str, Any]:
    """Return the message that sends a request to a worker. `number` identifies the call."""
    sampling = request.sampling
    return {
        "type": "completion_request",
        "request_id": number,
        "session_id": request.session_key,
        "messages": [written_message(message, reasoning=True) for message in request.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "tools": list(request.tools) or None,
        "repetition_penalty": sampling.repetition_penalty,
        "stream": False,
    }


def _packed(ids: list[int], engine: str) -> bytes:
    """Pack the ids of a worker's reply. Raises EngineMisbehaved if a number cannot be an id."""
    if min(ids) < 0:
        raise EngineMisbehaved(f"engine {engine!r}: a worker sent the id {min(ids)}")
    try:
        return pack_ids(ids)
    except OverflowError as error:
        raise EngineMisbehaved(f"engine {engine!r}: a worker sent the id {max(ids)}") from error


def _text(function: _Function) -> str:
    given = function.arguments
    return given if isinstance(given, str) else msgspec.json.encode(given).decode()
