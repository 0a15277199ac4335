"""A Responses request body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: what is not asked for is not parsed, so the cost of reading a
request is one scan of its bytes; each message is decoded by `ResponsesHistory.parse` alone.

`instructions` are the first system message of this request only: a later one that names it by `previous_response_id`
brings its own. What the API would do on its side and nobody does here (background work, conversations and prompts
kept by a server) is refused. Hosted tools, and what a server once did with them, are not shown to the model, and noted.

Source: OpenAI API reference, "Create a model response".
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from outrider.dialects.base import AskedSampling, Caller, Memory, ModelRequest, WireCall
from outrider.dialects.field_policy import HISTORY, RESPONSES, TOOL, BodyReader, bounded
from outrider.dialects.json import depth_exceeds, refuse
from outrider.dialects.responses.items import HOSTED_ITEMS, Item, Placed, ResponsesHistory
from outrider.dialects.responses.stored_items import ResponseStore, store_of
from outrider.dialects.responses.tools import MAX_TOOL_DEPTH, Tool, ToolList, Tools, check_choice, read_tools
from outrider.dialects.server_extensions import (
    Extras,
    Thought,
    asked_form,
    response_format,
    sampled_as,
    template_thinking,
)

MAX_TOKENS = 1 << 24
"""An output limit above this means no limit; clients do send such."""

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_ORDINARY = "turn"
_NOTHING = frozenset({b"", b"null"})
_NO_MESSAGE = HOSTED_ITEMS | {"additional_tools"}
_StopString = Annotated[str, Meta(min_length=1)]


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _TextFormat(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


class _Body(Extras, kw_only=True):
    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=64)] | None = None
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
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the reply needs of its request. `echo` are the fields that the response repeats, ready to encode; `table`
    is the tools by the name that the model knows; `store` is None for a response that is not to be kept."""

    echo: dict[str, Any]
    table: dict[str, Tool]
    conversation: list[Placed]
    store: ResponseStore | None
    summary: bool
    encrypted: bool


_BODY = BodyReader(_Body, RESPONSES)
_TURN = msgspec.json.Decoder(_TurnMetadata)


def parse_request(call: WireCall, body: bytes, memory: Memory, *, generate: bool = True) -> ModelRequest:
    """The request in `body`. Raises RequestError; most of what is wrong in an item is found when it is parsed."""
    read = _BODY.read(body)
    wire = read.wire
    _check(wire, generate=generate)
    store = store_of(memory)
    conversation = store.conversation(wire.previous_response_id, _items(wire.input), stored=wire.store is not False)
    history = ResponsesHistory(wire.instructions, [at for at in conversation if at.item.kind() not in _NO_MESSAGE])
    if len(history) == bool(wire.instructions):
        refuse("input", "must not be empty")
    tools = read_tools(_tool_lists(wire, conversation), memory)
    check_choice(wire.tool_choice, tools)
    thought = _thought(wire)
    told = tools if wire.tool_choice != "none" else Tools()
    return ModelRequest(
        model=wire.model or "",
        messages=history,
        tools=told.specs(),
        tools_raw=told.raw if told.table else b"",
        sampling=_asked_sampling(wire, thought),
        ignored=bounded([*read.notes, *_notes(wire, conversation, tools), *thought.notes]),
        stream=bool(wire.stream),
        caller=_caller(call),
        private=Asked(
            echo=_echo(wire, tools.in_force),
            table=told.table,
            conversation=conversation,
            store=None if wire.store is False else store,
            summary=wire.reasoning is not None and wire.reasoning.summary is not None,
            encrypted=_ENCRYPTED in (wire.include or ()),
        ),
    )


def _check(wire: _Body, *, generate: bool) -> None:
    """Refuse what cannot be done, before anything is read."""
    if generate and wire.model is None:
        refuse("model", "is missing")
    if _LOGPROBS in (wire.include or ()):
        refuse("include", "log-probabilities are not served in this dialect: ask Chat Completions for them")


def _notes(wire: _Body, conversation: list[Placed], tools: Tools) -> list[str]:
    """What has no effect of the fields that are read here."""
    notes = [TOOL + kind for kind in tools.hosted]
    kinds = dict.fromkeys(at.item.kind() for at in conversation)
    notes += [HISTORY + kind for kind in kinds if kind in HOSTED_ITEMS]
    if wire.tool_choice not in (None, "none", "auto"):
        notes.append("tool_choice")
    if wire.parallel_tool_calls is False:
        notes.append("parallel_tool_calls")
    if wire.text is not None and wire.text.verbosity is not None:
        notes.append("text.verbosity")
    return notes


def _thought(wire: _Body) -> Thought:
    told = template_thinking(wire)
    effort = wire.reasoning.effort if wire.reasoning is not None else None
    if effort is None:
        return told
    return Thought(False, told.notes) if effort == "none" else Thought(told.on, (*told.notes, "reasoning.effort"))


def _asked_sampling(wire: _Body, thought: Thought) -> AskedSampling:
    stop = wire.stop or ()
    own = AskedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=None if wire.max_output_tokens is None else min(wire.max_output_tokens, MAX_TOKENS),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        thinking=thought.on,
    )
    form = wire.text.format if wire.text is not None else None
    return sampled_as(wire, own, asked_form(wire, response_format(form, "text.format")))


def _items(sent: str | list[Item] | None) -> list[Item]:
    if isinstance(sent, str):
        return [Item("message", "user", content=Raw(msgspec.json.encode(sent)))]
    return sent or []


def _tool_lists(wire: _Body, conversation: list[Placed]) -> list[ToolList]:
    """Every list of tools in the request: its own, and those that ride among its items."""
    own = [] if bytes(wire.tools) in _NOTHING else [ToolList(wire.tools, "tools", top=True)]
    riding = [
        ToolList(at.item.tools, f"{at.where}.tools", top=False)
        for at in conversation
        if at.item.kind() == "additional_tools" and at.item.tools
    ]
    return own + riding


def _echo(wire: _Body, tools: Raw) -> dict[str, Any]:
    """The fields of the request that its response repeats, with the defaults that are in force here."""
    text = wire.text or _TextFormat()
    form = text.format or {"type": "text"}
    choice = "auto" if wire.tool_choice is None else wire.tool_choice
    for name, value in (("text.format", form), ("tool_choice", choice)):
        if isinstance(value, dict) and depth_exceeds(value, MAX_TOOL_DEPTH):
            refuse(name, f"nests more than {MAX_TOOL_DEPTH} levels deep")
    reasoning = wire.reasoning or _Reasoning()
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
    """What Codex and OpenCode say about their agents: ids of the thread and of the one that spawned it, and what a
    call that is not an ordinary turn is for."""
    parent = call.header(b"x-codex-parent-thread-id") or call.header(b"x-parent-session-id")
    own = call.header(b"thread-id") or (call.header(b"x-session-id") if parent else None)
    return Caller(agent_id=own, parent_id=parent, purpose=call.header(b"x-openai-subagent") or _kind_of_call(call))


def _kind_of_call(call: WireCall) -> str | None:
    try:
        kind = _TURN.decode(call.header(b"x-codex-turn-metadata") or "{}").request_kind
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return None if kind == _ORDINARY else kind
