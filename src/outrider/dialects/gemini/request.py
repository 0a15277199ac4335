"""A generateContent, streamGenerateContent or countTokens body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: a history that was seen before is scanned, not decoded, so the cost
of reading a request is one pass over its bytes plus what is new; a message is decoded by `GeminiMessages.parse` alone.

What becomes of each field is in `settings.GEMINI_BODY` and `GEMINI_GENERATION`.

Source: Google AI API reference, "models.generateContent", "models.countTokens", "GenerationConfig".
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw

from outrider.constraint import Constraint
from outrider.dialects.base import AskedSampling, Caller, Memory, ModelRequest, WireCall
from outrider.dialects.field_policy import GEMINI_BODY, GEMINI_GENERATION, HISTORY, bounded, by_name, judged_by_name
from outrider.dialects.gemini.fields import Fields, absent, decode_object, fields, items
from outrider.dialects.gemini.history import GeminiMessages
from outrider.dialects.gemini.parts import role_of
from outrider.dialects.gemini.tools import asked_tools
from outrider.dialects.gemini.tools import json_schema as google_schema
from outrider.dialects.json import depth_exceeds, refuse
from outrider.dialects.server_extensions import JSON_OBJECT, MAX_DEPTH, Penalty, Thought, json_schema, one_of
from outrider.messages import Role

MAX_TOKENS = 1 << 24
"""An output limit above this means no limit; clients do send such."""

_StopString = Annotated[str, Meta(min_length=1)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: float | None = None
    thinking_level: str | None = None


class _Generation(msgspec.Struct, rename="camel"):
    """Google's clients write whole numbers as 64 or as 64.0."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[float, Meta(ge=-1, lt=1 << 31)] | None = None
    max_output_tokens: Annotated[float, Meta(ge=1)] | None = None
    stop_sequences: Annotated[list[_StopString], Meta(max_length=64)] | None = None
    seed: _Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    thinking_config: Raw = Raw()


class Asked(msgspec.Struct, frozen=True):
    """What writing the reply needs to know: the history it continues, whether thoughts are shown, and whether a
    stream is server-sent events or one JSON array."""

    history: GeminiMessages
    thoughts: bool = False
    events: bool = False


_TEXT, _JSON, _ENUM = "text/plain", "application/json", "text/x.enum"
_BODY_FIELDS = frozenset({"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"})
_GENERATION_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(_Generation))
_BODY_ROWS = by_name(GEMINI_BODY, _BODY_FIELDS)
_GENERATION_ROWS = by_name(GEMINI_GENERATION, _GENERATION_FIELDS)
_GENERATION = msgspec.json.Decoder(_Generation)
_THINKING = msgspec.json.Decoder(_Thinking)


def parse_request(call: WireCall, model: str, body: bytes, memory: Memory, *, stream: bool) -> ModelRequest:
    """A request to generate. Raises RequestError."""
    wire = fields(body)
    contents = _contents(wire)
    if role_of(contents[-1], f"contents[{len(contents) - 1}]") is Role.ASSISTANT:
        refuse("contents", "must not end with a content of role 'model': the beginning of a reply cannot be given")
    notes = judged_by_name(wire, _BODY_ROWS, _BODY_FIELDS)
    generation = _generation(wire, notes)
    thinking = _thinking(generation)
    thought = _thought(thinking)
    history = GeminiMessages(wire.get("systemInstruction", Raw()), contents, memory)
    tools = asked_tools(wire)
    return ModelRequest(
        model=model,
        messages=history,
        tools=tools.specs,
        tools_raw=tools.raw,
        sampling=_asked_sampling(generation, thought),
        ignored=bounded([*notes, *tools.notes, *(HISTORY + name for name in history.hosted), *thought.notes]),
        stream=stream,
        caller=_caller(call),
        private=Asked(history, thoughts=bool(thinking.include_thoughts), events=_as_events(call)),
    )


def parse_count(call: WireCall, model: str, body: bytes, memory: Memory) -> ModelRequest:
    """A request to count tokens: contents alone, or all of a request to generate. Raises RequestError."""
    wire = fields(body)
    if "generateContentRequest" in wire:
        wire = fields(wire["generateContentRequest"], "generateContentRequest")
    history = GeminiMessages(wire.get("systemInstruction", Raw()), _contents(wire), memory)
    tools = asked_tools(wire)
    return ModelRequest(
        model=model,
        messages=history,
        tools=tools.specs,
        tools_raw=tools.raw,
        sampling=AskedSampling(thinking=_thought(_thinking(_generation(wire, []))).on),
        caller=_caller(call),
        private=Asked(history),
    )


def _contents(wire: Fields) -> list[Raw]:
    contents = items(wire.get("contents", Raw()), "contents")
    if not contents:
        refuse("contents", "must not be empty")
    return contents


def _generation(wire: Fields, notes: list[str]) -> _Generation:
    """The configuration; `notes` get what of it has no effect."""
    raw = wire.get("generationConfig")
    if raw is None:
        return _Generation()
    generation = decode_object(_GENERATION, raw, "generationConfig")
    sent = fields(raw, "generationConfig")
    notes += judged_by_name(sent, _GENERATION_ROWS, _GENERATION_FIELDS, "generationConfig.")
    if generation.top_k is not None and not generation.top_k.is_integer():
        refuse("generationConfig.topK", "must be a whole number")
    return generation


def _thinking(generation: _Generation) -> _Thinking:
    raw = generation.thinking_config
    if absent(raw):
        return _Thinking()
    return decode_object(_THINKING, raw, "generationConfig.thinkingConfig")


def _thought(thinking: _Thinking) -> Thought:
    at = "generationConfig.thinkingConfig"
    notes = [] if thinking.thinking_level is None else [f"{at}.thinkingLevel"]
    if thinking.thinking_budget is not None and thinking.thinking_budget > 0:
        notes.append(f"{at}.thinkingBudget")
    return Thought(False if thinking.thinking_budget == 0 else None, tuple(notes))


def _form(generation: _Generation) -> Constraint | None:
    """The form of the reply: of text/x.enum one of the schema's values, else JSON."""
    schema, mime = generation.response_schema, generation.response_mime_type
    if mime == _ENUM and schema is not None:
        values = schema.get("enum")
        if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
            refuse("generationConfig.responseSchema.enum", "must be a list of texts")
        return one_of(values)
    if generation.response_json_schema is not None:
        return json_schema(generation.response_json_schema, "generationConfig.responseJsonSchema")
    if schema is not None:
        at = "generationConfig.responseSchema"
        if depth_exceeds(schema, MAX_DEPTH):
            refuse(at, f"nests more than {MAX_DEPTH} levels deep")
        return json_schema(google_schema(schema), at)
    if mime in (None, "", _TEXT, _JSON):
        return JSON_OBJECT if mime == _JSON else None
    return refuse("generationConfig.responseMimeType", f"must be {_TEXT}, {_JSON} or {_ENUM}")


def _asked_sampling(generation: _Generation, thought: Thought) -> AskedSampling:
    limit, top_k = generation.max_output_tokens, generation.top_k
    return AskedSampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=None if top_k is None else (int(top_k) or -1),
        max_tokens=None if limit is None else int(min(limit, MAX_TOKENS)),
        seed=generation.seed,
        stop=tuple(generation.stop_sequences or ()),
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        constraint=_form(generation),
        thinking=thought.on,
    )


def _as_events(call: WireCall) -> bool:
    return dict(parse_qsl(call.query.decode("latin-1"))).get("alt", "").lower() == "sse"


def _caller(call: WireCall) -> Caller:
    """What OpenCode says about its sub-agents; Google's own clients say nothing."""
    parent = call.header(b"x-parent-session-id")
    return Caller(agent_id=call.header(b"x-session-id") if parent is not None else None, parent_id=parent)
