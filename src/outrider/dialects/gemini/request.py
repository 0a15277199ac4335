"""Parses the body of a generateContent, streamGenerateContent or countTokens call into a `ModelRequest`.

This module parses the settings, `tools.py` the tools and `history.py` the contents. Invariant: contents that were part
of an earlier request are scanned, not decoded. So reading a request takes one pass over its bytes, plus decoding its
new contents. `GeminiHistory.parse` makes the messages later.

Source: Google AI API reference, "models.generateContent", "models.countTokens", "GenerationConfig".
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw

from outrider.constraint import Constraint
from outrider.dialects.base import Memory, ModelRequest, RequestedSampling, WireCall, opencode_caller
from outrider.dialects.field_policy import GEMINI_BODY, GEMINI_GENERATION
from outrider.dialects.gemini.contents import role_of
from outrider.dialects.gemini.history import GeminiHistory
from outrider.dialects.gemini.proto_json import Fields, decode_object, fields, items
from outrider.dialects.gemini.tools import from_google_schema, read_tools
from outrider.dialects.reading import (
    HISTORY,
    JSON_OBJECT,
    MAX_TOKENS,
    NOTHING,
    Penalty,
    Seed,
    StopStrings,
    Temperature,
    TopP,
    apply_rules,
    bounded_notes,
    check_depth,
    is_absent,
    json_schema,
    one_of,
    refuse,
    rules_by_name,
)
from outrider.messages import Role

_AT = "generationConfig"
_THINKING_AT = f"{_AT}.thinkingConfig"
_TEXT, _JSON, _ENUM = "text/plain", "application/json", "text/x.enum"


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: float | None = None
    thinking_level: str | None = None


class _Generation(msgspec.Struct, rename="camel"):
    """The generation settings. `topK` and `maxOutputTokens` are floats here, because Google's clients may write 64 as
    64.0."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[float, Meta(ge=-1, lt=1 << 31)] | None = None
    max_output_tokens: Annotated[float, Meta(ge=1)] | None = None
    stop_sequences: StopStrings | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    thinking_config: Raw = Raw()


class GeminiContext(msgspec.Struct, frozen=True):
    """The values of the request that the writer of the reply needs. `thoughts` is True if the reply shows thoughts.
    `events` is True if a stream consists of server-sent events, and False if it is one JSON array."""

    history: GeminiHistory
    thoughts: bool = False
    events: bool = False


_BODY_FIELDS = frozenset({"contents", "systemInstruction", "tools", "toolConfig", _AT})
_GENERATION_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(_Generation))
_THINKING_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(_Thinking))
_BODY_RULES = rules_by_name(GEMINI_BODY, _BODY_FIELDS)
_GENERATION_RULES = rules_by_name(GEMINI_GENERATION, _GENERATION_FIELDS)
_GENERATION = msgspec.json.Decoder(_Generation)
_THINKING = msgspec.json.Decoder(_Thinking)


def resource_of(call: WireCall) -> str:
    """Return MODEL or MODEL:METHOD from the path of a call. Some clients write `models/` twice."""
    resource = call.path.partition("/models/")[2]
    return resource.removeprefix("models/")


def model_of(call: WireCall) -> str:
    return resource_of(call).rpartition(":")[0]


def parse_request(call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
    """Parse a request that generates a reply or counts tokens. Raises RequestError."""
    if call.path.endswith(":countTokens"):
        return _parse_count(call, body, memory)
    notes: list[str] = []
    wire = fields(body)
    contents = _contents(wire)
    if role_of(contents[-1], f"contents[{len(contents) - 1}]") is Role.ASSISTANT:
        refuse("contents", "must not end with a content of role 'model': a reply cannot be prefilled")
    apply_rules(wire, _BODY_RULES, _BODY_FIELDS, "", notes)
    generation = _read_generation(wire, notes)
    history = GeminiHistory(wire.get("systemInstruction", Raw()), contents, memory)
    chosen = read_tools(wire, memory, notes)
    notes += [HISTORY + name for name in history.hosted]
    thinking = _read_thinking(generation, notes)
    limit, top_k = generation.max_output_tokens, generation.top_k
    sampling = RequestedSampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=None if top_k is None else (int(top_k) or -1),  # 0 means "all tokens", which Outrider writes as -1
        max_tokens=None if limit is None else int(min(limit, MAX_TOKENS)),
        seed=generation.seed,
        stop=tuple(generation.stop_sequences or ()),
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        constraint=_constraint(generation),
        thinking=_thinking_switch(thinking),
    )
    return ModelRequest(
        model=model_of(call),
        messages=history,
        tools=chosen.tools.specs,
        tools_raw=chosen.tools.raw,
        tool_choice=chosen.choice,
        sampling=sampling,
        ignored=bounded_notes(notes),
        stream=call.path.endswith(":streamGenerateContent"),
        caller=opencode_caller(call),
        reply_context=GeminiContext(
            history,
            thoughts=bool(thinking.include_thoughts),
            events=dict(parse_qsl(call.query.decode("latin-1"))).get("alt", "").lower() == "sse",
        ),
    )


def _parse_count(call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
    """Parse a request that counts tokens. Its body has either contents or a whole generateContent request. Raises
    RequestError."""
    wire = fields(body)
    if "generateContentRequest" in wire:
        wire = fields(wire["generateContentRequest"], "generateContentRequest")
    history = GeminiHistory(wire.get("systemInstruction", Raw()), _contents(wire), memory)
    notes: list[str] = []  # dropped: notes are stored with a turn, and a token count makes no turn
    chosen = read_tools(wire, memory, notes)
    thinking = _read_thinking(_read_generation(wire, notes), notes)
    return ModelRequest(
        model=model_of(call),
        messages=history,
        tools=chosen.tools.specs,
        tools_raw=chosen.tools.raw,
        sampling=RequestedSampling(thinking=_thinking_switch(thinking)),
        caller=opencode_caller(call),
        reply_context=GeminiContext(history),
    )


def _contents(wire: Fields) -> list[Raw]:
    contents = items(wire.get("contents", Raw()), "contents")
    if not contents:
        refuse("contents", "must not be empty")
    return contents


def _read_generation(wire: Fields, notes: list[str]) -> _Generation:
    raw = wire.get(_AT)
    if raw is None:
        return _Generation()
    generation = decode_object(_GENERATION, raw, _AT)
    apply_rules(fields(raw, _AT), _GENERATION_RULES, _GENERATION_FIELDS, f"{_AT}.", notes)
    if generation.top_k is not None and not generation.top_k.is_integer():
        refuse(f"{_AT}.topK", "must be a whole number")
    return generation


def _read_thinking(generation: _Generation, notes: list[str]) -> _Thinking:
    raw = generation.thinking_config
    if is_absent(raw):
        return _Thinking()
    thinking = decode_object(_THINKING, raw, _THINKING_AT)
    apply_rules(fields(raw, _THINKING_AT), {}, _THINKING_FIELDS, f"{_THINKING_AT}.", notes)
    if thinking.thinking_level not in NOTHING:
        notes.append(f"{_THINKING_AT}.thinkingLevel")
    if thinking.thinking_budget is not None and thinking.thinking_budget > 0:
        notes.append(f"{_THINKING_AT}.thinkingBudget")
    return thinking


def _thinking_switch(thinking: _Thinking) -> bool | None:
    """Return False for a thinking budget of 0, which turns thinking off, and otherwise None: the model decides."""
    return False if thinking.thinking_budget == 0 else None


def _constraint(generation: _Generation) -> Constraint | None:
    """Return the constraint for the requested form of the reply; None for free text. With the media type text/x.enum
    and a schema, the reply must be one of the schema's values. Otherwise a schema requires JSON that matches it, and
    application/json without a schema requires a JSON object. Raises RequestError."""
    schema, mime = generation.response_schema, generation.response_mime_type
    if mime == _ENUM and schema is not None:
        values = schema.get("enum")
        if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
            refuse(f"{_AT}.responseSchema.enum", "must be a list of texts")
        return one_of(values)
    if generation.response_json_schema is not None:
        return json_schema(generation.response_json_schema, f"{_AT}.responseJsonSchema")
    if schema is not None:
        check_depth(schema, f"{_AT}.responseSchema")
        return json_schema(from_google_schema(schema), f"{_AT}.responseSchema")
    if mime in (None, "", _TEXT, _JSON):
        return JSON_OBJECT if mime == _JSON else None
    return refuse(f"{_AT}.responseMimeType", f"must be {_TEXT}, {_JSON} or {_ENUM}")
