"""A generateContent, streamGenerateContent or countTokens body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: a history that was seen before is scanned, not decoded, so the cost
of reading a request is one pass over its bytes plus what is new; a message is decoded by `GeminiMessages.parse` alone.

What Google reads of a body and this does not: safety settings, labels, response schemas and MIME types, penalties,
the choice of some functions among those declared, and whether the model is to think at all are tolerated and change
nothing; cached content, several candidates and tools that Google runs are refused.

Source: Google AI API reference, "models.generateContent", "models.countTokens", "GenerationConfig".
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw

from outrider.dialects.base import AskedSampling, Caller, Memory, ModelRequest, WireCall
from outrider.dialects.decode import refuse
from outrider.dialects.gemini_fields import Fields, absent, decode_object, fields, items
from outrider.dialects.gemini_history import GeminiMessages
from outrider.dialects.gemini_parts import role_of
from outrider.dialects.gemini_tools import asked_tools
from outrider.messages import Role

MAX_TOKENS = 1 << 24
"""An output limit above this means no limit; clients do send such."""

_StopString = Annotated[str, Meta(min_length=1)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None


class _Generation(msgspec.Struct, rename="camel"):
    """Google's clients write whole numbers as 64 or as 64.0."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[float, Meta(ge=-1, lt=1 << 31)] | None = None
    max_output_tokens: Annotated[float, Meta(ge=1)] | None = None
    stop_sequences: Annotated[list[_StopString], Meta(max_length=64)] | None = None
    seed: _Seed | None = None
    candidate_count: float | None = None
    thinking_config: Raw = Raw()


class Asked(msgspec.Struct, frozen=True):
    """What writing the reply needs to know: the history it continues, whether thoughts are shown, and whether a
    stream is server-sent events or one JSON array."""

    history: GeminiMessages
    thoughts: bool = False
    events: bool = False


_GENERATION = msgspec.json.Decoder(_Generation)
_THINKING = msgspec.json.Decoder(_Thinking)


def parse_request(call: WireCall, model: str, body: bytes, memory: Memory, *, stream: bool) -> ModelRequest:
    """A request to generate. Raises RequestError."""
    wire = fields(body)
    contents = _contents(wire)
    if role_of(contents[-1], f"contents[{len(contents) - 1}]") is Role.ASSISTANT:
        refuse("contents", "must not end with a content of role 'model': the beginning of a reply cannot be given")
    if "cachedContent" in wire and bytes(wire["cachedContent"]) != b'""':
        refuse("cachedContent", "is not supported: send the whole contents")
    generation = _generation(wire)
    thinking = _thinking(generation)
    history = GeminiMessages(wire.get("systemInstruction", Raw()), contents, memory)
    tools, tools_raw = asked_tools(wire)
    return ModelRequest(
        model=model,
        messages=history,
        tools=tools,
        tools_raw=tools_raw,
        sampling=_asked_sampling(generation),
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
    tools, tools_raw = asked_tools(wire)
    return ModelRequest(
        model=model, messages=history, tools=tools, tools_raw=tools_raw, caller=_caller(call), private=Asked(history)
    )


def _contents(wire: Fields) -> list[Raw]:
    contents = items(wire.get("contents", Raw()), "contents")
    if not contents:
        refuse("contents", "must not be empty")
    return contents


def _generation(wire: Fields) -> _Generation:
    raw = wire.get("generationConfig")
    generation = _Generation() if raw is None else decode_object(_GENERATION, raw, "generationConfig")
    if generation.candidate_count not in (None, 1):
        refuse("generationConfig.candidateCount", "only 1 is supported: one model call is one turn")
    if generation.top_k is not None and not generation.top_k.is_integer():
        refuse("generationConfig.topK", "must be a whole number")
    return generation


def _thinking(generation: _Generation) -> _Thinking:
    raw = generation.thinking_config
    if absent(raw):
        return _Thinking()
    return decode_object(_THINKING, raw, "generationConfig.thinkingConfig")


def _asked_sampling(generation: _Generation) -> AskedSampling:
    limit, top_k = generation.max_output_tokens, generation.top_k
    return AskedSampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=None if top_k is None else (int(top_k) or -1),
        max_tokens=None if limit is None else int(min(limit, MAX_TOKENS)),
        seed=generation.seed,
        stop=tuple(generation.stop_sequences or ()),
    )


def _as_events(call: WireCall) -> bool:
    return dict(parse_qsl(call.query.decode("latin-1"))).get("alt", "").lower() == "sse"


def _caller(call: WireCall) -> Caller:
    """What OpenCode says about its sub-agents; Google's own clients say nothing."""
    parent = call.header(b"x-parent-session-id")
    return Caller(agent_id=call.header(b"x-session-id") if parent is not None else None, parent_id=parent)
