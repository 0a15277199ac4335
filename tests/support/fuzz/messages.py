"""Anthropic Messages for the fuzzer: a grammar of its requests, and a strict reader of its replies."""

from __future__ import annotations

import json
from typing import Any

from support.fuzz.grammar import Grammar, Writer
from support.fuzz.speaker import (
    Body,
    Called,
    Echo,
    Manner,
    Request,
    Said,
    check,
    decoded_object,
    events_of,
    one_of,
    respelled,
    same_keys,
    without,
)

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
STOPS = ("end_turn", "max_tokens", "tool_use", "stop_sequence")
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


GRAMMAR: Grammar = {
    "body": {
        "model": ["'policy", "sentence"],
        "max_tokens": "limit",
        "messages": ["opening", "opening", "opening", "quoted"],
        "system~": ["text", "text_block*"],
        "tools~": ["declaration*", "declaration+"],
        "tool_choice?": [{"type": ["'auto", "'any", "'none"], "disable_parallel_tool_use?": "flag"}, "chosen"],
        "stream": "flag",
        "temperature~": "temperature",
        "top_p?": "top_p",
        "top_k?": "top_k",
        "stop_sequences?": ["stop*", "stop+"],
        "thinking?": [{"type": "'adaptive"}, {"type": "'enabled", "budget_tokens": "limit"}, {"type": "'disabled"}],
        "metadata?": {"user_id": "text"},
        "mcp_servers?": [None, [[]]],
        "context_management?": "object",
        "output_config?": "object",
        "service_tier?": "word",
        "x_unknown?": "json",
    },
    "chosen": {"type": "'tool", "name": "name"},
    "opening": ("user", "user?"),
    "quoted": ("exchange", "exchange~", "message?", "user"),
    "exchange": ("user", "assistant", "results"),
    "message": ["user", "assistant", "results", "system"],
    "user": {"role": "'user", "content": ["text", "text", "seen*", "seen+"]},
    "system": {"role": "'system", "content": ["text", "text_block*"]},
    "assistant": {"role": "'assistant", "content": ["text", "spoken*"]},
    "results": {"role": "'user", "content": "answer+"},
    "answer": ["result", "result", "seen"],
    "text_block": {"type": "'text", "text": "text", "cache_control?": {"type": "'ephemeral"}, "citations?": None},
    "seen": ["text_block", "text_block", "text_block", "text_block", "text_block", "document", "rarely"],
    "rarely": ["image", "image", {"type": "'tool_reference", "tool_name": "name"}],
    "image": {
        "type": "'image",
        "source": [
            {"type": "'base64", "media_type": "image_type", "data": "pixel"},
            {"type": "'url", "url": "'https://example.org/x.png"},
        ],
    },
    "document": {
        "type": "'document",
        "source": [
            {"type": "'text", "media_type": "'text/plain", "data": "text"},
            {"type": "'content", "content": ["text", "text_block*"]},
        ],
        "title?": ["text", None],
        "context?": ["text", None],
    },
    "spoken": ["text_block", "text_block", "tool_use", "tool_use", "thinking", "redacted"],
    "tool_use": {"type": "'tool_use", "id": "id", "name": "name", "input": "object"},
    "thinking": {"type": "'thinking", "thinking": "text", "signature~": "word"},
    "redacted": {"type": "'redacted_thinking", "data": "word"},
    "result": {
        "type": "'tool_result",
        "tool_use_id": "id",
        "content~": ["text", "text_block*", None],
        "is_error~": "flag",
        "cache_control?": "object",
    },
    "declaration": {
        "name": "name",
        "type?": ["'custom", None],
        "description~": ["text", None],
        "input_schema": "schema",
        "cache_control?": "object",
    },
}


class Messages:
    """The `Speaker` of Anthropic Messages."""

    name = "messages"
    history = "messages"
    grammar = GRAMMAR

    def manner(self, writer: Writer) -> Manner:
        return Manner(form="count" if writer.chance(0.06) else "")

    def dressed(self, writer: Writer, body: Body) -> Body:
        return body

    def request(self, manner: Manner, payload: bytes) -> Request:
        path = COUNT if manner.form == "count" else PATH
        return Request(method="POST", path=path, pieces=(payload,), headers=((b"anthropic-version", b"2023-06-01"),))

    def asides(self, writer: Writer) -> Request:
        path = writer.dice.choice(("/v1/models", "/v1/models/policy", "/v1/models/x", f"{PATH}/batches"))
        return Request(method="GET", path=path, headers=((b"anthropic-version", b"2023-06-01"),))

    def go_on(self, writer: Writer, body: Body, said: Said, echo: Echo) -> Body:
        kept = [_kept(block, echo) for block in said.items]
        if echo is Echo.NO_REASONING:
            kept = [block for block in kept if block["type"] != "thinking"] or kept
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": writer.write(["text", "text_block*"]),
                "is_error": writer.chance(0.2),
            }
            for call in said.calls
        ]
        new = [] if results and writer.chance(0.7) else [{"type": "text", "text": writer.write("text")}]
        messages = [*body["messages"], {"role": "user", "content": [*results, *new]}]
        if kept:
            messages.insert(-1, {"role": "assistant", "content": kept})
        return {**body, "messages": messages}

    def read(self, payload: bytes, manner: Manner) -> Said:
        return _streamed(payload) if manner.stream else _whole(decoded_object(payload))

    def read_count(self, payload: bytes) -> int:
        whole = decoded_object(payload)
        same_keys(whole, ("input_tokens",), "a count")
        return int(one_of(whole["input_tokens"], int, "input_tokens"))

    def read_error(self, status: int, payload: bytes) -> None:
        whole = decoded_object(payload)
        same_keys(whole, ("type", "error", "request_id"), "an error's body")
        check(whole["type"] == "error", "an error is not of type error")
        same_keys(whole["error"], ("type", "message"), "an error")
        check(whole["error"]["message"] and isinstance(whole["error"]["message"], str), "an error without a message")


def _kept(block: dict[str, Any], echo: Echo) -> dict[str, Any]:
    """Return a block of a reply as a client sends the block back."""
    if echo is Echo.TRIMMED and block["type"] == "text":
        return {**block, "text": block["text"].strip()}
    if echo is Echo.RESPELLED and block["type"] == "tool_use":
        return {**block, "input": json.loads(respelled(json.dumps(block["input"]))), "cache_control": None}
    return block


def _whole(message: dict[str, Any]) -> Said:
    check(message["type"] == "message" and message["role"] == "assistant", "not an assistant's message")
    check(message["content"], "a reply without a block")
    return _said(message, message["content"], message["stop_reason"], message["usage"])


def _streamed(payload: bytes) -> Said:
    events = []
    for event in events_of(payload):
        data = decoded_object(event.data)
        check(data["type"] == event.name, f"event {event.name} holds {data['type']}")
        if event.name != "ping":
            events.append((data, event.data))
    if events[-1][0]["type"] == "error":
        Messages().read_error(0, events[-1][1])
        return Said(text="", reasoning=None, failure=events[-1][0]["error"]["message"])
    told = [data for data, _ in events]
    kinds = [data["type"] for data in told]
    check(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], f"events: {kinds}")
    message, stop = told[0]["message"], told[-2]
    check(message["content"] == [] and message["stop_reason"] is None, "message_start tells what is to come")
    check(message["usage"]["input_tokens"] >= stop["usage"]["input_tokens"], "input tokens differ within a stream")
    return _said(message, _blocks(told[1:-2]), stop["delta"]["stop_reason"], stop["usage"])


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content blocks of a stream, assembled from its events."""
    blocks: list[dict[str, Any]] = []
    block: dict[str, Any] | None = None
    partial = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                check(block is None and event["index"] == len(blocks), "a block begins out of order")
                block, partial = event["content_block"], ""
            case "content_block_delta":
                check(block is not None and event["index"] == len(blocks), "a delta of no open block")
                assert block is not None
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    block["signature"] = delta["signature"]
                    continue
                check(delta["type"] == DELTAS[block["type"]], f"a {delta['type']} in a block of {block['type']}")
                if block["type"] == "tool_use":
                    partial += delta["partial_json"]
                else:
                    block[block["type"]] += delta[block["type"]]
            case "content_block_stop":
                check(block is not None and event["index"] == len(blocks), "the end of no open block")
                assert block is not None
                if block["type"] == "tool_use":
                    block["input"] = decoded_object(partial.encode())
                blocks.append(block)
                block = None
            case kind:
                check(False, f"an event of type {kind} among blocks")
    check(block is None and blocks, "a stream's last block is open, or there is none")
    return blocks


def _said(message: dict[str, Any], blocks: list[dict[str, Any]], stop: str, usage: dict[str, int]) -> Said:
    same_keys(usage, USAGE, "usage")
    check(stop in STOPS, f"stop_reason is {stop!r}")
    calls = tuple(
        Called(one_of(block["id"], str, "id"), block["name"], json.dumps(one_of(block["input"], dict, "input")))
        for block in blocks
        if block["type"] == "tool_use"
    )
    check(stop == "max_tokens" or (stop == "tool_use") == bool(calls), f"{stop} with {len(calls)} calls")
    return Said(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=calls,
        cut=stop == "max_tokens",
        prompt_tokens=sum(usage[key] for key in USAGE[:3]),
        output_tokens=usage["output_tokens"],
        id=message["id"],
        items=[without(block, "citations") for block in blocks],
    )
