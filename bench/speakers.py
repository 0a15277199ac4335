"""The client of each dialect: the path of its requests, the body of the next request, and the parts of a reply that it
sends again. The module is independent of tokens, tools and transport. Invariant: a conversation grows as the dialect's
clients grow it. Three of them send earlier messages again byte for byte; clients of Anthropic move a marker to the
newest message; a client of Responses may send only the new items, with the id of the last response.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import orjson

from bench.dialogue import Dialogue
from outrider.dialects.base import WireCall

MODEL = "policy"
MESSAGES_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
"""The fields whose sum is the tokens of prompt and output in a Messages reply."""


class Talk(Protocol):
    """One conversation: `ask` returns the body of the next request; `answer` adds its reply, which was not streamed,
    and returns the tokens of that request's prompt and output."""

    def ask(self, *texts: str) -> bytes: ...
    def answer(self, body: bytes) -> int: ...


class Begin(Protocol):
    """Begins a conversation."""

    def __call__(self, *, max_tokens: int, stream: bool = False) -> Talk: ...


class Speaker(msgspec.Struct, frozen=True, kw_only=True):
    """A client. `dialect` is the name of its dialect; `last` is a byte string that only the last event of a complete
    stream contains."""

    name: str
    dialect: str
    whole: WireCall
    streamed: WireCall
    last: bytes
    talk: Begin

    def call(self, streamed: bool) -> WireCall:
        return self.streamed if streamed else self.whole

    def target(self, streamed: bool) -> str:
        """Return path and query of a request, to be appended to a base URL."""
        call = self.call(streamed)
        return f"{call.path}?{call.query.decode()}" if call.query else call.path


class MessagesTalk:
    """Anthropic Messages, with the cache marker on the newest message like Claude Code."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = orjson.dumps({"model": MODEL, "max_tokens": max_tokens, "stream": stream})
        self._messages: list[bytes] = []

    def ask(self, *texts: str) -> bytes:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        before = list(self._messages)
        self._messages.append(orjson.dumps({"role": "user", "content": blocks}))
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        return _body(self._settings, b"messages", [*before, orjson.dumps({"role": "user", "content": blocks})])

    def answer(self, body: bytes) -> int:
        answer = orjson.loads(body)
        self._messages.append(orjson.dumps({"role": "assistant", "content": answer["content"]}))
        return sum(answer["usage"][count] for count in MESSAGES_COUNTS)


class ResponsesTalk:
    """OpenAI Responses with all items in every request and nothing stored, like Codex."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = _responses_settings(max_tokens, stream=stream, store=False)
        self._items: list[bytes] = []

    def ask(self, *texts: str) -> bytes:
        self._items += _input_items(texts)
        return _body(self._settings, b"input", self._items)

    def answer(self, body: bytes) -> int:
        answer = orjson.loads(body)
        self._items += map(orjson.dumps, answer["output"])
        total: int = answer["usage"]["total_tokens"]
        return total


class StoredResponsesTalk:
    """OpenAI Responses with new items only, continued from the last response."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = _responses_settings(max_tokens, stream=stream, store=True)
        self._previous: str | None = None

    def ask(self, *texts: str) -> bytes:
        previous = b',"previous_response_id":' + orjson.dumps(self._previous) + b"}"
        return _body(self._settings[:-1] + previous, b"input", _input_items(texts))

    def answer(self, body: bytes) -> int:
        answer = orjson.loads(body)
        self._previous = answer["id"]
        total: int = answer["usage"]["total_tokens"]
        return total


class GeminiTalk:
    """Google generateContent. Streamed and whole replies have different paths."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = orjson.dumps({"generationConfig": {"maxOutputTokens": max_tokens}})
        self._contents: list[bytes] = []

    def ask(self, *texts: str) -> bytes:
        parts = [{"text": text} for text in texts]
        self._contents.append(orjson.dumps({"role": "user", "parts": parts}))
        return _body(self._settings, b"contents", self._contents)

    def answer(self, body: bytes) -> int:
        answer = orjson.loads(body)
        self._contents.append(orjson.dumps(answer["candidates"][0]["content"]))
        total: int = answer["usageMetadata"]["totalTokenCount"]
        return total


def _body(settings: bytes, field: bytes, items: list[bytes]) -> bytes:
    """Return a JSON object: the settings, with the list of items as an additional field."""
    return settings[:-1] + b',"' + field + b'":[' + b",".join(items) + b"]}"


def _responses_settings(max_tokens: int, *, stream: bool, store: bool) -> bytes:
    return orjson.dumps({"model": MODEL, "max_output_tokens": max_tokens, "stream": stream, "store": store})


def _input_items(texts: tuple[str, ...]) -> list[bytes]:
    return [
        orjson.dumps({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
        for text in texts
    ]


def _post(path: str, query: bytes = b"") -> WireCall:
    return WireCall("POST", path, query)


CHAT = Speaker(
    name="chat",
    dialect="chat",
    whole=_post("/v1/chat/completions"),
    streamed=_post("/v1/chat/completions"),
    last=b"data: [DONE]",
    talk=Dialogue,
)
MESSAGES = Speaker(
    name="messages",
    dialect="messages",
    whole=_post("/v1/messages"),
    streamed=_post("/v1/messages"),
    last=b"event: message_stop",
    talk=MessagesTalk,
)
RESPONSES = Speaker(
    name="responses",
    dialect="responses",
    whole=_post("/v1/responses"),
    streamed=_post("/v1/responses"),
    last=b"event: response.completed",
    talk=ResponsesTalk,
)
STORED_RESPONSES = msgspec.structs.replace(RESPONSES, name="responses, by id", talk=StoredResponsesTalk)
GEMINI = Speaker(
    name="gemini",
    dialect="gemini",
    whole=_post(f"/v1beta/models/{MODEL}:generateContent"),
    streamed=_post(f"/v1beta/models/{MODEL}:streamGenerateContent", b"alt=sse"),
    last=b'"finishReason"',
    talk=GeminiTalk,
)
DIALECTS = (CHAT, MESSAGES, RESPONSES, GEMINI)
"""The client of each dialect."""
