"""The model side over HTTP: `/s/{key}/...` in each dialect, as a bare ASGI application on the hot path.

It knows bytes, routes and connections; what a call means is the conversation's business. Exact routes only:
anything else is a 404 in the dialect's own shape, an unknown key a 401, and nothing makes a session by accident.
A client that hangs up aborts its generation upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, Protocol

from outrider.dialects.base import Completion, Dialect, ModelRequest, Opening
from outrider.dialects.chat import ChatDialect
from outrider.errors import NotFound, OutriderError, TooLarge, Unauthorized
from outrider.messages import Delta
from outrider.sessions.conversation import Conversation, Ended

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/s/"
MAX_BODY = 64 << 20
JSON = b"application/json"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})


class Sessions(Protocol):
    """Whoever knows which conversation a credential belongs to."""

    def conversation(self, key: str) -> Conversation | None: ...


class Gateway:
    """The ASGI application. Dialects are told apart by route alone. The session's key is in the path, or, for
    clients whose base URL cannot carry it, the API key."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        chat = ChatDialect()
        self._fallback: Dialect = chat
        self._generate: dict[tuple[str, str], Dialect] = {("POST", "/v1/chat/completions"): chat}
        self._models: dict[tuple[str, str], Dialect] = {("GET", "/v1/models"): chat}

    def serves(self, scope: Scope) -> bool:
        """Whether a call is for the gateway, be it to refuse it."""
        path: str = scope["path"]
        route = (scope["method"], path)
        return path.startswith(PREFIX) or route in self._generate or route in self._models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key, path = _split(scope["path"])
        route = (scope["method"], path)
        dialect = self._generate.get(route) or self._models.get(route)
        reply = _Reply(send)
        try:
            if dialect is None:
                raise NotFound(f"{scope['method']} {path} is not served here")
            conversation = self._conversation(_api_key(scope) if key is None else key)
            if route in self._models:
                names = [conversation.endpoint.model]
                await reply.whole(200, dialect.models(names, await conversation.context_tokens()))
                return
            request = dialect.parse(await _body(receive))
            try:
                await _until_hung_up(receive, self._answer(dialect, request, conversation, reply))
            except asyncio.CancelledError:
                if conversation.open:
                    raise
                await _cut_off(reply)
        except OutriderError as error:
            await reply.failed(dialect or self._fallback, error)

    def _conversation(self, key: str) -> Conversation:
        conversation = self._sessions.conversation(key)
        if conversation is None:
            raise Unauthorized("this session key is unknown, or its run is over")
        return conversation

    async def _answer(self, dialect: Dialect, request: ModelRequest, conversation: Conversation, reply: _Reply) -> None:
        async with aclosing(conversation.call(request, dialect=dialect.name)) as steps:
            if not request.stream:
                async for step in steps:
                    if isinstance(step, Completion):
                        await reply.whole(200, dialect.reply(request, step))
                return
            writer = dialect.stream(request)
            piece = conversation.endpoint.renderer.tokenizer.piece
            try:
                async for step in steps:
                    match step:
                        case Opening():
                            await reply.begin(dialect.stream_content_type, writer.open(step))
                        case Delta():
                            pieces = tuple(map(piece, step.ids)) if request.logprobs else ()
                            await reply.more(writer.delta(step, pieces))
                        case Completion():
                            await reply.end(writer.close(step))
            except OutriderError as error:
                if not reply.begun:
                    raise
                await reply.end(writer.error(error))


class _Reply:
    """One HTTP response, sent whole or in parts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def whole(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, content_type: str, body: bytes) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
        await self._start(200, headers)
        await self.more(body)

    async def more(self, body: bytes) -> None:
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def failed(self, dialect: Dialect, error: OutriderError) -> None:
        status, body = dialect.error(error)
        await self.whole(status, body)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _split(path: str) -> tuple[str | None, str]:
    """The session key in a path, if it has one, and the dialect's own path."""
    if not path.startswith(PREFIX):
        return None, path
    key, slash, rest = path.removeprefix(PREFIX).partition("/")
    return key, slash + rest


def _api_key(scope: Scope) -> str:
    """The API key of any dialect: a bearer token, x-api-key or x-goog-api-key."""
    for name, value in scope["headers"]:
        if name in KEY_HEADERS:
            text: str = value.decode("latin-1")
            return text.removeprefix("Bearer ").strip()
    return ""


async def _body(receive: Receive) -> bytes:
    """The request's body. Raises TooLarge past MAX_BODY."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Unauthorized("the client hung up before its request was complete")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise TooLarge(f"the request body is larger than {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _cut_off(reply: _Reply) -> None:
    """The run is over while its call is in flight: the call was cancelled, its connection was not. Raises Ended
    where nothing has been answered yet."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    if not reply.begun:
        raise Ended("this session's run is over")
    await reply.end(b"")


async def _until_hung_up(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work unless the client hangs up first: the work is then cancelled, and that is no error."""
    worker = asyncio.current_task()
    assert worker is not None
    hung_up = False

    async def watch() -> None:
        nonlocal hung_up
        while (await receive())["type"] != "http.disconnect":
            pass
        hung_up = True
        worker.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch(), name="client hang-up")
            try:
                await work
            finally:
                watcher.cancel()
    except asyncio.CancelledError:
        if not hung_up:
            raise
        worker.uncancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
