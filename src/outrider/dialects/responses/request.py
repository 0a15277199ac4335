"""Parses a Responses request body into a `ModelRequest`.

This module parses the settings, `items.py` the items and `tools.py` the tools. Invariant: the body is scanned once, and
only needed data is decoded. `ResponsesHistory.parse` decodes messages later.

`instructions` become the first system message, for this request only: a later request with `previous_response_id` does
not inherit them. Background work, stored conversations and stored prompts are refused, because only OpenAI's servers
have them.

Source: OpenAI API reference, "Create a model response".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from outrider.dialects.base import Caller, Memory, ModelRequest, WireCall, opencode_caller
from outrider.dialects.field_policy import RESPONSES
from outrider.dialects.reading import (
    HISTORY,
    NOTHING,
    TOOL,
    BodyReader,
    OutputLimit,
    SamplingFields,
    StopString,
    StopStrings,
    bounded_notes,
    check_depth,
    is_absent,
    read_sampling,
    read_thinking,
    refuse,
    response_format,
)
from outrider.dialects.responses.items import HOSTED_ITEMS, Item, PlacedItem, ResponsesHistory
from outrider.dialects.responses.reply import ResponsesContext
from outrider.dialects.responses.stored_items import store_of
from outrider.dialects.responses.tools import ToolList, Tools, read_tool_choice, read_tools

COUNT = "/v1/responses/input_tokens"
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_ADDITIONAL_TOOLS = "additional_tools"
_ORDINARY_TURN = "turn"


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _TextFormat(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


class _Body(SamplingFields, kw_only=True):
    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stop: StopString | StopStrings | None = None
    tools: Raw = Raw()
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _TextFormat | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_output_tokens: OutputLimit | None = None


_BODY = BodyReader(_Body, RESPONSES)
_TURN_METADATA = msgspec.json.Decoder(_TurnMetadata)


def parse_request(call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
    """Parse a request that generates a reply or counts tokens. Raises RequestError. Most errors in an item are raised
    only when the item's message is parsed."""
    notes: list[str] = []
    wire = _BODY.read(body, notes)
    if call.path != COUNT and wire.model is None:
        refuse("model", "is missing")
    include = wire.include or ()
    if _LOGPROBS in include:
        refuse("include", "log-probabilities are served by Chat Completions only")
    sent = wire.input or []  # a stored conversation can be continued without a new item
    if isinstance(sent, str):
        sent = [Item("message", "user", content=Raw(msgspec.json.encode(sent)))]
    store = store_of(memory)
    conversation, stored = store.conversation(wire.previous_response_id, sent, stored=wire.store is not False)
    tool_lists = [] if is_absent(wire.tools) else [ToolList(wire.tools, "tools", top=True)]
    shown: list[PlacedItem] = []
    hosted: dict[str, None] = {}
    for at in conversation:
        if at.kind in HOSTED_ITEMS:
            hosted[at.kind] = None
        elif at.kind != _ADDITIONAL_TOOLS:
            shown.append(at)
        elif at.item.tools:
            tool_lists.append(ToolList(at.item.tools, f"{at.where}.tools", top=False))
    history = ResponsesHistory(wire.instructions, shown)
    if len(history) == bool(wire.instructions):
        refuse("input", "must not be empty")
    tools = read_tools(tool_lists, memory)
    notes += [TOOL + kind for kind in tools.hosted]
    notes += [HISTORY + kind for kind in hosted]
    single = wire.parallel_tool_calls is False
    chosen = read_tool_choice(wire.tool_choice, tools, single=single)
    if single and (chosen is None or not chosen.single):
        notes.append("parallel_tool_calls")
    text, reasoning = wire.text or _TextFormat(), wire.reasoning or _Reasoning()
    if text.verbosity not in NOTHING:
        notes.append("text.verbosity")
    thinking = read_thinking(wire, None, notes)
    if reasoning.effort == "none":
        thinking = False
    elif reasoning.effort not in NOTHING:
        notes.append("reasoning.effort")
    offered = tools if wire.tool_choice != "none" else Tools()
    return ModelRequest(
        model=wire.model or "",
        messages=history,
        tools=offered.specs(),
        tools_raw=offered.raw if offered.table else b"",
        tool_choice=chosen,
        sampling=read_sampling(
            wire,
            max_tokens=wire.max_output_tokens,
            stop=wire.stop,
            thinking=thinking,
            constraint=response_format(text.format, "text.format"),
        ),
        ignored=bounded_notes(notes),
        stream=bool(wire.stream),
        caller=_caller(call),
        reply_context=ResponsesContext(
            echo=_echo(wire, text, reasoning, tools.in_force),
            table=offered.table,
            keep=None if wire.store is False else partial(store.keep, stored),
            summary=reasoning.summary is not None,
            encrypted=_ENCRYPTED in include,
        ),
    )


def _echo(wire: _Body, text: _TextFormat, reasoning: _Reasoning, tools: Raw) -> dict[str, Any]:
    """Return the fields of the request that the response repeats. A field that the client did not send has its default
    value."""
    form = text.format or {"type": "text"}
    choice = "auto" if wire.tool_choice is None else wire.tool_choice
    for name, value in (("text.format", form), ("tool_choice", choice)):
        if isinstance(value, dict):
            check_depth(value, name)
    return {
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": wire.safety_identifier,
        "service_tier": "default",
        "store": wire.store is not False,
        "temperature": 1.0 if wire.temperature is None else wire.temperature,
        "text": {"format": form} if text.verbosity is None else {"format": form, "verbosity": text.verbosity},
        "tool_choice": choice,
        "tools": tools,
        "top_p": 1.0 if wire.top_p is None else wire.top_p,
        "truncation": "disabled",
        "user": wire.user,
        "metadata": wire.metadata or {},
    }


def _caller(call: WireCall) -> Caller:
    """Return the caller from the headers of Codex or OpenCode: the ids of the agent and of its parent. `purpose` is set
    for a call that is not an ordinary turn, such as a compaction."""
    opencode = opencode_caller(call)
    parent = call.header(b"x-codex-parent-thread-id") or opencode.parent_id
    own = call.header(b"thread-id") or opencode.agent_id
    purpose = call.header(b"x-openai-subagent")
    if not purpose:  # Codex sends the purpose in this header, or as JSON in another one
        try:
            purpose = _TURN_METADATA.decode(call.header(b"x-codex-turn-metadata") or "{}").request_kind
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            purpose = None  # a header in an unknown format has no effect
        purpose = None if purpose == _ORDINARY_TURN else purpose
    return Caller(agent_id=own, parent_id=parent, purpose=purpose)
