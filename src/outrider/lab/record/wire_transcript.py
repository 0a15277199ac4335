"""An ASGI application that forwards each call to the model gateway. It writes the request and the reply to a file, as
one line of JSON.

Invariants: the program gets the gateway's reply unchanged and without delay; no line contains a secret.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import msgspec

from outrider.api.gateway import Gateway
from outrider.redaction import HIDDEN, redacted
from outrider.wire.http_server import Receive, Scope, Send

KEPT_BYTES = 1 << 24
"""Maximum bytes of a body in the transcript. For a longer body, only its size is written."""

SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "x-goog-api-key", "api-key"})
_SECRET_NAME = re.compile(r"^(?:[\w-]*[_-])?(?:api[_-]?key|password|passwd|secret|access[_-]?token)$", re.IGNORECASE)
_ENDPOINT = re.compile(r"^/s/[^/]+")
EVENT_STREAM = "text/event-stream"
DATA = "data:"


class WireTranscript:
    """Forwards calls to `gateway` and writes them to `file`.

    - `secrets`: texts that no line may contain.
    - `user_texts`: the texts of the user's messages, from the first request that has any.
    - `streamed`: True as soon as a reply has been streamed.
    - `refused`: the number of failed calls, by method, path, status and the reason in the reply.
    """

    def __init__(self, gateway: Gateway, file: IO[str], secrets: Iterable[str]) -> None:
        self.streamed = False
        self.calls = 0
        self.refused = Counter[str]()
        self.user_texts: tuple[str, ...] = ()
        self._gateway = gateway
        self._file = file
        self._secrets = tuple(secrets)
        self._started = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
            return
        began = time.monotonic()
        request, reply = _Body(), _Body()
        start: dict[str, Any] = {"status": None, "headers": []}

        async def received() -> Any:
            message = await receive()
            request.add(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            reply.add(message.get("body", b""))
            await send(message)

        try:
            await self._gateway(scope, received, sent)
        finally:
            headers, reply_headers = _headers(scope["headers"]), _headers(start["headers"])
            is_stream = reply_headers.get("content-type", "").startswith(EVENT_STREAM)
            self.streamed = self.streamed or is_stream
            self.calls += 1
            asked = request.read(events=False)
            self.user_texts = self.user_texts or tuple(_user_texts(asked))
            line = {
                "at": round(began - self._started, 3),
                "seconds": round(time.monotonic() - began, 3),
                "method": scope["method"],
                "path": scope["path"],
                "query": scope.get("query_string", b"").decode("latin-1"),
                "headers": headers,
                "request": asked,
                "status": start["status"],
                "reply_headers": reply_headers,
                "reply": reply.read(events=is_stream),
            }
            if (start["status"] or 0) >= 400:
                self.refused[_refusal(line)] += 1
            self._file.write(msgspec.json.encode(without_secrets(line, self._secrets)).decode() + "\n")
            self._file.flush()


class _Body:
    """The bytes of a request or reply, up to KEPT_BYTES."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= KEPT_BYTES:
            self._data += data

    def read(self, *, events: bool) -> Any:
        """Return the body as JSON, or as text if it is not JSON. If `events` is True, returns a list with the data of
        each server-sent event."""
        if self._size > KEPT_BYTES:
            return {"omitted_bytes": self._size}
        text = bytes(self._data).decode("utf-8", errors="replace")
        if events:
            return [_json(line.removeprefix(DATA).strip()) for line in text.splitlines() if line.startswith(DATA)]
        return _json(text) if text else None


def without_secrets(value: Any, secrets: Iterable[str]) -> Any:
    """Return a JSON value without secrets: `secrets`, Outrider's keys, and strings in fields such as `password` or
    `api_key`."""
    secrets = tuple(secrets)
    if isinstance(value, str):
        return redacted(value, secrets)
    if isinstance(value, list):
        return [without_secrets(each, secrets) for each in value]
    if isinstance(value, dict):
        return {
            redacted(name, secrets): HIDDEN
            if isinstance(each, str) and each and (name.lower() in SECRET_HEADERS or _SECRET_NAME.match(name))
            else without_secrets(each, secrets)
            for name, each in value.items()
        }
    return value


def _refusal(line: Mapping[str, Any]) -> str:
    """Describe a failed call in one line: its method, path, status and reason. The path does not contain the session's
    key."""
    path = _ENDPOINT.sub("", line["path"])
    error = line["reply"].get("error") if isinstance(line["reply"], Mapping) else None
    reason = error.get("message") if isinstance(error, Mapping) else error
    return f"{line['method']} {path}: {line['status']}" + (f" {reason}" if isinstance(reason, str) else "")


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text


def _user_texts(request: Any) -> Iterator[str]:
    """Yield the texts of the user's messages in a request of any dialect."""
    if not isinstance(request, Mapping):
        return
    listed = request.get("messages") or request.get("input") or request.get("contents") or ()
    if isinstance(listed, str):
        yield listed
        return
    for message in listed if isinstance(listed, list) else ():
        if isinstance(message, Mapping) and message.get("role", "user") == "user":
            yield from _texts(message.get("content") or message.get("parts"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
                yield text
