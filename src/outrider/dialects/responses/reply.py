"""A finished model call, its items and an error in the JSON shapes of the Responses API.

Invariant: an item is the same whether it was streamed or not, and the model's reply can be parsed from its items to the
character.

A response has its reasoning, its text and its calls as items, in that order. A reply without calls has a text item
even if the text is empty, so a client that keeps no reasoning still has a reply to send back. The number of reasoning
tokens is not known, but `reasoning_tokens` is 0: the API requires a number, and clients with strict types refuse a
usage without one. The other dialects allow null, or no field.

Source: OpenAI API reference, "The response object".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from outrider.dialects.base import Completion, Opening
from outrider.dialects.openai_errors import openai_error
from outrider.dialects.responses.round_trip import custom_call, seal
from outrider.dialects.responses.tools import ResponsesTool
from outrider.errors import ContextOverflow, OutriderError
from outrider.messages import ToolCall
from outrider.trajectory import FinishReason

_PREFIX = "resp_"
"""The prefix of a response's id, as in the API."""


class ResponsesContext(msgspec.Struct, frozen=True, kw_only=True):
    """The request's data for the writer of the reply.

    `echo` are the fields repeated in the response, ready to encode. `table` is the tools by the model's name for each.
    `keep` stores the response by its id and items; it is None if the response is not stored. `summary` and `encrypted`
    select the forms of the reasoning.
    """

    echo: dict[str, Any]
    table: dict[str, ResponsesTool]
    keep: Callable[[str, list[dict[str, Any]]], None] | None
    summary: bool
    encrypted: bool


class ResponseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a response."""

    status: str = "in_progress"
    output: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete: dict[str, Any] | None = None


def response_object(context: ResponsesContext, about: Opening | Completion, outcome: ResponseOutcome) -> dict[str, Any]:
    """The response in any state, ready to encode."""
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
    """The state of a response whose call ended. An aborted response is `incomplete` as if by its limit: the dialect
    has no word for an abort, and clients read `completed` as a complete reply."""
    whole = completion.finish is FinishReason.STOP
    return ResponseOutcome(
        status="completed" if whole else "incomplete",
        output=output,
        usage=usage(completion),
        incomplete=None if whole else {"reason": "max_output_tokens"},
    )


def output_items(context: ResponsesContext, completion: Completion) -> list[dict[str, Any]]:
    """The items of a whole reply, in order."""
    reply, items = completion.reply, list[dict[str, Any]]()
    if reply.reasoning:
        items.append(reasoning_item(context, item_id("rs", completion.id, 0), reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(message_item(item_id("msg", completion.id, len(items)), reply.content, message_status(completion)))
    for call in reply.tool_calls:
        items.append(call_item(context, completion.id, len(items), call))
    return items


def reasoning_item(context: ResponsesContext, id: str, text: str) -> dict[str, Any]:
    """The reasoning item: as a summary if the request has `reasoning.summary`, and also sealed if the request includes
    encrypted content."""
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
    """The status of the text item: `incomplete` for a reply that was cut off and has no calls, else `completed`."""
    cut = completion.finish is not FinishReason.STOP and not completion.reply.tool_calls
    return "incomplete" if cut else "completed"


def text_part(text: str) -> dict[str, Any]:
    # The official client's type requires annotations.
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def call_item(context: ResponsesContext, completion_id: str, index: int, call: ToolCall) -> dict[str, Any]:
    """A call under the client's name for the tool. A call of an unknown tool keeps its name."""
    tool = context.table.get(call.name)
    if tool is not None and tool.custom:
        sent = custom_call(call)
        item = {
            "id": item_id("ctc", completion_id, index),
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": sent.call_id,
            "name": tool.name,
            "input": sent.input,
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
    """The response's id. The prefix is not added twice: an engine that serves this API sends ids that have it."""
    return completion_id if completion_id.startswith(_PREFIX) else _PREFIX + completion_id


def item_id(kind: str, completion_id: str, index: int) -> str:
    """The id of the item at `index` in the output."""
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
    """The `error` of a failed response. Clients act on the code: they shorten their history after an overflow, and try
    again after a server's error."""
    if isinstance(error, ContextOverflow):
        code = "context_length_exceeded"
    elif error.http_status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "server_error" if error.http_status >= 500 else "invalid_prompt"
    return {"code": code, "message": openai_error(error)["error"]["message"]}
