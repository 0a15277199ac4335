"""OpenAI Responses for the fuzzer: a grammar of its requests, and a strict reader of its replies."""

from __future__ import annotations

from typing import Any

from support.fuzz.chat import read_error
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

PATH = "/v1/responses"
COUNT = f"{PATH}/input_tokens"
ENDS = ("response.completed", "response.incomplete")


GRAMMAR: Grammar = {
    "body": {
        "model": ["'policy", "sentence"],
        "input": ["text", "opening", "opening", "opening", "quoted"],
        "instructions~": ["text", None],
        "tools~": ["declaration*", "declaration+"],
        "tool_choice?": ["'auto", "'none", "'required", {"type": "'allowed_tools", "tools": "json"}],
        "parallel_tool_calls?": "flag",
        "stream": "flag",
        "store~": "flag",
        "include~": [("'reasoning.encrypted_content",), "include"],
        "reasoning~": [{"summary": ["'auto", None], "effort?": "word"}, {}, None],
        "text?": [{"format": {"type": "'text"}, "verbosity?": "word"}, {"format": "object"}],
        "temperature~": "temperature",
        "top_p?": "top_p",
        "max_output_tokens~": "limit",
        "metadata?": [{"a": "text"}, None],
        "background?": [False, None],
        "previous_response_id?": ["'resp_none", None],
        "conversation?": None,
        "prompt?": None,
        "truncation?": "word",
        "prompt_cache_key?": "text",
        "safety_identifier?": "text",
        "user?": "text",
        "service_tier?": "word",
        "x_unknown?": "json",
    },
    "include": ("included",),
    "included": ["'reasoning.encrypted_content", "'file_search_call.results", "word"],
    "opening": ("developer~", "user", "user?", "riding?"),
    "quoted": ("developer~", "exchange", "exchange~", "item?", "user"),
    "exchange": ("user", "reasoning~", "assistant~", "call", "output"),
    "item": ["user", "assistant", "reasoning", "call", "output", "agent", "riding", "shell", "reference"],
    "reference": {"type~": "'item_reference", "id": "id"},
    "user": {"role": "'user", "content": "content", "type~": "'message", "id?": "id", "status?": "word"},
    "developer": {"role": ["'developer", "'system"], "content": ["text", "part*"]},
    "assistant": {
        "type~": "'message",
        "role": "'assistant",
        "content": ["text", "said*"],
        "id?": "id",
        "status?": "word",
        "phase?": "word",
    },
    "said": {"type": "'output_text", "text": "text", "annotations~": [[]], "logprobs?": [[]]},
    "reasoning": {
        "type": "'reasoning",
        "id~": "id",
        "summary": "summary*",
        "content~": ["thought*", None],
        "encrypted_content?": ["text", "'outrider1:aGk=", "'outrider1:!", None],
    },
    "summary": {"type": "'summary_text", "text": "text"},
    "thought": {"type": "'reasoning_text", "text": "text"},
    "call": [
        {"type": "'function_call", "call_id": "id", "name": "name", "arguments": ["arguments", "object"]},
        {"type": "'function_call", "call_id": "id", "name": "name", "arguments": "arguments", "namespace": "name"},
        {"type": "'custom_tool_call", "call_id": "id", "name": "name", "input": "text", "id?": "id"},
    ],
    "output": [
        {"type": "'function_call_output", "call_id": "id", "output": "content", "status?": "word"},
        {"type": "'custom_tool_call_output", "call_id": "id", "output": "content"},
    ],
    "shell": [
        {"type": "'local_shell_call", "call_id": "id", "action": {"command": ["text+"], "type": "'exec"}},
        {"type": "'local_shell_call_output", "id": "id", "output": "text"},
    ],
    "agent": {"type": "'agent_message", "content": ["text", "part*"], "author": "word"},
    "riding": {"type": "'additional_tools", "role?": "'developer", "tools": "declaration*"},
    "content": ["text", "text", "text", "text", "part*"],
    "part": ["plain", "plain", "plain", "plain", "plain", "rarely"],
    "plain": {"type": ["'input_text", "'output_text", "'text"], "text": "text"},
    "rarely": [
        {"type": "'input_image", "image_url": "image_url", "detail?": "word"},
        {"type": "'refusal", "refusal": "text"},
    ],
    "declaration": ["function", "function", "custom", "namespace", "hosted"],
    "function": {
        "type": "'function",
        "name": "name",
        "description~": ["text", None],
        "parameters~": ["schema", None],
        "strict?": "flag",
        "defer_loading?": "flag",
    },
    "custom": {
        "type": "'custom",
        "name": ["'patch", "'apply"],
        "description~": "text",
        "format?": [{"type": "'text"}, {"type": "'grammar", "syntax": "'lark", "definition": "text"}],
    },
    "namespace": {"type": "'namespace", "name": ["'fs", "'mcp__x__"], "description~": "text", "tools": "inner"},
    "inner": ("function", "custom~"),
    "hosted": {"type": ["'web_search", "'mcp", "'code_interpreter"], "x?": "json"},
}


class Responses:
    """The `Speaker` of OpenAI Responses."""

    name = "responses"
    history = "input"
    grammar = GRAMMAR

    def manner(self, writer: Writer) -> Manner:
        return Manner(form="count" if writer.chance(0.06) else "")

    def dressed(self, writer: Writer, body: Body) -> Body:
        return body

    def request(self, manner: Manner, payload: bytes) -> Request:
        return Request(method="POST", path=COUNT if manner.form == "count" else PATH, pieces=(payload,))

    def asides(self, writer: Writer) -> Request:
        path = writer.dice.choice((f"{PATH}/resp_x", f"{PATH}/resp_x/cancel", f"{PATH}/", f"{PATH}/resp_x/input_items"))
        return Request(method=writer.dice.choice(("GET", "DELETE", "POST")), path=path)

    def go_on(self, writer: Writer, body: Body, said: Said, echo: Echo) -> Body:
        """Return the body of the next request, with the items of the reply, or with the response's id if the response
        was stored."""
        outputs = [
            {
                "type": f"{item['type']}_output",
                "call_id": item["call_id"],
                "output": writer.write("text"),
            }
            for item in said.items
            if "call_id" in item
        ]
        new = [] if outputs and writer.chance(0.7) else [{"role": "user", "content": writer.write("text")}]
        if body.get("store") is not False and writer.chance(0.4):
            return {**body, "input": [*outputs, *new], "previous_response_id": said.id}
        before = body["input"]
        if isinstance(before, str):
            before = [{"role": "user", "content": before}]
        kept = [_kept(item, echo) for item in said.items]
        if echo is Echo.NO_REASONING:
            kept = [item for item in kept if item["type"] != "reasoning"]
        return {**body, "input": [*before, *kept, *outputs, *new]}

    def read(self, payload: bytes, manner: Manner) -> Said:
        return _streamed(payload) if manner.stream else _said(decoded_object(payload))

    def read_count(self, payload: bytes) -> int:
        whole = decoded_object(payload)
        same_keys(whole, ("object", "input_tokens"), "a count")
        return int(one_of(whole["input_tokens"], int, "input_tokens"))

    def read_error(self, status: int, payload: bytes) -> None:
        read_error(payload)


def _kept(item: dict[str, Any], echo: Echo) -> dict[str, Any]:
    """Return an item of a reply as a client sends the item back."""
    if echo is Echo.TRIMMED and item["type"] == "message":
        return without(item, "id", "status") | {
            "content": [{**part, "text": part["text"].strip()} for part in item["content"]]
        }
    if echo is Echo.RESPELLED and item["type"] == "function_call":
        return without(item, "id", "status") | {"arguments": respelled(item["arguments"])}
    return item


def _streamed(payload: bytes) -> Said:
    events = []
    for number, event in enumerate(events_of(payload)):
        data = decoded_object(event.data)
        check(data["type"] == event.name, f"event {event.name} holds {data['type']}")
        check(data["sequence_number"] == number, f"event {number} has the number {data['sequence_number']}")
        events.append(data)
    kinds = [event["type"] for event in events]
    check(kinds[:2] == ["response.created", "response.in_progress"] or kinds[0] == "error", f"it begins {kinds[:2]}")
    if kinds[-1] == "response.failed":
        check(kinds[-2] == "error", "a response failed without an error event")
        return Said(text="", reasoning=None, failure=events[-2]["message"])
    check(kinds[-1] in ENDS, f"a stream ends with {kinds[-1]}")
    whole = events[-1]["response"]
    check(events[0]["response"]["id"] == whole["id"], "the response's id changed")
    items = _Items()
    for told in events[2:-1]:
        items.take(told)
    check(items.done == whole["output"], "the items told one by one are not those of the response")
    return _said(whole)


class _Items:
    """The items of a stream, assembled one after another."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._said = ""

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        check(event["output_index"] == len(self.done), f"{kind} of another item than the open one")
        if kind == "output_item.added":
            check(self._open is None, "an item begins within another")
            self._open, self._said = event["item"], ""
            return
        check(self._open is not None, f"{kind} without an item")
        assert self._open is not None
        if kind == "output_item.done":
            check(event["item"]["id"] == self._open["id"], "an item ends with another id")
            check(self._said == _words(event["item"]), "an item's deltas are not its text")
            self.done.append(event["item"])
            self._open = None
            return
        check(event["item_id"] == self._open["id"], f"{kind} of another item's id")
        if kind.endswith(".delta"):
            self._said += event["delta"]
        elif kind.endswith(("text.done", "input.done", "arguments.done")):
            told = event.get("text", event.get("arguments", event.get("input")))
            check(self._said == told, f"{kind} tells other text than the deltas did")


def _words(item: dict[str, Any]) -> str:
    match item["type"]:
        case "message":
            return "".join(part["text"] for part in item["content"])
        case "reasoning":
            return "".join(part["text"] for part in item.get("content") or item["summary"])
        case _:
            return str(item.get("arguments", item.get("input")))


def _said(whole: dict[str, Any]) -> Said:
    check(whole["object"] == "response" and whole["error"] is None, "not a response that ended well")
    cut = whole["status"] == "incomplete"
    check(cut or whole["status"] == "completed", f"status is {whole['status']!r}")
    check(cut == (whole["incomplete_details"] is not None), "incomplete without details")
    output, usage = whole["output"], whole["usage"]
    check(output, "a response without an item")
    check(len({item["id"] for item in output}) == len(output), "two items have one id")
    check(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], "usage does not add up")
    return Said(
        text="".join(_words(item) for item in output if item["type"] == "message"),
        reasoning="".join(_words(item) for item in output if item["type"] == "reasoning"),
        calls=tuple(Called(item["call_id"], item["name"], _words(item)) for item in output if "call_id" in item),
        cut=cut,
        prompt_tokens=usage["input_tokens"],
        output_tokens=usage["output_tokens"],
        id=whole["id"],
        items=output,
    )
