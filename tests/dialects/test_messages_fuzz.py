"""A fuzzer with the grammar of Anthropic Messages: requests that are almost valid, with wrong values and damaged bytes.

Every request is read, or refused as the caller's fault. A request that is read gives the same messages each time and
can be answered. Each run tries a few requests; `make test-nightly` tries many. A failure names the request's seed.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest

from outrider.dialects.base import Completion, ModelRequest, Opening, WireCall
from outrider.dialects.messages import MESSAGES_DIALECT
from outrider.errors import RequestError
from outrider.messages import Attachment, Delta, Message, Role, ToolCall
from outrider.tokens.tree.canonical import message_key
from outrider.trajectory import FinishReason

CHUNK = 300
CHUNKS = 80

DIALECT = MESSAGES_DIALECT
WORDS = (
    "",
    "hi",
    "tool_result",
    "é\u2028",
    "\x00\x1b[0m",
    "[tool error]",
    '{"a": 1}',
    "x-anthropic-billing-header: x",
    "🙂",
)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    2**70,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
    {"a": {"b": []}},
)
DONE = Completion(
    id="1",
    created=1,
    model="m",
    reply=Message(role=Role.ASSISTANT, content="a", reasoning="b", tool_calls=(ToolCall("c", "f", "{}"),)),
    finish=FinishReason.STOP,
    prompt_tokens=1,
    completion_tokens=1,
)


class Grammar:
    """Requests as clients could send them. On average one value in `odds` is replaced by an odd one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.odds = self.random.choice((10**9, 60, 15))

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def bent(self, value: Any) -> Any:
        return self.of(*ODD) if self.random.randrange(self.odds) == 0 else value

    def some(self, rule: Any, most: int = 3) -> list[Any]:
        return [rule() for _ in range(self.random.randint(0, most))]

    def record(self, *optional: str, **fields: Any) -> dict[str, Any]:
        """An object with these fields in any order. Each of the `optional` fields may be missing; a marker or an
        unknown field may be added."""
        kept = {name: self.bent(value) for name, value in fields.items() if name not in optional or self.of(0, 1)}
        if self.of(0, 0, 1):
            kept[self.of("cache_control", "citations", "caller", "novelty")] = self.of({"type": "ephemeral"}, None)
        names = self.random.sample(list(kept), len(kept))
        return {name: kept[name] for name in names}

    def text(self) -> str:
        return "".join(self.some(lambda: self.of(*WORDS)))

    def text_block(self) -> Any:
        return self.record(type="text", text=self.text())

    def image(self) -> Any:
        source = self.of(
            {"type": "base64", "media_type": self.of("image/png", "image/bmp"), "data": self.of("AAAA", "AA==", "A")},
            {"type": "url", "url": self.of("https://x/y", "data:,x")},
            {"type": "file", "file_id": "f"},
        )
        return self.record(type="image", source=self.record(**source))

    def document(self) -> Any:
        source = self.of(
            {"type": "text", "media_type": "text/plain", "data": self.text()},
            {"type": "content", "content": self.of(self.text(), self.some(self.text_block))},
            {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
        )
        return self.record("title", "context", type="document", source=self.record(**source), title="T", context=None)

    def tool_result(self) -> Any:
        parts = self.some(lambda: self.of(self.text_block, self.image, self.document, self.reference)())
        return self.record(
            "content",
            "is_error",
            type="tool_result",
            tool_use_id=self.of("c1", "c2"),
            content=self.of(self.text(), parts),
            is_error=self.of(True, False),
        )

    def reference(self) -> Any:
        return self.record(type=self.of("tool_reference", "search_result"), tool_name="f")

    def tool_use(self) -> Any:
        value = self.of({}, {"a": self.text()}, {"INVALID_JSON": self.text()}, {"n": [1.0, 1e22, -0.0]})
        return self.record(type="tool_use", id=self.of("c1", "c2"), name="f", input=value)

    def thinking(self) -> Any:
        return self.record("signature", type="thinking", thinking=self.text(), signature="s")

    def redacted(self) -> Any:
        return self.record(type="redacted_thinking", data="x")

    def message(self) -> Any:
        role = self.of("user", "user", "assistant", "assistant", "system")
        rules = {
            "user": (self.text_block, self.tool_result, self.tool_result, self.image, self.document),
            "assistant": (self.text_block, self.thinking, self.redacted, self.tool_use),
            "system": (self.text_block,),
        }[role]
        blocks = self.some(lambda: self.bent(self.of(*rules)()), most=4)
        return self.record(role=role, content=self.of(self.text(), blocks, blocks))

    def tool(self) -> Any:
        schema = self.of({"type": "object"}, {"properties": {"b": {}, "a": {}}})
        kind = self.of("custom", "custom", "custom", "web_search_20250305")
        return self.record("type", "description", name="f", type=kind, description=self.text(), input_schema=schema)

    def request(self) -> Any:
        choice = self.record("name", type=self.of("none", "auto", "any", "tool"), name="f")
        messages = [*self.some(lambda: self.bent(self.message()), most=5), {"role": "user", "content": self.text()}]
        optional = {
            "system": self.of(self.text(), self.some(self.text_block)),
            "tools": self.some(self.tool),
            "tool_choice": choice,
            "stop_sequences": self.of([], ["STOP"]),
            "temperature": self.of(0, 1, 0.7),
            "top_k": self.of(0, 40),
            "stream": self.of(True, False),
            "thinking": {"type": "adaptive"},
            "max_tokens": self.of(1, 1 << 40),
        }
        return self.record(*optional, model="m", messages=messages, **optional)

    def spelt(self, value: Any) -> bytes:
        """The value as JSON in any style, sometimes damaged."""
        style = {"indent": self.of(None, 1), "ensure_ascii": self.of(True, False)}
        data = bytearray(json.dumps(value, **style).encode())
        if self.random.randrange(self.odds) == 0:
            at = self.random.randrange(len(data))
            data[at : at + self.of(0, 1, 5)] = self.of(b"", b"\\ud800", b"\xff", b'"', b"{", b",", b"\\u0074", b"1e999")
        return bytes(data)


def attempted(call: WireCall, body: bytes) -> ModelRequest | RequestError:
    try:
        return DIALECT.parse(call, body, {})
    except RequestError as error:
        return error


class Reader:
    """Reads requests, and records for each message's bytes the message that was read."""

    def __init__(self) -> None:
        self.read_as: dict[bytes, Message | None] = {}
        self.accepted = 0

    def read(self, call: WireCall, body: bytes) -> list[Message] | None:
        """Return the messages of a request, or None if it was refused."""
        request = attempted(call, body)
        if isinstance(request, RequestError):
            told = DIALECT.error(request)
            assert (request.http_status, json.loads(msgspec.json.encode(told))["type"]) == (400, "error")
            return None
        parsed = [self.message(request.messages, index) for index in range(len(request.messages))]
        if None in parsed:
            return None
        self.accepted += 1
        json.loads(DIALECT.reply(request, DONE))
        writer = DIALECT.stream(request)
        written = writer.open(Opening(id="1", created=1, model="m")) + writer.delta(Delta(text="x", reasoning="y"))
        assert (written + writer.close(DONE)).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        return [message for message in parsed if message is not None]

    def message(self, messages: Any, index: int) -> Message | None:
        read: Message | None
        try:
            read = messages.parse(index)
        except RequestError:
            read = None
        raw = messages.raw(index)
        is_file = read is None or any(isinstance(part, Attachment) for part in read.parts)
        # Whether a file may be left out depends on the messages before it, because the file may be a tool's.
        if not is_file or (b"media_type" not in raw and b"url" not in raw):
            assert self.read_as.setdefault(raw, read) == read
        return read


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.nightly) for chunk in range(1, CHUNKS))])
def test_odd_requests(chunk: int) -> None:
    reader = Reader()
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            grammar = Grammar(seed)
            request = grammar.request()
            call = WireCall("POST", grammar.of("/v1/messages", "/v1/messages/count_tokens"))
            reader.read(call, grammar.spelt(request))
            plain = reader.read(call, json.dumps(request).encode())
            again = reader.read(call, json.dumps(request, indent=2, ensure_ascii=False).encode())
            keys = [None if read is None else list(map(message_key, read)) for read in (plain, again)]
            assert keys[0] == keys[1]
        except Exception as error:  # any is a failure of the test
            error.add_note(f"seed {seed}")
            raise
    assert reader.accepted > CHUNK
