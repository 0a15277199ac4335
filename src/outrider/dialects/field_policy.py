"""What becomes of every field that a client may send besides its messages: one table for each dialect.

It knows no value's meaning. A field is passed on, or has no effect here and is noted with the turn, or is refused, or
is not about the reply at all. Invariant: a field that is in no table is noted, never dropped silently; the tables are
those of docs/dialects.md.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.gemini.fields import absent, camel
from outrider.dialects.json import decode, refuse

T = TypeVar("T", bound=msgspec.Struct)

MAX_NOTES = 32
"""Notes of one request."""
MAX_NOTE = 64
"""Characters of a note: its name may be the client's own."""
UNKNOWN = "unknown."
"""Begins the note of a field that no table has."""
TOOL = "tools."
"""Begins the note of a tool that the model is not shown."""
HISTORY = "history."
"""Begins the note of something in the history that the model is not shown."""

_ABSENT = Raw()
_LONGEST_NEUTRAL = 16
_ASKS_NOTHING: tuple[Any, ...] = (None, "", [], {})


class Treatment(StrEnum):
    PASSED = "passed on"
    NOTED = "no effect, noted"
    REFUSED = "refused"
    OTHER = "not about the reply"


class Setting(msgspec.Struct, frozen=True):
    """A field by its path in the request. `neutral` are values that ask for nothing, as do null and empty ones."""

    name: str
    treatment: Treatment
    reason: str = ""
    neutral: tuple[Any, ...] = ()


Table = tuple[Setting, ...]


def _passed(*names: str, reason: str = "") -> Table:
    return tuple(Setting(name, Treatment.PASSED, reason) for name in names)


def _noted(*names: str, reason: str, neutral: tuple[Any, ...] = ()) -> Table:
    return tuple(Setting(name, Treatment.NOTED, reason, neutral) for name in names)


def _refused(*names: str, reason: str, neutral: tuple[Any, ...] = ()) -> Table:
    return tuple(Setting(name, Treatment.REFUSED, reason, neutral) for name in names)


def _other(*names: str) -> Table:
    return tuple(Setting(name, Treatment.OTHER) for name in names)


_NO_SAMPLER = "no engine here has this sampler"
_ONE_REPLY = "only 1 is supported: one model call is one turn"
_BUDGET = "nothing bounds how long the model thinks"
_EFFORT = "`none` turns thinking off; any other has no effect, noted"
_PARALLEL = "the model makes as many calls as it likes"

SAMPLERS: Table = (
    *_refused("ignore_eos", reason="a reply ends where the model ends it", neutral=(False,)),
    *_refused("use_beam_search", reason="turns are sampled", neutral=(False,)),
    *_refused("best_of", reason=_ONE_REPLY, neutral=(1,)),
    *_refused("length_penalty", "typical_p", "tfs_z", "dynatemp_exponent", reason=_NO_SAMPLER, neutral=(1,)),
    *_refused("top_a", "epsilon_cutoff", "eta_cutoff", "dynatemp_range", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("mirostat", "mirostat_mode", "smoothing_factor", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("dry_multiplier", "xtc_probability", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("repeat_penalty", reason="send repetition_penalty", neutral=(1,)),
    *_refused("bad_words", "allowed_token_ids", reason="send logit_bias"),
    *_refused("logits_processors", "custom_logit_processor", reason=_NO_SAMPLER),
)
"""Samplers by the names that inference servers give them, in no dialect's own API: refused in every one."""

EXTRAS: Table = (
    *_passed("top_k", "min_p", "seed", "min_tokens", "stop_token_ids"),
    *_passed("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *_passed("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    *_passed("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking", "enable_thinking"),
    *_noted("chat_template_kwargs", reason="all others of its keys: the template has no such variable"),
    *_noted("thinking_budget", "thinking_token_budget", reason=_BUDGET),
)
"""What vLLM's and SGLang's servers read besides a dialect's own fields: read in Chat, Responses and Messages alike."""

CHAT: Table = (
    *_passed("model", "messages", "stream", "stream_options", "tools", "logprobs", "return_token_ids"),
    *_passed("temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "response_format"),
    *_passed("tool_choice", reason="`none` hides the tools; `required` or a name is a wish, and noted"),
    *_passed("reasoning_effort", "reasoning.effort", reason=_EFFORT),
    *_passed("reasoning.enabled", "thinking.type"),
    *EXTRAS,
    *_noted("thinking.budget_tokens", "reasoning.max_tokens", reason=_BUDGET),
    *_noted("parallel_tool_calls", reason=_PARALLEL, neutral=(True,)),
    *_noted("top_logprobs", "prompt_logprobs", reason="the sampled token's alone is given", neutral=(0,)),
    *_noted("web_search_options", reason="nothing here can search: a hosted tool"),
    *_noted("verbosity", reason="no chat template here takes it"),
    *_noted("modalities", "audio", reason="the model gives text", neutral=(["text"],)),
    *_noted("function_call", reason="send tools and tool_choice", neutral=("auto", "none")),
    *_noted("include_reasoning", reason="reasoning is always given", neutral=(True,)),
    *_noted("skip_special_tokens", "spaces_between_special_tokens", reason="markers are never text", neutral=(True,)),
    *_noted("include_stop_str_in_output", reason="text ends before it", neutral=(False,)),
    *_refused("n", reason=_ONE_REPLY, neutral=(1,)),
    *_refused("functions", reason="send tools"),
    *_refused("continue_final_message", "echo", reason="a reply cannot be begun by the client", neutral=(False,)),
    *_refused("add_generation_prompt", reason="the model is always to speak", neutral=(True,)),
    *_refused("chat_template", "documents", reason="prompts are rendered by the service's own template"),
    *_refused("truncate_prompt_tokens", reason="a prompt is given whole"),
    *SAMPLERS,
    *_other("user", "store", "metadata", "service_tier", "safety_identifier", "session_id", "client_metadata"),
    *_other("prompt_cache_key", "prompt_cache_retention", "cache_salt", "prediction", "request_id", "priority"),
    *_other("return_tokens_as_token_ids", "guided_decoding_backend", "separate_reasoning", "stream_reasoning"),
)

RESPONSES: Table = (
    *_passed("model", "input", "instructions", "previous_response_id", "store", "stream", "tools", "include"),
    *_passed("temperature", "top_p", "max_output_tokens", "stop", "text.format"),
    *_passed("tool_choice", reason="`none` hides the tools; `required` or a name is a wish, and noted"),
    *_passed("reasoning.summary"),
    *_passed("reasoning.effort", reason=_EFFORT),
    *EXTRAS,
    *_noted("text.verbosity", reason="no chat template here takes it"),
    *_noted("parallel_tool_calls", reason=_PARALLEL, neutral=(True,)),
    *_noted("top_logprobs", reason="ask Chat Completions for log-probabilities", neutral=(0,)),
    *_noted("max_tool_calls", reason="it counts hosted tools, and there are none"),
    *_noted("truncation", reason="a prompt is given whole", neutral=("disabled",)),
    *_noted("context_management", reason="the history is the client's to shorten"),
    *_refused("background", reason="a model call is answered while its client waits", neutral=(False,)),
    *_refused("conversation", reason="send the items, or previous_response_id"),
    *_refused("prompt", reason="send instructions and input"),
    *_refused("n", reason=_ONE_REPLY, neutral=(1,)),
    *SAMPLERS,
    *_other("user", "metadata", "service_tier", "safety_identifier", "session_id", "client_metadata"),
    *_other("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt", "stream_options"),
    *_other("request_id", "priority"),
)

MESSAGES: Table = (
    *_passed("model", "messages", "system", "stream", "tools", "max_tokens", "temperature", "top_p"),
    *_passed("stop_sequences", "output_format", "output_config.format"),
    *_passed("tool_choice", reason="`none` hides the tools; `any` or a tool is a wish, and noted"),
    *_passed("thinking.type", reason="`disabled` turns thinking off, `enabled` on; `adaptive` leaves it to the model"),
    *EXTRAS,
    *_noted("thinking.budget_tokens", reason=_BUDGET),
    *_noted("output_config.effort", reason="no chat template here takes it"),
    *_noted("tool_choice.disable_parallel_tool_use", reason=_PARALLEL, neutral=(False,)),
    *_noted("mcp_servers", "container", reason="nothing here reaches or runs it: a hosted tool"),
    *_noted("context_management", reason="the history is the client's to shorten", neutral=({"edits": []},)),
    *SAMPLERS,
    *_other("metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_version"),
    *_other("session_id", "user", "request_id", "priority", "cache_salt"),
)

_GOOGLE_SAMPLERS: Table = tuple(
    msgspec.structs.replace(row, name=camel(row.name))
    for row in (
        *SAMPLERS,
        *_refused("repetition_penalty", reason="send presencePenalty or frequencyPenalty", neutral=(1,)),
        *_refused("min_p", "min_tokens", "logit_bias", reason="ask another dialect for it", neutral=(0,)),
    )
)

GEMINI_BODY: Table = (
    *_passed("contents", "systemInstruction", "tools", "generationConfig"),
    *_passed("toolConfig", reason="mode `NONE` hides the tools; any other choice is a wish, and noted"),
    *_refused("cachedContent", reason="send the whole contents"),
    *_GOOGLE_SAMPLERS,
    *_other("model", "safetySettings", "labels", "store", "serviceTier", "sessionId"),
)
GEMINI_GENERATION: Table = (
    *_passed("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed"),
    *_passed("presencePenalty", "frequencyPenalty"),
    *_passed("responseMimeType", "responseSchema", "responseJsonSchema"),
    *_passed("thinkingConfig.includeThoughts"),
    *_passed("thinkingConfig.thinkingBudget", reason="0 turns thinking off; a bound above it has no effect, noted"),
    *_noted("thinkingConfig.thinkingLevel", reason="no chat template here takes it"),
    *_noted("responseLogprobs", "logprobs", reason="ask Chat Completions for log-probabilities", neutral=(False, 0)),
    *_noted("responseModalities", "speechConfig", "imageConfig", reason="the model gives text", neutral=(["TEXT"],)),
    *_noted("mediaResolution", "audioTimestamp", reason="the engine decides how it reads images", neutral=(False,)),
    *_noted("enableEnhancedCivicAnswers", "routingConfig", "modelSelectionConfig", reason="there is one model here"),
    *_refused("candidateCount", reason=_ONE_REPLY, neutral=(1,)),
    *_GOOGLE_SAMPLERS,
)

TABLES: dict[str, Table] = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI_BODY
    + tuple(msgspec.structs.replace(row, name=f"generationConfig.{row.name}") for row in GEMINI_GENERATION),
}


class Read(msgspec.Struct, Generic[T], frozen=True):
    """A body, and what it asks for that has no effect."""

    wire: T
    notes: tuple[str, ...]


class BodyReader(Generic[T]):
    """Reads a body as a `kind`, whose fields its dialect looks at by itself, and all others by the table."""

    def __init__(self, kind: type[T], table: Table) -> None:
        own = {field.encode_name for field in msgspec.structs.fields(kind)}
        self._judged = tuple(row for row in table if "." not in row.name and row.name not in own)
        self._known = own | {row.name for row in self._judged}
        self._values = attrgetter(*(row.name for row in self._judged))
        more = [(row.name, Raw, msgspec.field(default=_ABSENT)) for row in self._judged]
        # A body without unknown fields, as nearly all are, is read once; the other decoder then says what they are.
        closed = msgspec.defstruct(kind.__name__, more, bases=(kind,), forbid_unknown_fields=True, kw_only=True)
        self._closed: msgspec.json.Decoder[T] = msgspec.json.Decoder(closed)
        self._open: msgspec.json.Decoder[T] = msgspec.json.Decoder(
            msgspec.defstruct(kind.__name__, more, bases=(kind,), kw_only=True)
        )

    def read(self, body: bytes) -> Read[T]:
        """Raises RequestError."""
        notes: list[str] = []
        try:
            wire = self._closed.decode(body)
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
        ):  # unknown fields, or the body is wrong: then the other says how
            wire = decode(self._open, body)
            notes += [UNKNOWN + name for name in decode(_NAMES, body) if name not in self._known]
        sent = zip(self._judged, self._values(wire), strict=True)
        notes += judged([(row, raw) for row, raw in sent if raw is not _ABSENT])
        return Read(wire, tuple(notes))


_NAMES: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def judged(sent: Iterable[tuple[Setting, Raw]], where: str = "") -> Iterator[str]:
    """The notes of fields that are not looked at otherwise. Raises RequestError for one that is refused."""
    for row, raw in sent:
        if row.treatment in _SILENT or asks_nothing(raw, row.neutral):
            continue
        if row.treatment is Treatment.REFUSED:
            refuse(where + row.name, f"is not supported: {row.reason}")
        yield where + row.name


_SILENT = frozenset({Treatment.OTHER, Treatment.PASSED})


def by_name(table: Table, own: Iterable[str]) -> dict[str, Setting]:
    """The rows of a table for `judged_by_name`, without the dialect's `own`, which it looks at by itself."""
    return {row.name: row for row in table if row.name not in own}


def judged_by_name(sent: dict[str, Raw], rows: dict[str, Setting], own: Container[str], where: str = "") -> list[str]:
    """`judged` for fields by name."""
    others = [(name, raw) for name, raw in sent.items() if name not in own]
    unknown = [f"{UNKNOWN}{where}{name}" for name, raw in others if name not in rows and not absent(raw)]
    return [*judged(((rows[name], raw) for name, raw in others if name in rows), where), *unknown]


def asks_nothing(raw: Raw, neutral: tuple[Any, ...]) -> bool:
    """Whether a field is absent, empty, or has one of its neutral values."""
    if absent(raw):
        return True
    if len(memoryview(raw)) > _LONGEST_NEUTRAL:
        return False
    value = _ANY.decode(raw)
    return value in _ASKS_NOTHING or value in neutral


def bounded(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes without repetition, printable, and not too many: names of fields and tools are the client's."""
    return tuple(dict.fromkeys(_printable(note) for note in notes))[:MAX_NOTES]


def _printable(note: str) -> str:
    short = note[:MAX_NOTE]
    return short if short.isprintable() else "".join(char if char.isprintable() else "?" for char in short)
