"""Odd Responses requests from a grammar of their JSON text: each is answered or refused, and no other error is raised.

The grammar has the API's field names and types in odd forms: repeated keys, escapes, white space, wrong types, deep
nesting. Each run tries a few requests; `make test-nightly` tries many. The number of a request reproduces it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import msgspec
import pytest

from outrider.dialects.base import Memory, Opening
from outrider.errors import EngineUnavailable, RequestError
from outrider.messages import Delta, ToolCall
from support.responses import CALL, DIALECT, completion

CHUNK = 250
CHUNKS = 80

WORDS = ["", "hi", "x y", "\u00e9\u2028\U0001f600", 'a\n\t"\\', "call_1", "call_1~json", "fs", "fs__", "bash"]
WORDS += ["outrider1:aGk=", "gAAAAB", "data:image/png;base64,aGk=", "https://a/b.png", "user", "function", "auto"]
SCALARS = [
    "null",
    "true",
    "false",
    "0",
    "-0.0",
    "1e9",
    "1e999",
    "9" * 40,
    "[]",
    "{}",
    '""',
    r'"\ud83d\ude00"',
    r'"\ud800"',
]
BROKEN = ["NaN", "'x'", "[1,]", '{"a"}', '"', "\x00", "nul", "{" * 5000, "[" * 5000]
KINDS = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"]
KINDS += [
    "local_shell_call",
    "local_shell_call_output",
    "item_reference",
    "additional_tools",
    "agent_message",
    "computer_call",
    "computer_call_output",
]


class Grammar:
    """Random text of a request. One seeded generator makes every choice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def whole(self) -> bytes:
        text = self._object(
            model=self.string,
            input=lambda: self._pick(self.string, self._list(self.item), self._list(self.item), self._list(self.item)),
            **self._some(
                instructions=self.string,
                tools=self._list(self.tool),
                tool_choice=lambda: self._pick(self.string, lambda: self._object(type=self.word, name=self.word)),
                previous_response_id=lambda: self._pick(lambda: '"resp_fuzz"', self.string),
                reasoning=lambda: self._object(effort=self.word, summary=self.word),
                text=lambda: self._object(format=self.scalar, verbosity=self.word),
                include=lambda: '["reasoning.encrypted_content"]',
                metadata=lambda: self._object(a=self.word),
                max_output_tokens=lambda: self._random.choice(["1", "70000", "9" * 30, "0", "1.5"]),
                temperature=lambda: self._random.choice(["0", "1.0", "-1", "1e999"]),
                store=lambda: self._random.choice(["true", "false", "null"]),
                stream=lambda: self._random.choice(["true", "false"]),
            ),
        )
        if self._random.random() < 0.05:
            cut = self._random.randrange(len(text))
            text = text[:cut] + self._random.choice(["", ",", '"', "\x00"]) + text[cut + 1 :]
        return text.encode("utf-8", "surrogatepass")

    def item(self) -> str:
        kind = self._random.choice(KINDS if self._random.random() < 0.2 else KINDS[:6])
        return self._object(
            type=lambda: json.dumps(kind),
            role=self.role,
            **self._some(id=self.word, status=self.word),
            **self._often(
                content=self.content,
                summary=self._list(self.part),
                encrypted_content=self.word,
                call_id=self.word,
                name=self.word,
                namespace=self.word,
                arguments=lambda: self._pick(self.string, lambda: self._object(input=self.string)),
                input=self.string,
                output=self.content,
                action=lambda: self._object(command=self._list(self.string), timeout_ms=self.scalar),
                tools=self._list(self.tool),
            ),
        )

    def tool(self, depth: int = 0) -> str:
        kind = self._random.choice(
            ["function", "custom", "web_search"] if depth else ["function", "custom", "namespace"]
        )
        return self._object(
            type=lambda: json.dumps(kind),
            name=lambda: json.dumps(self._random.choice(WORDS[1:]), ensure_ascii=False),
            tools=self._list(lambda: self.tool(depth + 1) if depth < 3 else "{}"),
            **self._some(
                description=self.string,
                parameters=lambda: self._object(type=self.word, properties=self.scalar),
                format=lambda: self._object(type=lambda: '"grammar"', syntax=self.word, definition=self.string),
                strict=self.scalar,
            ),
        )

    def content(self) -> str:
        return self._pick(self.string, self._list(self.part))

    def part(self) -> str:
        kinds = ["input_text", "output_text", "refusal", "input_image", "summary_text", "input_file"]
        return self._object(
            type=lambda: json.dumps(self._random.choice(kinds)),
            **self._often(text=self.string, refusal=self.string, image_url=self.word),
        )

    def role(self) -> str:
        return json.dumps(self._random.choice(["user", "assistant", "system", "developer"] * 5 + ["tool"]))

    def word(self) -> str:
        return json.dumps(self._random.choice(WORDS), ensure_ascii=self._random.random() < 0.5)

    def string(self) -> str:
        return json.dumps("".join(self._random.choices(WORDS, k=self._random.randrange(4))))

    def scalar(self) -> str:
        return self._random.choice(SCALARS)

    def _pick(self, *rules: Callable[[], str]) -> str:
        return self._random.choice(rules)()

    def _list(self, rule: Callable[[], str]) -> Callable[[], str]:
        return lambda: "[" + ",".join([self._value(rule) for _ in range(self._random.randrange(4))]) + "]"

    def _some(self, **rules: Callable[[], str]) -> dict[str, Callable[[], str]]:
        return {name: rule for name, rule in rules.items() if self._random.random() < 0.2}

    def _often(self, **rules: Callable[[], str]) -> dict[str, Callable[[], str]]:
        return {name: rule for name, rule in rules.items() if self._random.random() < 0.95}

    def _object(self, **rules: Callable[[], str]) -> str:
        names = list(rules)
        if names and self._random.random() < 0.03:
            names.append(self._random.choice(names))
        if self._random.random() < 0.3:
            self._random.shuffle(names)
        space = self._random.choice(["", "", " ", "\n\t"])
        return "{" + ",".join(f'{space}"{name}"{space}:{self._value(rules[name])}' for name in names) + space + "}"

    def _value(self, rule: Callable[[], str]) -> str:
        """The text of the rule, or rarely another value."""
        chance = self._random.random()
        if chance < 0.001:
            return self._random.choice(BROKEN)
        return self.scalar() if chance < 0.01 else rule()


def outcome(body: bytes, memory: Memory) -> str:
    """Return `refused`, `unreadable` if one of the messages is refused, or `answered`. An exception is a failure of the
    test."""
    try:
        request = DIALECT.parse(CALL, body, memory)
    except RequestError as error:
        msgspec.json.encode(DIALECT.error(error))
        return "refused"
    try:
        for index in range(len(request.messages)):
            request.messages.raw(index)
            request.messages.parse(index)
    except RequestError as error:
        msgspec.json.encode(DIALECT.error(error))
        return "unreadable"
    name = request.tools[0]["function"]["name"] if request.tools else "bash"
    done = completion("text", ToolCall("call_1", name, '{"input": "x"}'), reasoning="why", id="fuzz")
    if not request.stream:
        assert json.loads(DIALECT.reply(request, done))["output"]
        return "answered"
    writer = DIALECT.stream(request)
    writer.open(Opening(id="fuzz", created=1, model=request.model))
    writer.delta(Delta(text="text", reasoning="why"))
    assert b"response.completed" in writer.close(done)
    failed = DIALECT.stream(request)
    failed.error(EngineUnavailable("gone"))
    return "answered"


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.nightly) for chunk in range(1, CHUNKS))])
def test_odd_requests_are_answered_or_refused(chunk: int) -> None:
    memory: Memory = {}
    seen: dict[str, int] = {}
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        body = Grammar(seed).whole()
        try:
            result = outcome(body, memory)
        except Exception as error:  # any is a failure of the test
            raise AssertionError(f"request {seed} was neither answered nor refused: {body[:2000]!r}") from error
        seen[result] = seen.get(result, 0) + 1
    assert set(seen) == {"answered", "refused", "unreadable"}, seen


def test_a_request_is_found_again_by_its_number() -> None:
    assert Grammar(7).whole() == Grammar(7).whole()
