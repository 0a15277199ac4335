"""Writes the replies of the Responses API: whole replies, and streams of server-sent events with increasing sequence
numbers.

Invariant: a streamed reply and a whole reply have the same items, and parsing the items returns exactly the model's
reply.

The items of a response are its reasoning, its text and its calls, in this order. A reply without calls always has a
text item, even an empty one: a client that drops reasoning then still has an item to send back. Reasoning tokens are
not counted separately, but `reasoning_tokens` is sent as 0, because strict clients refuse a usage without it.

Source: OpenAI API reference, "The response object" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from outrider.dialects.base import COMMENT, EVENT_STREAM, Completion, ModelRequest, Opening, event, line
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.responses.round_trip import computer_action, custom_call, seal
from outrider.dialects.responses.tools import ResponsesTool
from outrider.errors import ContextOverflow, OutriderError
from outrider.messages import Delta, ToolCall
from outrider.trajectory import FinishReason

_PREFIX = "resp_"
"""The prefix of response ids in OpenAI's API."""


class ResponsesContext(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the request that the writer of the reply needs.

    - `echo`: the request's fields that the response repeats, ready to encode.
    - `table`: the tools by the names that the model sees.
    - `keep`: a function that stores the response, given its id and its items; None if the request has `store: false`.
    - `summary`, `encrypted`: whether the reasoning is written to the fields `summary` and `encrypted_content` (see
      `reasoning_item`).
    """

    echo: dict[str, Any]
    table: dict[str, ResponsesTool]
    keep: Callable[[str, list[dict[str, Any]]], None] | None
    summary: bool
    encrypted: bool


class ResponseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response object that change while the reply is generated: its status, and the results so far."""

    status: str = "in_progress"
    output: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete: dict[str, Any] | None = None


def whole_reply(request: ModelRequest, completion: Completion) -> bytes:
    context: ResponsesContext = request.reply_context
    output = output_items(context, completion)
    if context.keep is not None:
        context.keep(response_id(completion.id), output)
    return msgspec.json.encode(response_object(context, completion, finished(completion, output)))


def response_object(context: ResponsesContext, about: Opening | Completion, outcome: ResponseOutcome) -> dict[str, Any]:
    """Return the response object, ready to encode. `outcome` has its status and results."""
    return {
        "id": response_id(about.id),
        "object": "response",
        "created_at": about.created,
        "status": outcome.status,
        "background": False,
        "error": outcome.error,
        "incomplete_details": outcome.incomplete,
        "model": about.model,
        "output": outcome.output,
        **context.echo,
        "usage": outcome.usage,
    }


def finished(completion: Completion, output: list[dict[str, Any]]) -> ResponseOutcome:
    """Return the outcome of a finished model call. An aborted reply is `incomplete` with the reason
    `max_output_tokens`: the API has no value for an abort, and `completed` would tell clients that the reply is
    complete."""
    whole = completion.finish is FinishReason.STOP
    return ResponseOutcome(
        status="completed" if whole else "incomplete",
        output=output,
        usage=usage(completion),
        incomplete=None if whole else {"reason": "max_output_tokens"},
    )


def output_items(context: ResponsesContext, completion: Completion) -> list[dict[str, Any]]:
    """Return the items of a whole reply, in order."""
    reply, items = completion.reply, list[dict[str, Any]]()
    if reply.reasoning:
        items.append(reasoning_item(context, item_id("rs", completion.id, 0), reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(message_item(item_id("msg", completion.id, len(items)), reply.content, message_status(completion)))
    for call in reply.tool_calls:
        items.append(call_item(context, completion.id, len(items), call))
    return items


def reasoning_item(context: ResponsesContext, id: str, text: str) -> dict[str, Any]:
    """Return the reasoning item. The text is in `summary` if the request has `reasoning.summary`, and otherwise in
    `content`. If the request includes `encrypted_content`, the text is in this field, too."""
    item: dict[str, Any] = {"id": id, "type": "reasoning", "summary": []}
    if context.summary:
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if context.encrypted:
        item["encrypted_content"] = seal(text)
    return item


def message_item(id: str, text: str, status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "status": status, "content": [text_part(text)], "role": "assistant"}


def message_status(completion: Completion) -> str:
    """Return the status of the text item: `incomplete` for a reply without calls that was cut off, else `completed`."""
    cut = completion.finish is not FinishReason.STOP and not completion.reply.tool_calls
    return "incomplete" if cut else "completed"


def text_part(text: str) -> dict[str, Any]:
    # OpenAI's client requires the field `annotations` in a text part.
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def call_item(context: ResponsesContext, completion_id: str, index: int, call: ToolCall) -> dict[str, Any]:
    """Return the item of a tool call. The item names the tool as the client does; a call of an unknown tool keeps the
    name that the model wrote. A computer call becomes a `function_call` if its arguments are not a valid action."""
    tool = context.table.get(call.name)
    if tool is not None and tool.custom:
        sent = custom_call(call)
        item: dict[str, Any] = {
            "id": item_id("ctc", completion_id, index),
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": sent.call_id,
            "name": tool.name,
            "input": sent.input,
        }
    elif tool is not None and tool.action_field and (action := computer_action(call)) is not None:
        item = {
            "id": item_id("cu", completion_id, index),
            "type": "computer_call",
            "status": "completed",
            "call_id": call.id,
            tool.action_field: [action] if tool.action_field == "actions" else action,
            "pending_safety_checks": [],
        }
    else:
        item = {
            "id": item_id("fc", completion_id, index),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name if tool is None else tool.name,
            "arguments": call.arguments,
        }
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item


def response_id(completion_id: str) -> str:
    """Return the response's id. The completion's id already has the prefix if the engine itself serves the Responses
    API."""
    return completion_id if completion_id.startswith(_PREFIX) else _PREFIX + completion_id


def item_id(kind: str, completion_id: str, index: int) -> str:
    """Return the id of the item at position `index` of the output. `kind` is the prefix for this kind of item, such as
    `msg`."""
    return f"{kind}_{completion_id.removeprefix(_PREFIX)}_{index}"


def usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


def failure(error: OutriderError) -> dict[str, Any]:
    """Return the `error` of a failed response. Clients react to its code: they shorten their history after a context
    overflow, and retry after a server error."""
    if isinstance(error, ContextOverflow):
        code = "context_length_exceeded"
    elif error.http_status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "server_error" if error.http_status >= 500 else "invalid_prompt"
    return {"code": code, "message": openai_error(error)["error"]["message"]}


_UNOPENED = Opening(id="unopened", created=0, model="")
"""The `Opening` of a stream that fails before `open` is called."""


class _ItemForm(msgspec.Struct, frozen=True):
    """The rules for streaming one kind of item: the prefix of its ids, the key for the index of a part, and the names
    of its events."""

    id_prefix: str
    index_key: str
    part: str
    delta: str

    def part_event(self, done: bool) -> str:
        return f"response.{self.part}.{'done' if done else 'added'}"


_TEXT = _ItemForm("msg", "content_index", "content_part", "response.output_text")
_REASONING = _ItemForm("rs", "content_index", "content_part", "response.reasoning_text")
_SUMMARY = _ItemForm("rs", "summary_index", "reasoning_summary_part", "response.reasoning_summary_text")


class _OpenItem(msgspec.Struct, frozen=True):
    """The item that a stream is writing. `pieces` has the pieces of its text so far."""

    form: _ItemForm
    id: str
    index: int
    pieces: list[str]

    def place(self) -> dict[str, Any]:
        """Return the fields by which an event refers to the item and to the item's part."""
        return {"item_id": self.id, "output_index": self.index, self.form.index_key: 0}

    def text_place(self) -> dict[str, Any]:
        """Like `place`, for an event that has text of the item."""
        return {**self.place(), "logprobs": []} if self.form is _TEXT else self.place()

    def delta_head(self) -> bytes:
        """Return the bytes of a delta event that come before the delta's text."""
        name = f"{self.form.delta}.delta"
        return b'event: %b\ndata: %b,"delta":' % (name.encode(), line({"type": name, **self.text_place()})[:-1])


class ResponsesStream:
    """Implements `StreamWriter` for the Responses API."""

    content_type = EVENT_STREAM
    ping = COMMENT

    def __init__(self, request: ModelRequest) -> None:
        context: ResponsesContext = request.reply_context
        self._context = context
        self._reasoning_form = _SUMMARY if context.summary else _REASONING
        self._about = _UNOPENED
        self._next = 0
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._delta_head = b""

    def open(self, opening: Opening) -> bytes:
        self._about = opening
        begun = {"response": response_object(self._context, opening, ResponseOutcome())}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        written = self._add(self._reasoning_form, delta.reasoning) if delta.reasoning else b""
        return written + self._add(_TEXT, delta.text) if delta.text else written

    def close(self, completion: Completion) -> bytes:
        status, calls = message_status(completion), completion.reply.tool_calls
        written = b""
        # A reply without calls has a text item, even an empty one (see the module's docstring).
        if not calls and (self._open is None or self._open.form is not _TEXT):
            written += self._begin_item(_TEXT)
        written += self._end_item(status)
        written += b"".join([self._call(call) for call in calls])
        outcome = finished(completion, self._items)
        if self._context.keep is not None:
            self._context.keep(response_id(completion.id), self._items)
        whole = {"response": response_object(self._context, completion, outcome)}
        return written + self._event(f"response.{outcome.status}", whole)

    def error(self, error: OutriderError) -> bytes:
        """Write two events for an error: `error`, which makes OpenAI's clients raise an exception, and
        `response.failed`, which Codex reads."""
        fields = openai_error(error)["error"]
        flat = {"code": fields["code"], "message": fields["message"], "param": fields["param"]}
        outcome = ResponseOutcome(status="failed", output=self._items, error=failure(error))
        failed = {"response": response_object(self._context, self._about, outcome)}
        return self._event("error", {**flat, "error": fields}) + self._event("response.failed", failed)

    def _add(self, form: _ItemForm, text: str) -> bytes:
        """Add text to the open item if it has this form, or else to a new item."""
        before = b"" if self._open is not None and self._open.form is form else self._begin_item(form)
        item = self._open
        assert item is not None
        item.pieces.append(text)
        number, self._next = self._next, self._next + 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (before, self._delta_head, line(text), number)

    def _begin_item(self, form: _ItemForm) -> bytes:
        """End the open item, if any, and begin an item of this form."""
        written = self._end_item("completed")
        index = len(self._items)
        id = item_id(form.id_prefix, self._about.id, index)
        item = self._open = _OpenItem(form, id, index, [])
        # The bytes before a delta's text are the same for all deltas of an item, so they are encoded once.
        self._delta_head = item.delta_head()
        begun: dict[str, Any] = {"id": id, "type": "reasoning", "summary": []}
        if form is _TEXT:
            begun = {"id": id, "type": "message", "status": "in_progress", "content": [], "role": "assistant"}
        written += self._event("response.output_item.added", {"output_index": index, "item": begun})
        return written + self._event(form.part_event(done=False), {**item.place(), "part": _part(form, "")})

    def _end_item(self, status: str) -> bytes:
        """End the open item, if any. `status` is the status of a text item; a reasoning item has none."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, form = "".join(item.pieces), item.form
        done = message_item(item.id, text, status) if form is _TEXT else reasoning_item(self._context, item.id, text)
        self._items.append(done)
        return (
            self._event(f"{form.delta}.done", {**item.text_place(), "text": text})
            + self._event(form.part_event(done=True), {**item.place(), "part": _part(form, text)})
            + self._event("response.output_item.done", {"output_index": item.index, "item": done})
        )

    def _call(self, call: ToolCall) -> bytes:
        """Write all events of one call at once, because the arguments are known only when the call is complete."""
        index = len(self._items)
        item = call_item(self._context, self._about.id, index, call)
        self._items.append(item)
        if item["type"] == "computer_call":
            begun = {**item, "status": "in_progress"}
            written = self._event("response.output_item.added", {"output_index": index, "item": begun})
            return written + self._event("response.output_item.done", {"output_index": index, "item": item})
        key, name = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        begun = {**item, key: "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        written = self._event("response.output_item.added", {"output_index": index, "item": begun})
        if item[key]:
            written += self._event(f"response.{name}.delta", {**place, "delta": item[key]})
        return (
            written
            + self._event(f"response.{name}.done", {**place, key: item[key]})
            + self._event("response.output_item.done", {"output_index": index, "item": item})
        )

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._next = self._next, self._next + 1
        return event({"type": name, **fields, "sequence_number": number}, name.encode())


def _part(form: _ItemForm, text: str) -> dict[str, Any]:
    if form is _TEXT:
        return text_part(text)
    return {"type": "summary_text" if form is _SUMMARY else "reasoning_text", "text": text}
