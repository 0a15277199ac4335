"""One streamed response, written as typed server-sent events with rising sequence numbers.

Invariant: everything is sent once. `delta` sends text and reasoning, each in an item that stays open until the next
item begins. `close` sends calls and the whole response, whose items equal the items already sent. After `close` or
`error` nothing is written.

Source: OpenAI API reference, "Streaming events".
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.dialects import sse
from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.responses.reply import (
    ResponseOutcome,
    ResponsesContext,
    call_item,
    failure,
    finished,
    item_id,
    message_item,
    message_status,
    reasoning_item,
    response_id,
    response_object,
    text_part,
)
from outrider.errors import OutriderError
from outrider.messages import Delta, ToolCall

_encode = msgspec.json.Encoder().encode
_UNOPENED = Opening(id="unopened", created=0, model="")
"""Stands for the opening in the response of a stream that fails at its start."""


class _ItemForm(msgspec.Struct, frozen=True):
    """The streaming form of one kind of items: the prefix of their ids, the key of a part's index, and the names of
    their events."""

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
    """The open item of a stream; `said` are the pieces of its text."""

    form: _ItemForm
    id: str
    index: int
    said: list[str]

    def place(self) -> dict[str, Any]:
        """The position fields in every event of the item."""
        return {"item_id": self.id, "output_index": self.index, self.form.index_key: 0}

    def text_place(self) -> dict[str, Any]:
        """The position fields in an event with text."""
        return {**self.place(), "logprobs": []} if self.form is _TEXT else self.place()

    def delta_head(self) -> bytes:
        """A delta's event up to its text."""
        name = f"{self.form.delta}.delta"
        fields = _encode({"type": name, **self.text_place()})
        return b'event: %b\ndata: %b,"delta":' % (name.encode(), sse.one_line(fields)[:-1])


class ResponsesStream:
    """`StreamWriter` of the Responses API."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: ModelRequest) -> None:
        context: ResponsesContext = request.reply_context
        self._context = context
        self._reasoning_form = _SUMMARY if context.summary else _REASONING
        self._about = _UNOPENED
        self._next = 0
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._delta_head = b""
        self._ended = False

    def open(self, opening: Opening) -> bytes:
        self._about = opening
        begun = {"response": response_object(self._context, opening, ResponseOutcome())}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes:
        if self._ended:
            return b""
        written = self._say(self._reasoning_form, delta.reasoning) if delta.reasoning else b""
        return written + self._say(_TEXT, delta.text) if delta.text else written

    def close(self, completion: Completion) -> bytes:
        if self._ended:
            return b""
        self._ended = True
        status, calls = message_status(completion), completion.reply.tool_calls
        written = b""
        # A reply without calls has a text item, also if its text is empty (see reply.py).
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
        """Write an `error`, at which the official clients raise, and the failed response, which Codex reads."""
        if self._ended:
            return b""
        self._ended = True
        told = openai_error(error)["error"]
        flat = {"code": told["code"], "message": told["message"], "param": told["param"]}
        outcome = ResponseOutcome(status="failed", output=self._items, error=failure(error))
        failed = {"response": response_object(self._context, self._about, outcome)}
        return self._event("error", {**flat, "error": told}) + self._event("response.failed", failed)

    def ping(self) -> bytes:
        return b"" if self._ended else sse.PING

    def _say(self, form: _ItemForm, text: str) -> bytes:
        """Add text to the open item if it has the form, else to a new item."""
        before = b"" if self._open is not None and self._open.form is form else self._begin_item(form)
        item = self._open
        assert item is not None
        item.said.append(text)
        number, self._next = self._next, self._next + 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (before, self._delta_head, sse.one_line(_encode(text)), number)

    def _begin_item(self, form: _ItemForm) -> bytes:
        """End the open item and begin an item of `form`."""
        written = self._end_item("completed")
        index = len(self._items)
        id = item_id(form.id_prefix, self._about.id, index)
        item = self._open = _OpenItem(form, id, index, [])
        # The bytes before a delta's text are the same within an item, and are made once.
        self._delta_head = item.delta_head()
        begun: dict[str, Any] = {"id": id, "type": "reasoning", "summary": []}
        if form is _TEXT:
            begun = {"id": id, "type": "message", "status": "in_progress", "content": [], "role": "assistant"}
        written += self._event("response.output_item.added", {"output_index": index, "item": begun})
        return written + self._event(form.part_event(done=False), {**item.place(), "part": _part(form, "")})

    def _end_item(self, status: str) -> bytes:
        """End the open item, if there is one; `status` is the status of a text item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, form = "".join(item.said), item.form
        done = message_item(item.id, text, status) if form is _TEXT else reasoning_item(self._context, item.id, text)
        self._items.append(done)
        return (
            self._event(f"{form.delta}.done", {**item.text_place(), "text": text})
            + self._event(form.part_event(done=True), {**item.place(), "part": _part(form, text)})
            + self._event("response.output_item.done", {"output_index": item.index, "item": done})
        )

    def _call(self, call: ToolCall) -> bytes:
        """All events of one call. They are sent at once, because the arguments are known only when the call is
        complete."""
        index = len(self._items)
        item = call_item(self._context, self._about.id, index, call)
        self._items.append(item)
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
        return sse.event(_encode({"type": name, **fields, "sequence_number": number}), name.encode())


def _part(form: _ItemForm, text: str) -> dict[str, Any]:
    if form is _TEXT:
        return text_part(text)
    return {"type": "summary_text" if form is _SUMMARY else "reasoning_text", "text": text}
