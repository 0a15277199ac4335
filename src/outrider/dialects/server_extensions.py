"""What inference servers read beside a dialect's own fields, in the words of vLLM and SGLang, and structured output.

It knows no dialect. Invariant: a request asks for one form of reply at the most.

Source: vLLM's and SGLang's OpenAI-compatible servers (sampling parameters, structured outputs, template arguments).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from outrider.constraint import Constraint, ConstraintKind
from outrider.dialects.base import AskedSampling
from outrider.dialects.field_policy import UNKNOWN
from outrider.dialects.json import decode, depth_exceeds, refuse, shown

MAX_CONSTRAINT = 1 << 16
"""Characters of a schema, expression or grammar. It is kept with the turn."""
MAX_DEPTH = 64
"""How deep a schema may nest."""
JSON_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)

Penalty = Annotated[float, Meta(ge=-2, le=2)]

_SPECIAL = frozenset(r"\.^$|?*+()[]{}")
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, Meta(min_length=1, max_length=MAX_CONSTRAINT)]
_Choices = Annotated[list[_Text], Meta(min_length=1, max_length=1024)]


class _StructuredOutputs(msgspec.Struct):
    json: Any = None
    json_object: bool | None = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    structural_tag: Any = None


class Extras(msgspec.Struct, kw_only=True):
    """The base of a dialect's body."""

    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 24)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=64)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    regex: _Text | None = None
    ebnf: _Text | None = None
    chat_template_kwargs: Raw = Raw()
    enable_thinking: bool | None = None


Object = dict[str, Any]


class Thought(msgspec.Struct, frozen=True):
    """What a client wants of the model's thinking, and its wishes about it that have no effect."""

    on: bool | None = None
    notes: tuple[str, ...] = ()


def sampled_as(wire: Extras, own: AskedSampling, constraint: Constraint | None) -> AskedSampling:
    """The dialect's `own` fields with all that the base has."""
    return msgspec.structs.replace(
        own,
        top_k=-1 if wire.top_k == 0 else wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=wire.logit_bias or {},
        constraint=constraint,
    )


def asked_form(wire: Extras, own: Constraint | None) -> Constraint | None:
    """The form of the reply, by the dialect's `own` field or by one of the base's. Raises RequestError."""
    found = [] if own is None else [own]
    found += _extra_forms(wire)
    if len(found) > 1:
        refuse("structured_outputs", "asks for more than one form of the reply: send one schema, regex or grammar")
    return found[0] if found else None


def response_format(form: Any, where: str) -> Constraint | None:
    """The forms that OpenAI's and Anthropic's dialects name by `type`; a schema is in the form or in its
    `json_schema`. Raises RequestError."""
    if form is None:
        return None
    if not isinstance(form, dict):
        refuse(where, "must be an object")
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return JSON_OBJECT
        case "json_schema":
            inner = form.get("json_schema", form)
            if not isinstance(inner, dict) or "schema" not in inner:
                refuse(f"{where}.schema", "is missing")
            return json_schema(inner["schema"], f"{where}.schema")
        case kind:
            known = "text, json_object and json_schema"
            return refuse(f"{where}.type", f"{shown(str(kind))} is not supported: {known} are")


def json_schema(schema: Any, where: str) -> Constraint:
    """A schema given as JSON, or as the text of it. Raises RequestError."""
    if isinstance(schema, str):
        schema = decode(_ANY, schema.encode(), where)
    if not isinstance(schema, dict):
        refuse(where, "must be a JSON schema, an object")
    if depth_exceeds(schema, MAX_DEPTH):
        refuse(where, f"nests more than {MAX_DEPTH} levels deep")
    text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_CONSTRAINT:
        refuse(where, f"has more than {MAX_CONSTRAINT} characters")
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def one_of(choices: list[str]) -> Constraint:
    """One of these texts, as a regular expression."""
    return Constraint(ConstraintKind.REGEX, "(" + "|".join(map(_escaped, choices)) + ")")


def template_thinking(wire: Extras) -> Thought:
    """What a client says about thinking in the template's own variables."""
    named = decode(_NAMED, wire.chat_template_kwargs, "chat_template_kwargs") if wire.chat_template_kwargs else None
    told = wire.enable_thinking
    notes = []
    for name, value in (named or {}).items():
        if name in ("enable_thinking", "thinking") and isinstance(value, bool | None):
            told = value if value is not None else told
        else:
            notes.append(f"chat_template_kwargs.{name}")
    return Thought(told, tuple(notes))


def unknown_in(where: str, sent: Object | None, known: Container[str]) -> list[str]:
    """The notes of fields of an object that nothing is known of."""
    return [f"{UNKNOWN}{where}.{name}" for name in sent or () if name not in known]


def words_for_thinking(where: str, sent: Object | None) -> Thought:
    """An object with a `type` (enabled, disabled, or as the model likes) and perhaps a budget."""
    if sent is None:
        return Thought()
    budget = [f"{where}.budget_tokens"] if sent.get("budget_tokens") is not None else []
    kind = sent.get("type")
    on = {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None
    return Thought(on, (*budget, *unknown_in(where, sent, _THINKING)))


def _extra_forms(wire: Extras) -> Iterator[Constraint]:
    more = wire.structured_outputs or _NOTHING_STRUCTURED
    if more.structural_tag is not None:
        refuse("structured_outputs.structural_tag", "is not supported: send a JSON schema, a regex or a grammar")
    if more.json_object:
        yield JSON_OBJECT
    for schema, where in ((more.json, "structured_outputs.json"), (wire.guided_json, "guided_json")):
        if schema is not None:
            yield json_schema(schema, where)
    for choices in (more.choice, wire.guided_choice):
        if choices is not None:
            yield one_of(choices)
    for text in (more.regex, wire.guided_regex, wire.regex):
        if text is not None:
            yield Constraint(ConstraintKind.REGEX, text)
    for text in (more.grammar, wire.guided_grammar, wire.ebnf):
        if text is not None:
            yield Constraint(ConstraintKind.GRAMMAR, text)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)


_THINKING = frozenset({"type", "budget_tokens", "display"})
_NOTHING_STRUCTURED = _StructuredOutputs()
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_NAMED: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(dict[str, Any] | None)
