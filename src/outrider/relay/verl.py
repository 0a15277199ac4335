"""`ProxyWorker` connects an engine to the session proxy of verl's recipe. The worker opens a WebSocket to the proxy.

    await ProxyWorker("http://proxy:8080", engine, renderer, worker_id="worker-0").run()

The proxy is the recipe's own proxy, or `outrider serve --compat verl` (docs/compat/verl.md). The proxy sends messages.
The worker renders the messages to ids, samples a reply, and parses the reply's tool calls. Invariants:

- A response contains the engine's ids and one log-probability for each of them.
- If the proxy sends the recorded ids of a conversation, the prompt begins with them. All messages are rendered again
  only if the new messages cannot be appended, for example because the recorded ids do not end with a stop id.
- When a connection ends, the model calls of this connection are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import numpy as np

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.retries import RetryPolicy
from outrider.dialects.chat.reply import tool_call_object
from outrider.dialects.chat.request import parse_message
from outrider.engines.base import Chunk, Engine, GenerateRequest, SamplingParams
from outrider.errors import (
    Conflict,
    EngineMisbehaved,
    EngineUnavailable,
    Forbidden,
    InvalidField,
    NotFound,
    OutriderError,
    Unauthorized,
)
from outrider.messages import Message, Role, ToolSpec
from outrider.plugins import plugin_code
from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.rendering.reply_stream import ReplyStream
from outrider.trajectory import FinishReason, VersionSpan
from outrider.wire.link_protocol import PROXY_STATUSES
from outrider.wire.tls import trusting

log = logging.getLogger("outrider.relay")

RECONNECTING = RetryPolicy(first=1.0, longest=60.0)
CONNECT_SECONDS = 20.0
"""Time limit for opening the connection, and again for the proxy's acknowledgement."""
CLOSE_SECONDS = 2.0
PING_SECONDS = 30.0
SILENT_SECONDS = 90.0
"""The connection is closed if no message arrives for this many seconds. Both sides send a ping every PING_SECONDS."""
MAX_FRAME = 100 << 20
"""Maximum size of a message in bytes, set by the protocol."""
NO_HELLO, NOT_SERVED = 4001, 4002
REFUSALS: dict[int, type[OutriderError]] = {
    NO_HELLO: EngineMisbehaved,
    NOT_SERVED: Conflict,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
}
"""The errors that `run` raises. A key is a close code, or the HTTP status of a failed attempt to connect. After such a
code or status, reconnecting would fail again (but see PROXY_STATUSES). In all other cases, the worker reconnects."""
HINTS = {
    NOT_SERVED: "start the proxy in its relay mode",
    401: "give the proxy's token: ProxyWorker(..., token=...)",
    403: "give an admin's token: outrider token create --role admin",
    404: "is this the recipe's proxy, or a service with --compat verl?",
}


class _Call(msgspec.Struct, kw_only=True):
    """A `completion_request` from the proxy. `messages` are parsed one by one, so that an error can name the
    message. Only Outrider's proxy sends `required_prefix_token_ids`, the recorded ids of the conversation up to the
    last reply."""

    request_id: str
    messages: list[msgspec.Raw]
    session_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: list[str] | str | None = None
    tools: list[ToolSpec] | None = None
    repetition_penalty: float | None = None
    required_prefix_token_ids: list[int] | None = None


class _Frame(msgspec.Struct):
    type: str
    request_id: str | None = None


class _Ended(Exception):
    """Raised when the connection has ended. `code` is the WebSocket close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason or 'the connection was closed'} (code {code})")
        self.code = code


class ProxyWorker:
    """A worker for the proxy at `url` (`http://host:port`, or `https`).

    - `engine`: an engine that takes token ids. The caller starts and closes it.
    - `renderer`: renders messages for the engine's model.
    - `max_tokens`: the maximum length of a reply, unless the proxy sets one.
    - `facts`: additional values for every response, such as the protocol's `node_id`, `gpu_id` and `rank_info`.
    - `token`: a bearer token, if the proxy requires one.
    - `ca`: a PEM file with the certificate authority of the proxy.
    - `reconnecting`: how long to wait between attempts to connect.
    - `silent_seconds`: the connection is closed if no message arrives for this many seconds.
    """

    def __init__(
        self,
        url: str,
        engine: Engine,
        renderer: Renderer,
        *,
        worker_id: str | None = None,
        max_tokens: int = 2048,
        facts: dict[str, Any] | None = None,
        token: str | None = None,
        ca: str | None = None,
        reconnecting: RetryPolicy = RECONNECTING,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.worker_id = worker_id or f"{platform.node() or 'worker'}-{uuid4().hex[:8]}"
        if not 1 <= len(self.worker_id) <= 200:
            raise InvalidField("must have 1 to 200 characters", field="worker_id")
        self.url = f"{url.rstrip('/')}/ws/worker"
        self.connections = 0
        """Number of connections that the proxy has acknowledged."""
        self.attached = asyncio.Event()
        """Set while the worker has an acknowledged connection."""
        self._engine = engine
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._facts = {"node_id": platform.node() or None, "gpu_id": None, "rank_info": None, **(facts or {})}
        self._token = token
        self._trusted = trusting(ca)
        self._reconnecting = reconnecting
        self._silent_seconds = silent_seconds

    async def run(self) -> None:
        """Serve until cancelled, and reconnect whenever the connection is lost. Raises Forbidden and NotFound only
        before the first connection (see PROXY_STATUSES). Raises:

        - Unauthorized: the token is wrong.
        - Forbidden: the token is not an admin's.
        - NotFound: there is no proxy at the address.
        - Conflict: the proxy does not accept workers.
        - EngineMisbehaved: the proxy rejects the worker's first message.
        """
        connector = aiohttp.TCPConnector(ssl=self._trusted or True)
        failed = 0
        async with aiohttp.ClientSession(connector=connector) as http:
            while True:
                before = self.connections
                try:
                    await self._serve(http)
                except (aiohttp.ClientError, OSError, _Ended) as error:  # includes TimeoutError, a subclass of OSError
                    end = error
                code = end.code if isinstance(end, _Ended) else getattr(end, "status", 0)
                passing = code in PROXY_STATUSES and self.connections > 0
                if (kind := REFUSALS.get(code)) is not None and not passing:
                    raise kind(f"{self.url} refuses this worker: {end}", hint=HINTS.get(code))
                if self.connections > before:
                    failed = 0
                log.info("worker %s has no connection to %s: %s", self.worker_id, self.url, end)
                await asyncio.sleep(self._reconnecting.wait(failed))
                failed += 1

    async def _serve(self, http: aiohttp.ClientSession) -> None:
        """Open a connection, and serve until it ends. Raises _Ended, aiohttp.ClientError or OSError, after all model
        calls of the connection have ended."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        closing = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)
        async with asyncio.timeout(CONNECT_SECONDS):
            socket = await http.ws_connect(self.url, headers=headers, max_msg_size=MAX_FRAME, timeout=closing)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._ping(socket), name=f"verl proxy pings {self.worker_id}")]
                try:
                    await self._receive(socket, tasks, running)
                finally:
                    self.attached.clear()
                    for task in running:
                        task.cancel()
        # raise only one of the errors, because every error here means the same: the connection has ended
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await shielded(partial(socket.close))

    async def _receive(
        self, socket: aiohttp.ClientWebSocketResponse, tasks: asyncio.TaskGroup, running: list[asyncio.Task[None]]
    ) -> None:
        await self._send(socket, {"type": "worker_hello", "worker_id": self.worker_id, "keeps_ids": True})
        async with asyncio.timeout(CONNECT_SECONDS):
            while not await self._acknowledged(socket):
                pass
        self.connections += 1
        self.attached.set()
        while True:
            data = await self._frame(socket)
            frame = _decoded(data)
            if frame.type == "ping":
                await self._send(socket, {"type": "pong"})
            elif frame.type == "completion_request":
                if frame.request_id is None:
                    raise _Ended(1002, "a completion_request without request_id")
                task = tasks.create_task(
                    self._answer(socket, frame.request_id, data), name=f"verl proxy call {frame.request_id}"
                )
                running.append(task)
                task.add_done_callback(running.remove)

    async def _acknowledged(self, socket: aiohttp.ClientWebSocketResponse) -> bool:
        frame = _decoded(await self._frame(socket))
        if frame.type == "ping":
            await self._send(socket, {"type": "pong"})
        return frame.type == "worker_hello_ack"

    async def _ping(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self._send(socket, {"type": "ping"})

    async def _frame(self, socket: aiohttp.ClientWebSocketResponse) -> str | bytes:
        """Return the next message. Raises _Ended, or TimeoutError after a silence that is too long."""
        async with asyncio.timeout(self._silent_seconds):
            message = await socket.receive()
        if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            data: str | bytes = message.data
            return data
        if message.type is aiohttp.WSMsgType.CLOSE:
            raise _Ended(message.data or 1005, message.extra or "")
        raise _Ended(socket.close_code or 1006, "" if message.data is None else str(message.data))

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, message: dict[str, Any]) -> None:
        await socket.send_str(msgspec.json.encode(message).decode())

    async def _answer(self, socket: aiohttp.ClientWebSocketResponse, request_id: str, data: str | bytes) -> None:
        """Answer one `completion_request`. If the request fails, the response contains the reason as `error`."""
        times = {"worker_received_at": time.time()}
        try:
            try:
                answer = await self._completion(msgspec.json.decode(data, type=_Call), times)
            except msgspec.DecodeError as error:
                raise InvalidField(f"the call cannot be read: {error}", field="completion_request") from error
            except OutriderError:
                raise
            except Exception as error:  # the engine's code may raise any error
                raise EngineMisbehaved(f"the worker's engine raised {type(error).__name__}: {error}") from error
        except OutriderError as error:
            answer = {"error": error.message, "error_code": error.code}
        times["worker_response_sent_at"] = time.time()
        # The protocol requires all of these keys in every response.
        empty = dict.fromkeys(("completion_text", "content_text", "tool_calls", "finish_reason", "error"))
        ids: dict[str, Any] = {"token_ids": None, "log_probs": None}
        facts = {"worker_id": self.worker_id, **self._facts, "timing": times}
        await self._send(
            socket, {"type": "completion_response", "request_id": request_id, **empty, **ids, **answer, **facts}
        )

    async def _completion(self, call: _Call, times: dict[str, float]) -> dict[str, Any]:
        """Sample a reply, and return the values of the response. Raises RequestError if the messages cannot be
        rendered, EngineUnavailable if the reply was cut off, and the engine's own errors."""
        messages = [parse_message(raw, f"messages[{index}]") for index, raw in enumerate(call.messages)]
        if any(message.parts for message in messages):
            raise InvalidField("this worker takes text only", field="messages", hint="leave the images out")
        tools = call.tools or []
        prompt = await asyncio.to_thread(self._prompt, messages, tools, call.required_prefix_token_ids)
        sampling = self._sampling(call)
        request = GenerateRequest(
            request_id=uuid4().hex,
            session_key=call.session_id or call.request_id,
            input_ids=np.asarray(prompt, dtype=np.int32),
            sampling=sampling,
        )
        times["worker_inference_started_at"] = time.time()
        whole = await self._whole(request)
        times["worker_inference_completed_at"] = time.time()
        if whole.finish is FinishReason.ABORT or whole.finish is None:
            raise EngineUnavailable("the engine has cut the reply off")
        stream = ReplyStream(
            self._renderer,
            prompt_tail=prompt[self._renderer.tail_start(prompt) :],
            tools=tools,
            stop=sampling.stop,
            stop_ids=sampling.stop_token_ids,
            call_id=request.request_id[:12],
        )
        stream.push(whole.ids)
        reply = stream.finish().message
        times["worker_tool_parse_completed_at"] = time.time()
        return {
            "completion_text": self._renderer.tokenizer.decode(self._without_stop_id(whole.ids)),
            "content_text": reply.content,
            "reasoning_text": reply.reasoning,
            "tool_calls": [*map(tool_call_object, reply.tool_calls)] or None,
            "finish_reason": "tool_calls" if reply.tool_calls and whole.finish is FinishReason.STOP else whole.finish,
            "token_ids": whole.ids,
            "log_probs": whole.logprobs,
            "prompt_token_ids": prompt,
            **_versions(whole.versions),
        }

    def _prompt(self, messages: list[Message], tools: list[ToolSpec], known: list[int] | None) -> list[int]:
        """Return the ids of the prompt: `known`, followed by the ids of the messages after the last reply. All messages
        are rendered anew if `known` is missing or does not end with a stop id, or if the renderer cannot append these
        messages to `known`. Raises RequestError if the messages cannot be rendered."""
        if known and known[-1] in self._renderer.stop_ids:
            replies = [at for at, message in enumerate(messages) if message.role is Role.ASSISTANT]
            new = messages[replies[-1] + 1 :] if replies else []
            bridged = self._renderer.bridge(known[:-1], known[-1:], new, tools, "recorded")
            if bridged is not None:
                return known + bridged
        return self._renderer.render(messages, tools)

    def _sampling(self, call: _Call) -> SamplingParams:
        """Return the sampling parameters for a call. `max_tokens` defaults to the worker's `max_tokens`, and other
        parameters default to those of `SamplingParams`."""
        stop = (call.stop,) if isinstance(call.stop, str) else tuple(call.stop or ())
        given: dict[str, Any] = {
            "temperature": call.temperature,
            "top_p": call.top_p,
            "repetition_penalty": call.repetition_penalty,
        }
        return SamplingParams(
            max_tokens=self._max_tokens if call.max_tokens is None else call.max_tokens,
            stop=stop,
            stop_token_ids=self._renderer.stop_ids,
            **{name: value for name, value in given.items() if value is not None},
        )

    async def _whole(self, request: GenerateRequest) -> Chunk:
        """Return the whole reply as a single chunk. Raises EngineMisbehaved if the number of log-probabilities is
        wrong, and the engine's own errors."""
        ids: list[int] = []
        logprobs: list[float] = []
        last = Chunk(ids=[], logprobs=[])
        with plugin_code():
            async with aclosing(self._engine.generate(request)) as chunks:
                async for last in chunks:
                    ids += last.ids
                    logprobs += last.logprobs
        if len(ids) != len(logprobs):
            raise EngineMisbehaved(f"{len(logprobs)} log-probabilities for {len(ids)} sampled tokens")
        return msgspec.structs.replace(last, ids=ids, logprobs=logprobs)

    def _without_stop_id(self, ids: list[int]) -> list[int]:
        """Return the ids without a stop id at the end."""
        return ids[:-1] if ids and ids[-1] in self._renderer.stop_ids else ids


def _decoded(data: str | bytes) -> _Frame:
    """Return the type and the request id of a message. Raises _Ended if the message cannot be read."""
    try:
        return msgspec.json.decode(data, type=_Frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Ended(1002, f"a message of the proxy cannot be read: {error}") from error


def _versions(spans: tuple[VersionSpan, ...]) -> dict[str, Any]:
    """Return the values that report a reply's policy versions: the lowest version, and all version spans if there are
    several versions. If the engine reports no version, `weight_version` is None, and the proxy decides which version
    the reply has."""
    if not spans:
        return {"weight_version": None}
    lowest = {"weight_version": min(span.version for span in spans)}
    return lowest | ({"weight_version_spans": spans} if len({span.version for span in spans}) > 1 else {})
