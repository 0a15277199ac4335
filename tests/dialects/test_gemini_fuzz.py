"""A fuzzer with a grammar of Google requests and ways to damage them: every request is read or refused, and no other
error is raised.

Each run tries a few requests, from a fixed seed; `make test-nightly` tries many.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from outrider.dialects.base import Memory
from outrider.errors import RequestError
from outrider.messages import ToolCall
from support.gemini import ARRAY, COUNT, DIALECT, EVENTS, GENERATE, completed, said

SEED = 7

WORDS = [
    "",
    "x",
    "é\u2028",
    "bash",
    "a_b",
    "user",
    "model",
    "function",
    "STRING",
    "OBJECT",
    "NONE",
    "image/png",
    "AAAA",
]
WORDS += ["https://x/y", "functionResponse", "skip_thought_signature_validator", "b3V0cmlkZXI6YQ==", "call_0", "\x00"]
ODD: list[Any] = [None, True, 0, 1, -1, 1.5, 1e300, 2**64, 10**30, [], {}, [[]], [None], {"a": None}, "x", "1"]

NEEDED = frozenset({"contents", "parts", "name", "mimeType", "data", "fileUri"})

GRAMMAR: dict[str, Any] = {
    "body": {
        "contents": "contents",
        "systemInstruction": "system",
        "tools": "tools",
        "toolConfig": {"functionCallingConfig": {"mode": "mode", "allowedFunctionNames": "odd"}},
        "generationConfig": "generation",
        "safetySettings": "odd",
        "cachedContent": "rare",
        "labels": "odd",
        "generateContentRequest": "rare",
    },
    "mode": ["'NONE", "'AUTO", "'any", "odd"],
    "contents": ["content*", "turns"],
    "turns": ["content", "content*"],
    "system": ["word", {"parts": "text*"}, "text*", "text", "content"],
    "content": [
        {"role": "role", "parts": "parts"},
        {"role": "role", "parts": "parts"},
        {"role": "'model", "parts": "said"},
        {"role": "'user", "parts": "answers"},
    ],
    "parts": ["part*", "part"],
    "said": ["call*", "text*"],
    "answers": ["answer*", "part*"],
    "part": ["text", "text", "text", "text", "answer", "blob", "file", "call"],
    "text": {"text": "word", "thought": "rare", "thoughtSignature": "rareword"},
    "call": {"functionCall": {"name": "name", "args": "object", "id": "rareword"}, "thoughtSignature": "rareword"},
    "answer": {"functionResponse": {"name": "name", "response": "object", "id": "rareword", "parts": "rareparts"}},
    "blob": {"inlineData": {"mimeType": "type", "data": "data"}},
    "type": ["'image/png", "'image/jpeg", "word"],
    "data": ["'AAAA", "'-_8", "word"],
    "file": {"fileData": {"mimeType": "type", "fileUri": "'https://x/y"}},
    "generation": {
        "temperature": "odd",
        "topP": "odd",
        "topK": "odd",
        "maxOutputTokens": "odd",
        "stopSequences": ["word*", "odd"],
        "seed": "odd",
        "candidateCount": "rare",
        "thinkingConfig": {"includeThoughts": "odd"},
    },
    "tools": ["tool*", "tool"],
    "tool": [
        {"functionDeclarations": "declarations"},
        {"functionDeclarations": "declarations", "googleSearch": "rare"},
    ],
    "declarations": ["declaration*", "declaration"],
    "name": ["'bash", "'a_b", "'bash", "word"],
    "declaration": {"name": "name", "description": "word", "parameters": "schema", "parametersJsonSchema": "rare"},
    "schema": {
        "type": "word",
        "nullable": "odd",
        "format": "word",
        "enum": "odd",
        "items": "rareschema",
        "properties": {"x": "rareschema", "type": "rareschema"},
        "anyOf": "odd",
        "minItems": "odd",
    },
    "role": ["'user", "'user", "'function", "'user", "'", "odd"],
    "object": [{"output": "odd"}, {"a": "odd", "b": "word"}, {"INVALID_JSON": "word"}, "odd"],
}


class Writer:
    """Writes requests by the grammar. Each choice is wrong with a small probability."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.wrong = dice.choice([0, 0.01, 0.1])
        self.snake = dice.choice([0, 0.3, 1])

    def write(self, rule: Any, depth: int = 0) -> Any:
        if self.dice.random() < self.wrong or depth > 12:
            return self.dice.choice(ODD)
        if isinstance(rule, dict):
            return {
                self.key(name): self.write(value, depth + 1) for name, value in rule.items() if self.keeps(name, value)
            }
        if isinstance(rule, list):
            return self.write(self.dice.choice(rule), depth)
        return self.named(rule, depth)

    def named(self, rule: str, depth: int) -> Any:
        if rule.startswith("'"):
            return rule[1:]
        if rule.endswith("*"):
            return [self.write(rule[:-1], depth + 1) for _ in range(self.dice.choice([0, 1, 1, 2, 3, 5]))]
        match rule.removeprefix("rare") or "odd":
            case "word":
                return self.dice.choice(WORDS)
            case "odd":
                return self.dice.choice(ODD) if self.wrong else None
            case inner:
                return self.write(GRAMMAR[inner], depth + 1)

    def keeps(self, name: str, value: Any) -> bool:
        if name in NEEDED:
            return self.dice.random() < 1 - self.wrong
        rare = isinstance(value, str) and value.startswith("rare")
        return self.dice.random() < (0.1 if rare else 0.7)

    def key(self, name: str) -> str:
        if self.dice.random() >= self.snake:
            return name
        return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)

    def damaged(self, body: bytes) -> bytes:
        if not body or self.dice.random() < 0.8:
            return body
        at = self.dice.randrange(len(body))
        junk = self.dice.choice([b"\xff", b'"', b"[" * 40, rb"\ud800", b"1e999", b"NaN", b"", b"9" * 5000])
        return body[:at] + junk + body[at + self.dice.randrange(3) :]


def tried(body: bytes, call: Any, memory: Memory) -> bool:
    """Read a whole request and answer it. Returns False if it is refused. Checks that all that is read can be
    encoded as JSON, and that a second reading gives the same messages."""
    with suppress(RequestError):
        request = DIALECT.parse(call, body, memory)
        raws = [request.messages.raw(index) for index in range(len(request.messages))]
        read = [request.messages.parse(index) for index in range(len(request.messages))]
        msgspec.json.encode([request.model, request.tools, request.sampling, read])
        again = DIALECT.parse(call, body, memory).messages
        assert [again.raw(index) for index in range(len(again))] == raws
        assert [again.parse(index) for index in range(len(again))] == read
        json.loads(DIALECT.reply(request, completed(said("x", tool_calls=(ToolCall("a", "bash", "{}"),)))))
        return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("budget", [300, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_every_request_is_read_or_refused(budget: int) -> None:
    dice = random.Random(SEED)
    memory: Memory = {}
    read = 0
    for number in range(budget):
        writer = Writer(dice)
        body = json.dumps(writer.write("body"), ensure_ascii=dice.random() < 0.5).encode()
        memory = {} if number % 50 == 0 else memory
        read += tried(writer.damaged(body), dice.choice([GENERATE, EVENTS, ARRAY, COUNT]), memory)
    assert read > budget // 50
    assert read < budget


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"contents":' + b"[" * 100_000,
        b'{"contents":{"parts":{"functionResponse":{"name":"a","response":'
        + b'{"a":' * 5000
        + b"1"
        + b"}" * 5000
        + b"}}}}",
        b'{"contents":[{"role":"model","parts":{"functionCall":{"name":"a","args":'
        + b'{"a":' * 900
        + b"1"
        + b"}" * 900
        + b"}}},{}]}",
        b'{"contents":{"parts":{"text":"\xff"}}}',
        b'{"contents":{"parts":{"text":"\\ud800"}}}',
        b'{"contents":[{"role":"model","parts":{"functionCall":{"name":"a","args":{"a":"\\ud800"}}}},{}]}',
        b'{"contents":[{"role":"model","parts":{"functionCall":{"name":"a","args":{"a":1e999}}}},{}]}',
        b'{"contents":[{"role":"model","parts":{"functionCall":{"name":"a","args":{"a":' + b"9" * 5000 + b"}}}},{}]}",
    ],
    ids=range(11),
)
def test_what_breaks_parsers_does_not_break_this_one(body: bytes) -> None:
    tried(body, GENERATE, {})
