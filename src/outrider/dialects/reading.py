"""Parses the parts of a request that several dialects share: JSON, the fields of a body, images, tools, sampling,
thinking, and the required form of the reply, such as a JSON schema.

Invariants:

- Wrong data raises only `RequestError`, with the name of the field.
- If a key is repeated, its last value is used.
- A field that no struct declares is skipped, and only its JSON syntax is checked.
- If a client sends a call's arguments back, the parsed arguments are equal to the sampled arguments (as
  `tokens/tree/canonical.py` compares them), even if the client writes the same values as different JSON.
- A request with more than one form of the reply is refused.

Source: the OpenAI-compatible servers of vLLM and SGLang (sampling parameters, structured outputs, template arguments).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Annotated, Any, Generic, NoReturn, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw

from outrider.concurrency.base64_pieces import decode_base64
from outrider.constraint import MAX_CONSTRAINT, Constraint, ConstraintKind, ToolChoice
from outrider.dialects.base import RequestedSampling, WireCall
from outrider.dialects.field_policy import FieldRule, Table, Treatment
from outrider.errors import RequestError
from outrider.media import PDF, attachment, broken_image, document, encoded_size
from outrider.messages import Attachment, Image, ToolSpec, image_from_bytes, image_from_url

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

MAX_NOTES = 32
"""Maximum number of notes of one request. A note names a part of the request that has no effect, such as an ignored
field. Further notes are dropped."""
MAX_NOTE = 64
"""Maximum number of characters of a note. Longer notes are cut, because they contain names that clients choose."""
UNKNOWN = "unknown."
"""The prefix of a note about a field that is in no table of `field_policy.py`."""
TOOL = "tools."
"""The prefix of a note about a tool that the model does not see."""
HISTORY = "history."
"""The prefix of a note about a part of the history that the model does not see."""
RESULT = "results."
"""The prefix of a note about a file in a tool's result. The model sees a text instead of this file (`media.py`)."""
MAX_DEPTH = 64
"""Maximum depth of nested lists and objects in a schema. Chat templates and engines process schemas recursively, so a
deeper schema could exceed their recursion limit."""
MAX_TOKENS = 1 << 24
"""The highest limit of output tokens. Higher limits are lowered to this number, because clients send huge numbers to
say "no limit". No model's context is this long."""
NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that request nothing. A field with one of these values is never added to the notes."""
JSON_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)


class _NamedModel(msgspec.Struct):
    model: str | None = None


_NAMED_MODEL = msgspec.json.Decoder(_NamedModel)

# msgspec reports the path of a wrong value only in the error's text, so these patterns extract it.
_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NULLS = frozenset({b"", b"null"})
_STRING = msgspec.json.Decoder(str)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_ABSENT = Raw()
"""The value of a missing field. Compare it by identity (`is`), because a value from a client may be equal to it."""
_LONGEST_NEUTRAL = 16
"""A value of more bytes than this is not compared with NOTHING and `FieldRule.neutral`, because no value in these is
longer."""
_NAMES: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])
# A data URL may have parameters between the media type and `base64`, such as a charset or a file name. All repetitions
# are bounded. An unbounded search in a malicious URL of 30 MB took 13 seconds and blocked all other threads.
_DATA_URL = re.compile(r"data:([\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[^,;]{0,256}){0,16};base64,", re.ASCII)
_NO_ADDRESS = "must be an http or https address, or a data URL of an image in base64"
INVALID_JSON = "INVALID_JSON"
"""The key that marks a call's arguments as invalid. Some dialects require arguments to be an object. Any other
arguments are replaced by an object with this single key. The key's value is the text of the arguments. No tool accepts
such an object, so the tool's error shows the model its mistake. The key is from Anthropic's documentation of
fine-grained tool streaming."""

_MEMORY_KEY = "tools"


def decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, where: str = "") -> T:
    """Decode `data`. `where` is the path of `data` in the request, such as `messages[3]`. Raises RequestError."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        refuse(where, f"not valid UTF-8: {error.reason}", error)
    except RecursionError as error:
        refuse(where, "nested too deeply", error)
    except msgspec.DecodeError as error:
        text, path = str(error), ""
        if located := _PATH.search(text):
            text, path = text[: located.start()], located[1]
        if missing := _MISSING.search(text):
            path = f"{path}.{missing[1]}"
        elif _SURROGATE_ESCAPE.search(bytes(data)) is not None:
            # For an unpaired surrogate, the decoder reports only a byte offset, so search for the field with the
            # surrogate.
            with suppress(ValueError, RecursionError):
                surrogate = _find_surrogate(json.loads(bytes(data)))
                if surrogate is not None:
                    text, path = "an unpaired surrogate escape (\\ud800 to \\udfff) is not valid Unicode", surrogate
        refuse((where + path).lstrip("."), text[:1].lower() + text[1:], error)


def string(raw: Raw, where: str) -> str:
    """Return the value of a string field. Raises RequestError if the field is missing or is not a string."""
    if not raw:
        refuse(where, "is missing")
    return decode(_STRING, raw, where)


def optional(decoder: msgspec.json.Decoder[Any], raw: Raw, where: str) -> Any:
    """Return the decoded value of a field; None if the field is missing. Raises RequestError for a wrong value."""
    return decode(decoder, raw, where) if raw else None


def named_model(call: WireCall, body: bytes) -> str | None:
    """Return the `model` field of a request body; None if the field is missing or the body is unreadable."""
    try:
        return _NAMED_MODEL.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def refuse(field: str, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise RequestError for `field`, which is a path in the request or "" for the whole body."""
    raise RequestError(f"{field or 'request body'}: {reason}", field=field or None) from cause


def check_depth(value: Any, where: str) -> None:
    """Raise RequestError if lists and objects are nested more than MAX_DEPTH deep. The check is not recursive."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    refuse(where, f"nests more than {MAX_DEPTH} levels deep")


def quoted(text: str) -> str:
    """Return a client's text for use in error messages: in quotes, with escapes, and cut after 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def is_absent(raw: bytes | Raw) -> bool:
    """Return True for a field that is missing or null."""
    return len(view := memoryview(raw)) <= 4 and bytes(view) in _NULLS


def _find_surrogate(value: Any) -> str | None:
    """Return the path below `value` of the first string with an unpaired surrogate, or None. The path is written only
    when the string is found, because a client chooses the keys: the paths of all values could have gigabytes."""
    if isinstance(value, str):
        return "" if _SURROGATE.search(value) else None
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _find_surrogate(item)) is not None:
                return f"[{index}]{found}"
    elif isinstance(value, dict):
        for key, item in value.items():
            if (found := _find_surrogate(item)) is not None:
                return f".{key.encode('ascii', 'backslashreplace').decode()}{found}"
    return None


class BodyReader(Generic[BodyT]):
    """Parses a body into a struct of type `kind`. The dialect handles the fields that this struct and its nested
    structs declare. The reader applies the rules of `table` to all other fields."""

    def __init__(self, kind: type[BodyT], table: Table) -> None:
        own = {field.encode_name for field in msgspec.structs.fields(kind)}
        self._rules = tuple(rule for rule in table if "." not in rule.name and rule.name not in own)
        self._known = own | {rule.name for rule in self._rules}
        self._values = attrgetter(*(rule.name for rule in self._rules))
        added = [(rule.name, Raw, msgspec.field(default=_ABSENT)) for rule in self._rules]
        inner = {
            field.encode_name: part
            for field in msgspec.structs.fields(kind)
            for part in get_args(field.type)
            if type(None) in get_args(field.type) and isinstance(part, type) and issubclass(part, msgspec.Struct)
        }
        self._inner = {
            name: {field.encode_name for field in msgspec.structs.fields(part)} for name, part in inner.items()
        }
        # Nearly all bodies have only known fields, and the strict decoder parses them in one pass. Finding unknown
        # fields takes further passes.
        exact = [
            (name, msgspec.defstruct(part.__name__, [], bases=(part,), forbid_unknown_fields=True) | None, None)
            for name, part in inner.items()
        ]
        strict = msgspec.defstruct(
            kind.__name__, [*added, *exact], bases=(kind,), forbid_unknown_fields=True, kw_only=True
        )
        tolerant = msgspec.defstruct(kind.__name__, added, bases=(kind,), kw_only=True)
        self._strict: msgspec.json.Decoder[BodyT] = msgspec.json.Decoder(strict)
        self._tolerant: msgspec.json.Decoder[BodyT] = msgspec.json.Decoder(tolerant)

    def read(self, body: bytes, notes: list[str]) -> BodyT:
        """Parse the body. The names of fields without effect are added to `notes`. Raises RequestError."""
        try:
            wire = self._strict.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # The body has unknown fields or an error. The tolerant decoder accepts unknown fields, and raises
            # RequestError for an error.
            wire = decode(self._tolerant, body)
            sent = decode(_NAMES, body)
            apply_rules(sent, {}, self._known, "", notes)
            for name, known in self._inner.items():
                if name in sent and not is_absent(sent[name]):
                    apply_rules(decode(_NAMES, sent[name], name), {}, known, f"{name}.", notes)
        for rule, raw in zip(self._rules, self._values(wire), strict=True):
            if raw is not _ABSENT:
                _apply(rule, raw, "", notes)
        return wire


def rules_by_name(table: Table, own: Iterable[str]) -> dict[str, FieldRule]:
    """Return the rules of a table by field name, for `apply_rules`. The fields in `own` are left out, because the
    dialect itself handles them."""
    return {rule.name: rule for rule in table if rule.name not in own}


def apply_rules(
    sent: dict[str, Raw], rules: dict[str, FieldRule], own: Container[str], where: str, notes: list[str]
) -> None:
    """Apply the rules to the fields of an object. `where` is the object's path with a final dot ("" for the body). The
    dialect itself handles the fields in `own`. Names of fields without effect are added to `notes`. Raises RequestError
    for a refused field."""
    for name, raw in sent.items():
        if name in rules:
            _apply(rules[name], raw, where, notes)
        elif name not in own and not _is_nothing(raw):
            notes.append(f"{UNKNOWN}{where}{name}")


def _is_nothing(raw: Raw) -> bool:
    """Return True if the value of an unknown field is in NOTHING. The value may be impossible to decode, because only
    its JSON syntax was checked."""
    if len(memoryview(raw)) <= _LONGEST_NEUTRAL:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _ANY.decode(raw) in NOTHING
    return False


def bounded_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes in printable form, without repetitions. Their length and number are limited, because they
    contain names that clients choose."""
    shortened = (note[:MAX_NOTE] for note in notes)
    printable = (
        note if note.isprintable() else "".join(char if char.isprintable() else "?" for char in note)
        for note in shortened
    )
    return tuple(dict.fromkeys(printable))[:MAX_NOTES]


def _apply(rule: FieldRule, raw: Raw, where: str, notes: list[str]) -> None:
    if rule.treatment in (Treatment.OTHER, Treatment.PASSED) or is_absent(raw):
        return
    if len(memoryview(raw)) <= _LONGEST_NEUTRAL:
        value = decode(_ANY, raw, where + rule.name)
        # `in` compares by equality: if 1 is neutral, 1.0 and True are neutral, too.
        if value in NOTHING or value in rule.neutral:
            return
    if rule.treatment is Treatment.REFUSED:
        refuse(where + rule.name, f"is not supported: {rule.reason}")
    notes.append(where + rule.name)


def image_from_address(url: str, where: str) -> Image | Attachment:
    """Return the image at an http(s) address or in a data URL. An image at an address is fetched later, by the engine.
    A data URL with another type of file or with unreadable data becomes an `Attachment`. Raises RequestError for any
    other address."""
    if url.startswith(("http://", "https://")):
        return image_from_url(url)
    if (head := _DATA_URL.match(url)) is None:
        refuse(where, _NO_ADDRESS)
    data = url[head.end() :]
    if head[1] is None or not head[1].startswith("image/"):
        return attachment(head[1], where, _NO_ADDRESS, size=encoded_size(data))
    return image_from_base64(head[1], data, where)


def image_from_base64(media_type: str, data: str, where: str) -> Image | Attachment:
    """Return the image in `data` (base64). Data that is empty, not base64, or not of an image's media type becomes an
    `Attachment`."""
    if not media_type.startswith("image/"):
        reason = f"is of media type {quoted(media_type)}: the model reads text and images"
        return attachment(media_type, where, reason, size=encoded_size(data))
    try:
        decoded = decode_base64(data)
    except ValueError:
        return broken_image(media_type, where, "is not valid base64")
    if not decoded:
        return broken_image(media_type, where, "has no data")
    return image_from_bytes(media_type, decoded)


def file_from_base64(media_type: str | None, data: str, where: str, reason: str, *, head: str = "") -> Attachment:
    """Return the file in `data` (base64). A PDF becomes a `Document`. Any other file, or invalid base64, becomes a
    plain `Attachment`. `head` is text that the model sees before a document."""
    if (media_type or "").partition(";")[0].strip().lower() == PDF:
        try:
            return document(decode_base64(data), where, reason, head=head)
        except ValueError:
            reason = "is not valid base64"
    return attachment(media_type, where, reason, size=encoded_size(data))


def file_from_address(url: str | None, media_type: str | None, where: str, reason: str) -> Attachment:
    """Return the attachment for a file. `url` is a data URL or the file's address; None if neither is known."""
    if url is not None and (head := _DATA_URL.match(url)) is not None:
        return file_from_base64(head[1] or media_type, url[head.end() :], where, reason)
    return attachment(media_type, where, reason, address=url)


class DeclaredTools(msgspec.Struct, frozen=True):
    """The tools of a request. `specs` are the tools for the model, in OpenAI's form. `raw` has the bytes from which
    they were parsed. `hosted` has the types of hosted tools, which a vendor's servers would run and the model does not
    see."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    hosted: tuple[str, ...] = ()


class _FromBytes(Protocol):
    @property
    def raw(self) -> bytes: ...


ToolsT = TypeVar("ToolsT", bound=_FromBytes)


def cached_tools(memory: dict[str, Any], raw: bytes, read: Callable[[], ToolsT]) -> ToolsT:
    """Return the tools that `raw` declares. `read` parses them, but is called only if `raw` has changed since the
    session's previous call. Agents send the same tools, some tens of kilobytes, with every call."""
    tools: ToolsT | None = memory.get(_MEMORY_KEY)
    if tools is None or tools.raw != raw:
        tools = memory[_MEMORY_KEY] = read()
    return tools


def check_function(function: Any, where: str) -> None:
    """Raise RequestError if the function's name, description or parameters have a wrong type."""
    if not isinstance(function, dict):
        refuse(where, "must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        refuse(f"{where}.name", "must be a non-empty string")
    if not isinstance(function.get("description"), str | None):
        refuse(f"{where}.description", "must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        refuse(f"{where}.parameters", "must be an object")


def tool_choice(
    names: Iterable[str] | None, tools: Sequence[ToolSpec], *, required: bool, single: bool = False, field: str
) -> ToolChoice | None:
    """Return a choice of the tools in `names`, or of all tools if `names` is None. Returns None if the choice restricts
    nothing. `field` is the path of the choice in the request. Raises RequestError if there is no tool to choose."""
    every = dict.fromkeys(spec["function"]["name"] for spec in tools)
    chosen = every if names is None else dict.fromkeys(names)
    if not chosen:
        refuse(field, "allows calls of no tool that the client runs: send such a tool, or the choice 'auto' or 'none'")
    if not required and chosen.keys() == every.keys():
        return None
    return ToolChoice(names=tuple(chosen), required=required, single=single, field=field)


def arguments_from_text(raw: Raw, where: str) -> str:
    """Return the arguments of a call. OpenAI's APIs send arguments as a string of JSON. A missing field becomes "{}".
    Some clients send an object instead of a string; the object's JSON is returned without white space. Raises
    RequestError."""
    if is_absent(raw):
        return "{}"
    value = decode(_ANY, raw, where)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse(where, "must be a string of JSON")
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def is_invalid_json_object(value: dict[str, Any]) -> bool:
    """Return True for an object that stands for invalid arguments (see INVALID_JSON)."""
    return len(value) == 1 and isinstance(value.get(INVALID_JSON), str)


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
    """Fields that the bodies of Chat, Responses and Messages have in common. Some belong to the vendors' APIs, and some
    only to the servers of vLLM and SGLang."""

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
    """Return all sampling parameters of a body. `constraint` is the form of the reply that a field of the dialect
    requests. Raises RequestError for an unsupported form, or for more than one form."""
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        # vLLM's clients write 0 or -1 for "all tokens"; Outrider writes only -1.
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
    """Return True if the request turns thinking on, False if it turns thinking off, and None if the model decides.

    `thinking` is an object with a `type`, as in the APIs of Anthropic and Z.ai. The types `enabled` and `disabled` take
    precedence over the variables of the chat template. With any other type, these variables decide. Fields without
    effect are added to `notes`. Raises RequestError.
    """
    enabled = body.enable_thinking
    sent = body.chat_template_kwargs
    variables = decode(_TEMPLATE_VARIABLES, sent, "chat_template_kwargs") if sent else None
    for name, value in (variables or {}).items():
        if name in ("enable_thinking", "thinking") and isinstance(value, bool | None):
            enabled = enabled if value is None else value
        elif value not in NOTHING:
            notes.append(f"chat_template_kwargs.{name}")
    if thinking is not None:
        if thinking.get("budget_tokens") not in NOTHING:
            notes.append("thinking.budget_tokens")
        note_unknown("thinking", thinking, ("type", "budget_tokens", "display"), notes)
        kind = thinking.get("type")
        if kind in ("enabled", "disabled"):
            enabled = kind == "enabled"
    return enabled


def note_unknown(where: str, sent: JsonObject | None, known: Container[str], notes: list[str]) -> None:
    """Add a note to `notes` for each key of the object `sent` that is not in `known`. A key whose value requests
    nothing gets no note. `where` is the object's path."""
    for name, value in (sent or {}).items():
        if name not in known and value not in NOTHING:
            notes.append(f"{UNKNOWN}{where}.{name}")


def response_format(form: Any, where: str) -> Constraint | None:
    """Return the constraint that `form` requests; None for free text. `form` is an object with a `type`, as in the APIs
    of OpenAI and Anthropic. A JSON schema is in `schema` or `json_schema.schema`. `where` is the path of `form` in the
    request. Raises RequestError."""
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
    """Return the constraint for a JSON schema, given as an object or as JSON text. Raises RequestError."""
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
    """Return a constraint, as a regular expression, that makes the reply exactly one of `choices`."""
    # `re.escape` is not used: it also escapes spaces and dashes, and not every engine's regular expressions accept such
    # escapes.
    escaped = ["".join(f"\\{char}" if char in _REGEX_SPECIAL else char for char in choice) for choice in choices]
    return Constraint(ConstraintKind.REGEX, f"({'|'.join(escaped)})")


def _only_constraint(body: SamplingFields, own: Constraint | None) -> Constraint | None:
    """Return the form of the reply from the dialect's own field (`own`) or from a field of vLLM or SGLang. Returns None
    for free text. Raises RequestError for more than one form."""
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
