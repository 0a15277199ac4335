"""Chat Completions for the fuzzer: a grammar of its requests, and a strict reader of its replies."""

from __future__ import annotations

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
    decoded,
    decoded_object,
    events_of,
    one_of,
    respelled,
    same_keys,
)

PATH = "/v1/chat/completions"
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details")


GRAMMAR: Grammar = {
    "body": {
        "model": ["'policy", "sentence"],
        "messages": ["opening", "opening", "opening", "quoted"],
        "tools~": ["declaration*", "declaration+"],
        "tool_choice?": ["'auto", "'none", "'required", {"type": "'function", "function": {"name": "name"}}],
        "parallel_tool_calls?": "flag",
        "stream": "flag",
        "stream_options~": [{"include_usage": "flag"}, {}, None],
        "temperature~": "temperature",
        "top_p?": "top_p",
        "top_k?": "top_k",
        "min_p?": [0, 0.5, 1, None],
        "seed?": "seed",
        "max_tokens~": "limit",
        "max_completion_tokens?": "limit",
        "stop?": ["stop", "stop+", [[]]],
        "logprobs?": "flag",
        "top_logprobs?": [0, 5, None],
        "return_token_ids?": "flag",
        "n?": [1, None],
        "user?": "text",
        "metadata?": "object",
        "response_format?": "object",
        "reasoning_effort?": "word",
        "store?": "flag",
        "x_unknown?": "json",
    },
    "opening": ("system~", "user", "user?"),
    "quoted": ("system~", "exchange", "exchange~", "message?", "user"),
    "exchange": ("user", "assistant", "result~"),
    "message": ["user", "system", "assistant", "result"],
    "user": {"role": "'user", "content": "content", "name?": "word", "cache_control?": "object"},
    "system": {"role": ["'system", "'developer"], "content": "content"},
    "assistant": {
        "role": "'assistant",
        "content~": ["text", "part*", None],
        "reasoning_content?": ["text", None],
        "tool_calls~": ["call*", None],
        "function_call?": {"name": "name", "arguments": "arguments"},
        "refusal?": None,
    },
    "result": {
        "role": ["'tool", "'tool", "'function"],
        "content": "content",
        "tool_call_id~": "id",
        "name?": "name",
    },
    "call": {
        "id~": "id",
        "type~": "'function",
        "function": {"name": "name", "arguments~": ["arguments", "arguments", "object"]},
        "index?": 0,
    },
    "content": ["text", "text", "text", "text", "part*", None],
    "part": ["plain", "plain", "plain", "plain", "marked", {"text": "text"}, "rarely"],
    "plain": {"type": ["'text", "'text", "'input_text"], "text": "text"},
    "marked": {"type": "'text", "text": "text", "cache_control": {"type": "'ephemeral"}},
    "rarely": ["image", {"type": "'refusal", "refusal": "text"}],
    "image": {"type": "'image_url", "image_url": ["image_url", {"url": "image_url", "detail?": "word"}]},
    "declaration": [
        {"type": "'function", "function": "function"},
        {"function": "function", "x?": "json"},
        "function",
    ],
    "function": {
        "name": "name",
        "description~": ["text", None],
        "parameters~": ["schema", "schema", None],
        "strict?": "flag",
    },
}


class Chat:
    """The `Speaker` of Chat Completions."""

    name = "chat"
    history = "messages"
    grammar = GRAMMAR

    def manner(self, writer: Writer) -> Manner:
        return Manner()

    def dressed(self, writer: Writer, body: Body) -> Body:
        return body

    def request(self, manner: Manner, payload: bytes) -> Request:
        return Request(method="POST", path=PATH, pieces=(payload,))

    def asides(self, writer: Writer) -> Request:
        """Return a request that generates nothing."""
        return Request(method="GET", path=writer.dice.choice(("/v1/models", "/v1/models/policy", "/v1/models/x")))

    def go_on(self, writer: Writer, body: Body, said: Said, echo: Echo) -> Body:
        message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
        if echo is Echo.TRIMMED:
            message["content"] = said.text.strip()
        elif said.text and writer.chance(0.2):
            message["content"] = [{"type": "text", "text": said.text}]
        if said.reasoning and echo is not Echo.NO_REASONING:
            message[writer.dice.choice(("reasoning_content", "reasoning"))] = said.reasoning
        if said.calls:
            message["tool_calls"] = [_call(call, echo) for call in said.calls]
        results = [{"role": "tool", "tool_call_id": call.id, "content": writer.write("text")} for call in said.calls]
        new = [] if results and writer.chance(0.7) else [{"role": "user", "content": writer.write("text")}]
        return {**body, "messages": [*body["messages"], message, *results, *new]}

    def read(self, payload: bytes, manner: Manner) -> Said:
        return _streamed(payload) if manner.stream else _whole(payload)

    def read_count(self, payload: bytes) -> int:
        raise AssertionError("Chat Completions counts nothing")

    def read_error(self, status: int, payload: bytes) -> None:
        read_error(payload)


def read_error(payload: bytes) -> None:
    """Check the error object, which Chat Completions and Responses share."""
    whole = decoded_object(payload)
    same_keys(whole, ("error",), "an error's body")
    error = one_of(whole["error"], dict, "error")
    same_keys(error, ("message", "type", "param", "code"), "an error")
    check(isinstance(error["message"], str) and error["message"], "an error without a message")
    one_of(error["type"], str, "error.type")
    one_of(error["param"], (str, type(None)), "error.param")
    one_of(error["code"], (str, type(None)), "error.code")


def _call(call: Called, echo: Echo) -> dict[str, Any]:
    arguments = respelled(call.arguments) if echo is Echo.RESPELLED else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _whole(payload: bytes) -> Said:
    whole = decoded_object(payload)
    check(whole["object"] == "chat.completion", "not a chat completion")
    check(len(whole["choices"]) == 1, "not one choice")
    choice, usage = whole["choices"][0], whole["usage"]
    message = choice["message"]
    _check_logprobs(choice["logprobs"], usage["completion_tokens"])
    if "token_ids" in choice:
        check(len(choice["token_ids"]) == usage["completion_tokens"], "token_ids are not as many as usage says")
        check(len(whole["prompt_token_ids"]) == usage["prompt_tokens"], "prompt_token_ids are not as usage says")
    calls = tuple(_called(call) for call in message.get("tool_calls", ()))
    return _said(
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        usage,
        whole["id"],
    )


def _streamed(payload: bytes) -> Said:
    events = events_of(payload)
    check(events and events[-1].data == b"[DONE]", "a stream does not end with [DONE]")
    chunks = [decoded(event.data) for event in events[:-1]]
    if chunks and "error" in chunks[-1]:
        read_error(events[-2].data)
        return Said(text="", reasoning=None, failure=chunks[-1]["error"]["message"])
    check(chunks and len({chunk["id"] for chunk in chunks}) == 1, "the chunks of one stream have several ids")
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    check(len(usages) <= 1 and (not usages or not chunks[-1]["choices"]), "usage is not told once, at the end")
    check(deltas[0]["delta"].get("role") == "assistant", "the first chunk tells no role")
    finishes = [delta["finish_reason"] for delta in deltas if delta["finish_reason"]]
    check(len(finishes) == 1 and deltas[-1]["finish_reason"], "the finish is not told once, in the last chunk")
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    check([call["index"] for call in calls] == list(range(len(calls))), "calls are not in order")
    text = "".join(delta["delta"].get("content") or "" for delta in deltas)
    thought = "".join(delta["delta"].get("reasoning_content") or "" for delta in deltas)
    return _said(text, thought, tuple(map(_called, calls)), finishes[0], usages[0] if usages else None, chunks[0]["id"])


def _said(
    text: str, thought: str, calls: tuple[Called, ...], finish: str, usage: dict[str, Any] | None, id: str
) -> Said:
    check(finish in ("stop", "length", "tool_calls"), f"finish_reason is {finish!r}")
    check(finish == "length" or (finish == "tool_calls") == bool(calls), f"{finish} with {len(calls)} calls")
    if usage is not None:
        same_keys(usage, USAGE, "usage")
        check(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "usage does not add up")
    return Said(
        text=text,
        reasoning=thought,
        calls=calls,
        cut=finish == "length",
        prompt_tokens=usage["prompt_tokens"] if usage else None,
        output_tokens=usage["completion_tokens"] if usage else None,
        id=id,
    )


def _called(call: dict[str, Any]) -> Called:
    check(call["type"] == "function" and call["id"], "a call without type or id")
    return Called(call["id"], call["function"]["name"], call["function"]["arguments"])


def _check_logprobs(logprobs: Any, tokens: int) -> None:
    if logprobs is not None:
        check(len(logprobs["content"]) == tokens, "logprobs are not as many as the tokens")
