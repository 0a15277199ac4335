"""The model gateway: serves the models of a session at `/s/{key}/...`, in the request formats of several vendors
(dialects). It is an ASGI application without a framework, to be fast: it handles every model call.

The gateway handles bytes, routes and connections; a `Conversation` handles the content of a call. Paths must match a
route exactly. Other paths get a 404 in the error format of their dialect, or of OpenAI if no dialect has the path. An
unknown key gets a 401. No request creates a session. If a client disconnects, the engine aborts the generation for the
client's call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, Self
from urllib.parse import parse_qsl

import msgspec

from outrider.concurrency.cancellation import Steps
from outrider.counts import CallFailures
from outrider.dialects import DIALECTS, UNKNOWN_ROUTES
from outrider.dialects.base import (
    Action,
    Completion,
    Dialect,
    Opening,
    Routed,
    RouteTable,
    StreamWriter,
    WireCall,
    without_declaration,
)
from outrider.errors import NotFound, OutriderError, Unauthorized
from outrider.logs import SESSION
from outrider.messages import Delta
from outrider.sessions.calls.call import Step
from outrider.sessions.calls.limits import LARGE, Body, BodyCapacity, TooMuchAtOnce
from outrider.sessions.conversation import Conversation, RunEnded
from outrider.sessions.models import SessionModels
from outrider.wire.file_descriptors import EACH_MOST
from outrider.wire.http_server import Receive, Scope, Send, claim, while_connected

PREFIX = "/s/"
JSON = b"application/json"
STREAM_PING_SECONDS = 10.0
"""Seconds between two checks of a streamed reply. A check sends a ping if nothing was sent since the previous check,
because clients give up on silent streams. So a stream is silent for at most twice this time."""
ANY_CAPACITY = BodyCapacity(None, takes_messages=True)
"""Limits for the body of a call while the call's model is unknown: images are allowed, and no context length limits the
body."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})


class Sessions(Protocol):
    """Finds the models that a session's key may use. For an invalid key, `models` returns None, and `refusal` returns
    the error to send."""

    def models(self, key: str) -> SessionModels | None: ...
    async def refusal(self, key: str) -> OutriderError: ...


class Gateway:
    """The ASGI application of the model gateway. The route determines the dialect. Where several dialects share a
    route, headers decide. The session's key is in the path. Clients whose base URL cannot contain the key send it as
    their API key."""

    def __init__(self, sessions: Sessions, *, calls: int = EACH_MOST, failures: CallFailures | None = None) -> None:
        """`calls` is the maximum number of concurrent calls of one session. `failures` counts failed calls."""
        self._sessions = sessions
        self._calls = calls
        self._failures = failures or CallFailures()
        self._routes = RouteTable(DIALECTS)

    def serves(self, scope: Scope) -> bool:
        """Return True if a request belongs to the gateway. The gateway may still refuse it."""
        path = scope["path"]
        return path.startswith(PREFIX) or self._routes.find(_wire_call(scope, path)) is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key, path = None, scope["path"]
        if path.startswith(PREFIX):
            key, slash, rest = path.removeprefix(PREFIX).partition("/")
            path = slash + rest
        call = _wire_call(scope, path)
        reply = _ClientReply(send)
        routed = self._routes.find(call)
        models, began = None, time.time()
        try:
            if routed is None or routed.action is None:
                models = self._sessions.models(_api_key(call) if key is None else key)
                raise NotFound(f"{call.method} {call.path} is not served here{routed.hint if routed else ''}")
            key = _api_key(call) if key is None else key
            models = self._sessions.models(key)
            if models is None:
                raise await self._sessions.refusal(key)
            models.under_way += 1
            try:
                if models.under_way > self._calls:
                    raise TooMuchAtOnce(f"this session has {self._calls} calls under way: one more cannot be taken yet")
                claim(scope, key, keep=True)
                outside = SESSION.set(models.logged)
                try:
                    await self._serve(routed, call, models, scope, receive, reply)
                finally:
                    SESSION.reset(outside)
            finally:
                models.under_way -= 1
            if reply.failure is not None:
                self._note(reply.failure, call, routed, models, began, status=200)
        except OutriderError as error:
            dialect = routed.dialect if routed else UNKNOWN_ROUTES
            self._note(error, call, routed, models, began, status=error.http_status)
            await reply.whole(error.http_status, msgspec.json.encode(dialect.error(error)))

    def _note(
        self,
        error: OutriderError,
        call: WireCall,
        routed: Routed | None,
        models: SessionModels | None,
        began: float,
        *,
        status: int,
    ) -> None:
        """Count a failed call, and add it to the session's result and timeline."""
        dialect = routed.dialect if routed else UNKNOWN_ROUTES
        self._failures.note(dialect.name, error.code)
        if models is not None:
            models.failed_calls.note(error, None if routed and routed.action else f"{call.method} {call.path}")
        if models is not None and models.timeline is not None and routed is not None and routed.action is not None:
            action = routed.action.name.lower()
            models.timeline.note_failed_call(error, began, action=action, dialect=dialect.name, status=status)

    async def _serve(
        self,
        routed: Routed,
        call: WireCall,
        models: SessionModels,
        scope: Scope,
        receive: Receive,
        reply: _ClientReply,
    ) -> None:
        dialect = routed.dialect
        if routed.action in (Action.MODELS, Action.MODEL):
            await reply.whole(200, dialect.models(call, await models.contexts()))
            return
        with Body(models.bodies) as body:
            try:
                await while_connected(scope, self._answer(routed, call, models, body, receive, reply))
            except asyncio.CancelledError:
                if models.policy.open:
                    raise
                await _cut_off(reply)

    async def _answer(
        self,
        routed: Routed,
        call: WireCall,
        models: SessionModels,
        body: Body,
        receive: Receive,
        reply: _ClientReply,
    ) -> None:
        """Receive and parse the request of a call, and send the reply."""
        dialect = routed.dialect
        if not models.frozen:
            conversation = models.policy
            received = await conversation.receive(body, _RequestBody(receive))
        else:
            received = await body.received(_RequestBody(receive), _any_capacity)
            conversation = await _named_conversation(models, dialect, call, received)
        request = await conversation.read(received, dialect, call)
        if routed.action is Action.COUNT_TOKENS:
            await reply.whole(200, msgspec.json.encode(dialect.count(await conversation.count(request))))
            return
        async with aclosing(conversation.call(request, dialect=dialect.name)) as batches:
            if request.stream:
                writer = dialect.stream(request)
                token_bytes = conversation.backend.renderer.tokenizer.token_bytes if request.logprobs else None
                await _with_pings(_stream(batches, writer, token_bytes, reply), reply, writer)
            else:
                async for steps in batches:
                    if isinstance(steps[-1], Completion):
                        await reply.whole(200, dialect.reply(request, steps[-1]))


async def _any_capacity() -> BodyCapacity:
    """Return the limits for a body whose model is not known until the whole body has arrived."""
    return ANY_CAPACITY


async def _named_conversation(models: SessionModels, dialect: Dialect, call: WireCall, received: bytes) -> Conversation:
    """Return the conversation that a request belongs to, in a session with frozen models (models that are not trained).
    A request with the exact name of one of them belongs to the conversation with that model. Any other name means the
    policy, because agent programs send model names of their own. Raises TooLarge and ContextOverflow."""

    def steps() -> Steps[str | None]:
        if len(received) > LARGE:
            yield from ANY_CAPACITY.checking(received)
        yield len(received)
        return without_declaration(dialect.model(call, received))

    name = await models.policy.backend.offload.run_steps(steps())
    return models.policy if name is None else models.frozen.get(name, models.policy)


class _ClientReply:
    """The HTTP response to a call, sent whole or in parts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.failure: OutriderError | None = None
        """The error that ended the response after it had begun."""
        self._ended = False
        self._quiet = True

    async def whole(self, status: int, body: bytes) -> None:
        await self._start(status, [(b"content-type", JSON), (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, content_type: str) -> None:
        """Start a response in parts. Does nothing if the response has already begun."""
        if not self.begun:
            await self._start(200, [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")])

    async def ping(self, writer: StreamWriter) -> None:
        """Send a ping in the dialect's format if nothing was sent since the last call of this method."""
        if self._quiet:
            await self.begin(writer.content_type)
            await self.more(writer.ping)
        self._quiet = True

    async def more(self, body: bytes) -> None:
        """Send a part of the response. Does nothing after the end, for example for a late ping."""
        if body and not self._ended:
            self._quiet = False
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def _stream(
    batches: AsyncIterator[list[Step]],
    writer: StreamWriter,
    token_bytes: Callable[[int], bytes] | None,
    reply: _ClientReply,
) -> None:
    """Send the output of a call as it arrives. What arrives together is sent as one part of the response. If the client
    requested log-probabilities, `token_bytes` returns the bytes of a token."""
    try:
        async for steps in batches:
            parts: list[bytes] = []
            for step in steps:
                match step:
                    case Delta():
                        parts.append(writer.delta(step, tuple(map(token_bytes, step.ids)) if token_bytes else ()))
                    case Opening():
                        parts.append(writer.open(step))
                    case Completion():
                        await reply.end(b"".join(parts) + writer.close(step))
                        return
            if not reply.begun:
                await reply.begin(writer.content_type)
            await reply.more(parts[0] if len(parts) == 1 else b"".join(parts))
    except OutriderError as error:
        if not reply.begun:
            raise
        reply.failure = error
        await reply.end(writer.error(error))


def _wire_call(scope: Scope, path: str) -> WireCall:
    return WireCall(scope["method"], path, scope["query_string"], scope["headers"])


def _api_key(call: WireCall) -> str:
    """Return a call's API key, or "". It is a bearer token, the header x-api-key or x-goog-api-key, or `key` in the
    query, depending on the dialect."""
    for name, value in call.headers:
        if name in KEY_HEADERS:
            given = value.decode("latin-1")
            scheme, _, token = given.partition(" ")
            return (token if scheme.lower() == "bearer" else given).strip()
    return dict(parse_qsl(call.query.decode("latin-1"))).get("key", "")


class _RequestBody:
    """Iterates over the parts of a request's body as they arrive. It is a class because an async generator is
    slower."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._more = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._more:
            raise StopAsyncIteration
        message = await self._receive()
        if message["type"] != "http.request":
            raise Unauthorized("the client hung up before its request was complete")
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


async def _cut_off(reply: _ClientReply) -> None:
    """End the reply to a call that was cancelled because the session's run is over. The client is still connected.
    Raises RunEnded if nothing was sent yet."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    if not reply.begun:
        raise RunEnded("this session's run is over")
    await reply.end(b"")


async def _with_pings(
    work: Awaitable[None], reply: _ClientReply, writer: StreamWriter, *, seconds: float = STREAM_PING_SECONDS
) -> None:
    """Await `work`, which sends a streamed reply. Every `seconds` seconds, check whether the stream needs a ping."""

    async def ping() -> None:
        while True:
            await reply.ping(writer)
            await asyncio.sleep(seconds)

    pinging: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            timer = asyncio.get_running_loop().call_later(
                seconds, lambda: pinging.append(group.create_task(ping(), name="pings"))
            )
            try:
                await work
            finally:
                timer.cancel()
                for task in pinging:
                    task.cancel()
    # the task group wraps an error of `work`, but callers expect the error itself
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
