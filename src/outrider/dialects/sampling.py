"""Parses the settings that several dialects share: sampling, thinking, the form of the reply, and extensions of
inference servers. The form of the reply is a constraint such as a JSON schema.

Invariant: a request with more than one form of the reply is refused.

Source: the OpenAI-compatible servers of vLLM and SGLang (sampling parameters, structured outputs, template arguments).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from outrider.constraint import Constraint, ConstraintKind
from outrider.dialects.base import RequestedSampling
from outrider.dialects.reading import UNKNOWN, check_depth, decode, quoted, refuse

MAX_TOKENS = 1 << 24
"""Maximum output limit in tokens; higher limits are lowered to this number. No context is this long, but clients send
huge numbers for "no limit"."""
MAX_CONSTRAINT = 1 << 16
"""Maximum number of characters of a schema, regular expression or grammar. The text is stored with the turn."""
JSON_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)

JsonObject = dict[str, Any]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
OutputLimit = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1)]
StopStrings = Annotated[list[StopString], Meta(max_length=64)]

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


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields common to the bodies of Chat, Responses and Messages: fields of the dialects themselves, and further
    fields that the servers of vLLM and SGLang accept."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
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


_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_TEMPLATE_VARIABLES: msgspec.json.Decoder[JsonObject | None] = msgspec.json.Decoder(JsonObject | None)
_REGEX_SPECIAL = frozenset(r"\.^$|?*+()[]{}")


def read_sampling(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    stop: str | list[str] | None,
    thinking: bool | None,
    constraint: Constraint | None,
) -> RequestedSampling:
    """Return all sampling parameters of a body. `constraint` is the form of the reply in the dialect's own field.
    Raises RequestError for more than one form of the reply, and for a form that is not supported."""
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        # vLLM's clients write 0 or -1 for "all tokens"; Outrider uses -1 only.
        top_k=-1 if body.top_k == 0 else body.top_k,
        min_p=body.min_p,
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_TOKENS),
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        constraint=_only_constraint(body, constraint),
        thinking=thinking,
    )


def read_thinking(body: SamplingFields, thinking: JsonObject | None, notes: list[str]) -> bool | None:
    """Return True if the request turns thinking on, False if it turns thinking off, None if it leaves thinking to the
    model.

    `thinking` is an object with a `type` (`enabled`, `disabled`, or another value that leaves thinking to the model),
    as in the APIs of Anthropic and Z.ai. This object takes precedence over the variables of the chat template. Fields
    without effect are added to `notes`. Raises RequestError.
    """
    enabled = body.enable_thinking
    sent = body.chat_template_kwargs
    variables = decode(_TEMPLATE_VARIABLES, sent, "chat_template_kwargs") if sent else None
    for name, value in (variables or {}).items():
        if name in ("enable_thinking", "thinking") and isinstance(value, bool | None):
            enabled = enabled if value is None else value
        else:
            notes.append(f"chat_template_kwargs.{name}")
    if thinking is not None:
        if thinking.get("budget_tokens") is not None:
            notes.append("thinking.budget_tokens")
        note_unknown("thinking", thinking, ("type", "budget_tokens", "display"), notes)
        kind = thinking.get("type")
        if kind in ("enabled", "disabled"):
            enabled = kind == "enabled"
    return enabled


def note_unknown(where: str, sent: JsonObject | None, known: Container[str], notes: list[str]) -> None:
    """Add a note to `notes` for each key of the object `sent` that is not in `known`. `where` is the object's path."""
    notes += [f"{UNKNOWN}{where}.{name}" for name in sent or () if name not in known]


def response_format(form: Any, where: str) -> Constraint | None:
    """Return the constraint for a form of the reply; None for free text. `form` is an object with a `type`, as in the
    APIs of OpenAI and Anthropic. A schema is in the object itself or in its `json_schema`. `where` is the object's path
    in the request. Raises RequestError."""
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
            known = "text, json_object, json_schema"
            return refuse(f"{where}.type", f"{quoted(str(kind))} is not supported; supported: {known}")


def json_schema(schema: Any, where: str) -> Constraint:
    """Return the constraint for a schema, which is given as an object or as JSON text. Raises RequestError."""
    if isinstance(schema, str):
        schema = decode(_ANY, schema.encode(), where)
    if not isinstance(schema, dict):
        refuse(where, "must be a JSON schema, an object")
    check_depth(schema, where)
    text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_CONSTRAINT:
        refuse(where, f"has more than {MAX_CONSTRAINT} characters")
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def one_of(choices: list[str]) -> Constraint:
    """Return the constraint that a reply is exactly one of the texts, as a regular expression."""
    # `re.escape` is not used, because `re.escape` also escapes spaces and dashes, and the engines' regular expressions
    # differ from Python's.
    escaped = ["".join(f"\\{char}" if char in _REGEX_SPECIAL else char for char in choice) for choice in choices]
    return Constraint(ConstraintKind.REGEX, f"({'|'.join(escaped)})")


def _only_constraint(body: SamplingFields, own: Constraint | None) -> Constraint | None:
    """Return the form of the reply, from the dialect's own field (`own`) or from one of the extensions; None for free
    text. Raises RequestError for more than one form."""
    found = [] if own is None else [own]
    structured = body.structured_outputs or _StructuredOutputs()
    if structured.structural_tag is not None:
        refuse("structured_outputs.structural_tag", "is not supported: send a JSON schema, a regex or a grammar")
    if structured.json_object:
        found.append(JSON_OBJECT)
    for schema, where in ((structured.json, "structured_outputs.json"), (body.guided_json, "guided_json")):
        if schema is not None:
            found.append(json_schema(schema, where))
    found += [one_of(choices) for choices in (structured.choice, body.guided_choice) if choices is not None]
    for kind, texts in (
        (ConstraintKind.REGEX, (structured.regex, body.guided_regex, body.regex)),
        (ConstraintKind.GRAMMAR, (structured.grammar, body.guided_grammar, body.ebnf)),
    ):
        found += [Constraint(kind, text) for text in texts if text is not None]
    if len(found) > 1:
        refuse("structured_outputs", "asks for more than one form of the reply: send one schema, regex or grammar")
    return found[0] if found else None
