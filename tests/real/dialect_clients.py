"""Clients of the four dialects, written from the APIs' references. They write requests, read replies, and echo
histories.

They do not depend on HTTP, on the service or on tokens. A history is a list of the dialect's own items (messages, input
items, contents). Invariant: a client sends a reply back as it received it, in the form in which the dialect's real
clients keep it.

Sources: OpenAI API reference (Chat Completions, Responses), Anthropic API reference (Messages), Google AI API reference
(generateContent).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from outrider.messages import Message, Role, ToolCall

Item = dict[str, Any]

MODEL = "policy"
TOOL = "bash"
DESCRIPTION = "Run a command."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Way(msgspec.Struct, frozen=True):
    """Sampling parameters of a request."""

    max_tokens: int
    temperature: float


class Answer(msgspec.Struct, frozen=True):
    """A reply as its client received it. `echo` is the reply as the client sends it back."""

    reply: Message
    echo: list[Item]


class DialectClient(Protocol):
    """The client of one dialect. `read` parses a reply that is not streamed, and `gather` the events of a streamed
    reply. `forgetting` removes the reasoning from an echo, for a client that does not keep reasoning."""

    name: str
    headers: ClassVar[dict[str, str]]

    def path(self, *, stream: bool) -> str: ...
    def body(self, history: Sequence[Item], way: Way, *, stream: bool) -> Item: ...
    def user(self, text: str) -> Item: ...
    def said(self, text: str) -> Item: ...
    def results(self, calls: Sequence[ToolCall], output: str) -> list[Item]: ...
    def read(self, reply: Item) -> Answer: ...
    def gather(self, events: Sequence[Item]) -> Answer: ...
    def forgetting(self, echo: Sequence[Item]) -> list[Item]: ...


def events_of(stream: bytes) -> list[Item]:
    """Return the JSON object of each server-sent event."""
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


class ChatClient:
    """Keeps text and calls, formats arguments anew, and drops reasoning."""

    name = "chat"
    headers: ClassVar[dict[str, str]] = {}

    def path(self, *, stream: bool) -> str:
        return "/v1/chat/completions"

    def body(self, history: Sequence[Item], way: Way, *, stream: bool) -> Item:
        function = {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}
        return {
            "model": MODEL,
            "messages": list(history),
            "tools": [{"type": "function", "function": function}],
            "max_tokens": way.max_tokens,
            "temperature": way.temperature,
            "stream": stream,
        }

    def user(self, text: str) -> Item:
        return {"role": "user", "content": text}

    def said(self, text: str) -> Item:
        return {"role": "assistant", "content": text}

    def results(self, calls: Sequence[ToolCall], output: str) -> list[Item]:
        return [{"role": "tool", "tool_call_id": call.id, "content": output} for call in calls]

    def read(self, reply: Item) -> Answer:
        return self._answer(reply["choices"][0]["message"])

    def gather(self, events: Sequence[Item]) -> Answer:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        calls: dict[int, Item] = {}
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
            call = calls.setdefault(piece["index"], {"id": "", "function": {"name": "", "arguments": ""}})
            call["id"] += piece.get("id", "")
            for field, part in piece["function"].items():
                call["function"][field] += part
        texts = {
            field: "".join([delta.get(field) or "" for delta in deltas]) for field in ("content", "reasoning_content")
        }
        return self._answer({**texts, "tool_calls": list(calls.values())})

    def forgetting(self, echo: Sequence[Item]) -> list[Item]:
        return list(echo)

    def _answer(self, message: Item) -> Answer:
        told = message.get("tool_calls") or []
        calls = [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in told]
        echo: Item = {"role": "assistant", "content": message["content"]}
        if calls:
            echo["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _rewritten(call.arguments)},
                }
                for call in calls
            ]
        return Answer(_message(message["content"], message.get("reasoning_content"), calls), [echo])


class MessagesClient:
    """Keeps the blocks of a reply as they are, thinking and signatures included."""

    name = "messages"
    headers: ClassVar[dict[str, str]] = {"anthropic-version": "2023-06-01"}

    def path(self, *, stream: bool) -> str:
        return "/v1/messages"

    def body(self, history: Sequence[Item], way: Way, *, stream: bool) -> Item:
        return {
            "model": MODEL,
            "messages": list(history),
            "tools": [{"name": TOOL, "description": DESCRIPTION, "input_schema": PARAMETERS}],
            "max_tokens": way.max_tokens,
            "temperature": way.temperature,
            "stream": stream,
        }

    def user(self, text: str) -> Item:
        return {"role": "user", "content": text}

    def said(self, text: str) -> Item:
        return {"role": "assistant", "content": [{"type": "text", "text": text}]}

    def results(self, calls: Sequence[ToolCall], output: str) -> list[Item]:
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": output} for call in calls]
        return [{"role": "user", "content": blocks}]

    def read(self, reply: Item) -> Answer:
        blocks: list[Item] = reply["content"]
        calls = [
            ToolCall(block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        echo = {"role": "assistant", "content": blocks}
        return Answer(_message("".join(texts), "".join(thoughts), calls), [echo])

    def gather(self, events: Sequence[Item]) -> Answer:
        blocks: list[Item] = []
        inputs: dict[int, str] = {}
        for event in events:
            match event:
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(block)
                case {"type": "content_block_delta", "index": index, "delta": {"partial_json": piece}}:
                    inputs[index] = inputs.get(index, "") + piece
                case {"type": "content_block_delta", "index": index, "delta": {"type": _, **fields}}:
                    for field, piece in fields.items():
                        blocks[index][str(field)] += piece
        for index, text in inputs.items():
            blocks[index]["input"] = json.loads(text)
        return self.read({"content": blocks})

    def forgetting(self, echo: Sequence[Item]) -> list[Item]:
        return [
            {**message, "content": [block for block in message["content"] if block["type"] != "thinking"]}
            for message in echo
        ]


class ResponsesClient:
    """Stores nothing on the server, and keeps the items of a reply as they are, encrypted reasoning included."""

    name = "responses"
    headers: ClassVar[dict[str, str]] = {}

    def path(self, *, stream: bool) -> str:
        return "/v1/responses"

    def body(self, history: Sequence[Item], way: Way, *, stream: bool) -> Item:
        tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}
        return {
            "model": MODEL,
            "input": list(history),
            "tools": [tool],
            "max_output_tokens": way.max_tokens,
            "temperature": way.temperature,
            "stream": stream,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }

    def user(self, text: str) -> Item:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def said(self, text: str) -> Item:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def results(self, calls: Sequence[ToolCall], output: str) -> list[Item]:
        return [{"type": "function_call_output", "call_id": call.id, "output": output} for call in calls]

    def read(self, reply: Item) -> Answer:
        items: list[Item] = reply["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        return Answer(_message("".join(texts), "".join(thoughts), self._calls(items)), items)

    def gather(self, events: Sequence[Item]) -> Answer:
        """Take the texts from the deltas, and the echo from the finished items."""
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        texts, thoughts = (
            "".join([event["delta"] for event in events if event["type"] == f"response.{kind}.delta"])
            for kind in ("output_text", "reasoning_text")
        )
        return Answer(_message(texts, thoughts, self._calls(items)), items)

    def forgetting(self, echo: Sequence[Item]) -> list[Item]:
        return [item for item in echo if item["type"] != "reasoning"]

    def _calls(self, items: Sequence[Item]) -> list[ToolCall]:
        made = [item for item in items if item["type"] == "function_call"]
        return [ToolCall(item["call_id"], item["name"], item["arguments"]) for item in made]


class GeminiClient:
    """Keeps the parts of a reply. Successive texts of the same kind are joined."""

    name = "gemini"
    headers: ClassVar[dict[str, str]] = {}

    def path(self, *, stream: bool) -> str:
        return f"/v1beta/models/{MODEL}:" + ("streamGenerateContent?alt=sse" if stream else "generateContent")

    def body(self, history: Sequence[Item], way: Way, *, stream: bool) -> Item:
        function = {"name": TOOL, "description": DESCRIPTION, "parametersJsonSchema": PARAMETERS}
        return {
            "contents": list(history),
            "tools": [{"functionDeclarations": [function]}],
            "generationConfig": {
                "maxOutputTokens": way.max_tokens,
                "temperature": way.temperature,
                "thinkingConfig": {"includeThoughts": True},
            },
        }

    def user(self, text: str) -> Item:
        return {"role": "user", "parts": [{"text": text}]}

    def said(self, text: str) -> Item:
        return {"role": "model", "parts": [{"text": text}]}

    def results(self, calls: Sequence[ToolCall], output: str) -> list[Item]:
        answers = [{"id": call.id, "name": call.name, "response": {"output": output}} for call in calls]
        return [{"role": "user", "parts": [{"functionResponse": answer} for answer in answers]}]

    def read(self, reply: Item) -> Answer:
        return self.gather([reply])

    def gather(self, events: Sequence[Item]) -> Answer:
        parts: list[Item] = []
        for part in (part for event in events for part in event["candidates"][0]["content"]["parts"]):
            if "text" in part and parts and "text" in parts[-1] and part.get("thought") == parts[-1].get("thought"):
                parts[-1]["text"] += part["text"]
            else:
                parts.append(dict(part))
        made = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = [ToolCall(call["id"], call["name"], json.dumps(call["args"])) for call in made]
        thoughts, texts = (
            "".join([part["text"] for part in parts if "text" in part and bool(part.get("thought")) is thought])
            for thought in (True, False)
        )
        return Answer(_message(texts, thoughts, calls), [{"role": "model", "parts": parts}])

    def forgetting(self, echo: Sequence[Item]) -> list[Item]:
        return [{**item, "parts": [part for part in item["parts"] if not part.get("thought")]} for item in echo]


CLIENTS: tuple[DialectClient, ...] = (ChatClient(), MessagesClient(), ResponsesClient(), GeminiClient())


def _message(content: str | None, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    return Message(role=Role.ASSISTANT, content=content or "", reasoning=reasoning or None, tool_calls=tuple(calls))


def _rewritten(arguments: str) -> str:
    """Return arguments as a client writes them that has parsed them. Text that is not JSON stays unchanged."""
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments
