"""Lists how every request field besides the messages is treated, in one table for each dialect.

A field is passed on, refused with an error, or ignored. An ignored field that concerns the reply is recorded with the
turn (`ModelRequest.ignored`). Invariant: a field that is in no table is also recorded. `reading.py` applies the tables.
docs/dialects.md has the same tables.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec


class Treatment(StrEnum):
    PASSED = "passed on"
    NOTED = "no effect, noted"
    REFUSED = "refused"
    OTHER = "not about the reply"


class FieldRule(msgspec.Struct, frozen=True):
    """The treatment of one field. `name` is its path in the request. `neutral` lists values that request nothing, such
    as `n: 1`. A field whose value is neutral, null or empty is ignored and not recorded."""

    name: str
    treatment: Treatment
    reason: str = ""
    neutral: tuple[Any, ...] = ()


Table = tuple[FieldRule, ...]


def _passed(*names: str, reason: str = "") -> Table:
    return tuple(FieldRule(name, Treatment.PASSED, reason) for name in names)


def _noted(*names: str, reason: str, neutral: tuple[Any, ...] = ()) -> Table:
    return tuple(FieldRule(name, Treatment.NOTED, reason, neutral) for name in names)


def _refused(*names: str, reason: str, neutral: tuple[Any, ...] = ()) -> Table:
    return tuple(FieldRule(name, Treatment.REFUSED, reason, neutral) for name in names)


def _other(*names: str) -> Table:
    return tuple(FieldRule(name, Treatment.OTHER) for name in names)


_NO_SAMPLER = "no engine here has this sampler"
_ONE_REPLY = "only 1 is supported: one model call is one turn"
_BUDGET = "the length of thinking cannot be limited"
_EFFORT = "`none` turns thinking off; any other has no effect, noted"
_ONE_CALL = "the number of calls can be limited only if a call is forced"
_PARALLEL = f"{_ONE_CALL}, or only listed tools may be called"
_FORCED = "is kept by a grammar, or refused"
_INCLUDE = (
    "`reasoning.encrypted_content` is honoured; `message.output_text.logprobs` is refused, because log-probabilities"
    " are served by Chat Completions only; any other has no effect"
)

SAMPLERS: Table = (
    *_refused("ignore_eos", reason="a reply ends where the model ends it", neutral=(False,)),
    *_refused("use_beam_search", reason="every turn is sampled", neutral=(False,)),
    *_refused("best_of", reason=_ONE_REPLY, neutral=(1,)),
    *_refused("length_penalty", "typical_p", "tfs_z", "dynatemp_exponent", reason=_NO_SAMPLER, neutral=(1,)),
    *_refused("top_a", "epsilon_cutoff", "eta_cutoff", "dynatemp_range", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("mirostat", "mirostat_mode", "smoothing_factor", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("dry_multiplier", "xtc_probability", reason=_NO_SAMPLER, neutral=(0,)),
    *_refused("repeat_penalty", reason="send repetition_penalty", neutral=(1,)),
    *_refused("bad_words", "allowed_token_ids", reason="send logit_bias"),
    *_refused("logits_processors", "custom_logit_processor", reason=_NO_SAMPLER),
)
"""Sampling parameters that inference servers have in addition to the vendors' APIs. Every dialect refuses these fields,
because ignoring them would change what is sampled."""

SERVER_EXTENSIONS: Table = (
    *_passed("top_k", "min_p", "seed", "min_tokens", "stop_token_ids"),
    *_passed("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *_passed("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    *_passed("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking", "enable_thinking"),
    *_noted("chat_template_kwargs", reason="all other keys: the template has no such variable"),
    *_noted("thinking_budget", "thinking_token_budget", reason=_BUDGET),
)
"""Fields that the servers of vLLM and SGLang accept in addition to those of a vendor's API. Chat, Responses and
Messages accept them, too."""

CHAT: Table = (
    *_passed("model", "messages", "stream", "stream_options", "tools", "logprobs", "return_token_ids"),
    *_passed("temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "response_format"),
    *_passed("tool_choice", reason=f"`none` hides the tools; `required`, a name or a list {_FORCED}"),
    *_passed("reasoning_effort", "reasoning.effort", reason=_EFFORT),
    *_passed("reasoning.enabled", "thinking.type"),
    *SERVER_EXTENSIONS,
    *_noted("thinking.budget_tokens", "reasoning.max_tokens", reason=_BUDGET),
    *_noted("parallel_tool_calls", reason=_PARALLEL, neutral=(True,)),
    *_noted("top_logprobs", "prompt_logprobs", reason="only sampled tokens have log-probabilities", neutral=(0,)),
    *_noted("web_search_options", reason="a hosted tool: nothing here can search"),
    *_noted("verbosity", reason="no chat template here takes it"),
    *_noted("modalities", "audio", reason="the model writes text only", neutral=(["text"],)),
    *_noted("function_call", reason="send tools and tool_choice", neutral=("auto", "none")),
    *_noted("include_reasoning", reason="reasoning is always given", neutral=(True,)),
    *_noted(
        "skip_special_tokens",
        "spaces_between_special_tokens",
        reason="special tokens are never part of the text",
        neutral=(True,),
    ),
    *_noted("include_stop_str_in_output", reason="the text ends before the stop string", neutral=(False,)),
    *_refused("n", reason=_ONE_REPLY, neutral=(1,)),
    *_refused("functions", reason="send tools"),
    *_refused("continue_final_message", "echo", reason="a reply cannot be prefilled", neutral=(False,)),
    *_refused("add_generation_prompt", reason="a prompt always ends where the reply begins", neutral=(True,)),
    *_refused("chat_template", "documents", reason="prompts are rendered by the service's own template"),
    *_refused("truncate_prompt_tokens", reason="prompts are never truncated"),
    *SAMPLERS,
    *_other("user", "store", "metadata", "service_tier", "safety_identifier", "session_id", "client_metadata"),
    *_other("prompt_cache_key", "prompt_cache_retention", "cache_salt", "prediction", "request_id", "priority"),
    *_other("return_tokens_as_token_ids", "guided_decoding_backend", "separate_reasoning", "stream_reasoning"),
)

RESPONSES: Table = (
    *_passed("model", "input", "instructions", "previous_response_id", "store", "stream", "tools"),
    *_passed("include", reason=_INCLUDE),
    *_passed("temperature", "top_p", "max_output_tokens", "stop", "text.format"),
    *_passed("tool_choice", reason=f"`none` hides the tools; `required`, a name or a list {_FORCED}"),
    *_passed("reasoning.summary"),
    *_passed("reasoning.effort", reason=_EFFORT),
    *SERVER_EXTENSIONS,
    *_noted("text.verbosity", reason="no chat template here takes it"),
    *_noted("parallel_tool_calls", reason=_PARALLEL, neutral=(True,)),
    *_noted("top_logprobs", reason="log-probabilities are served by Chat Completions only", neutral=(0,)),
    *_noted("max_tool_calls", reason="it counts calls of hosted tools, and there are none"),
    *_noted("truncation", reason="prompts are never truncated", neutral=("disabled",)),
    *_noted("context_management", reason="clients shorten their own history"),
    *_refused("background", reason="calls are answered while the client waits", neutral=(False,)),
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
    *_passed("tool_choice", reason=f"`none` hides the tools; `any` or a tool {_FORCED}"),
    *_passed("thinking.type", reason="`disabled` turns thinking off, `enabled` on; `adaptive` leaves it to the model"),
    *SERVER_EXTENSIONS,
    *_noted("thinking.budget_tokens", reason=_BUDGET),
    *_noted("output_config.effort", reason="no chat template here takes it"),
    *_noted("tool_choice.disable_parallel_tool_use", reason=_ONE_CALL, neutral=(False,)),
    *_noted("mcp_servers", "container", reason="a hosted tool: nothing here reaches or runs it"),
    *_noted("context_management", reason="clients shorten their own history", neutral=({"edits": []},)),
    *SAMPLERS,
    *_other("metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_version"),
    *_other("session_id", "user", "request_id", "priority", "cache_salt"),
)

_UNDERSCORE_LETTER = re.compile(r"_([a-z])")


def camel_case(key: str) -> str:
    """Convert a snake_case key to camelCase, which Google uses for keys. Any other key is returned unchanged."""
    return _UNDERSCORE_LETTER.sub(lambda found: found[1].upper(), key) if "_" in key else key


_GOOGLE_SAMPLERS: Table = tuple(
    msgspec.structs.replace(row, name=camel_case(row.name))
    for row in (
        *SAMPLERS,
        *_refused("repetition_penalty", reason="send presencePenalty or frequencyPenalty", neutral=(1,)),
        *_refused("min_p", "min_tokens", "logit_bias", reason="ask another dialect for it", neutral=(0,)),
    )
)

GEMINI_BODY: Table = (
    *_passed("contents", "systemInstruction", "tools", "generationConfig"),
    *_passed(
        "toolConfig",
        reason=f"`NONE` hides the tools; `ANY` or a list {_FORCED}; `VALIDATED` alone has no effect, noted",
    ),
    *_refused("cachedContent", reason="send the whole contents"),
    *_GOOGLE_SAMPLERS,
    *_other("model", "safetySettings", "labels", "store", "serviceTier", "sessionId"),
)
GEMINI_GENERATION: Table = (
    *_passed("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed"),
    *_passed("presencePenalty", "frequencyPenalty"),
    *_passed("responseMimeType", "responseSchema", "responseJsonSchema"),
    *_passed("thinkingConfig.includeThoughts"),
    *_passed("thinkingConfig.thinkingBudget", reason="0 turns thinking off; a number above 0 has no effect, noted"),
    *_noted("thinkingConfig.thinkingLevel", reason="no chat template here takes it"),
    *_noted(
        "responseLogprobs",
        "logprobs",
        reason="log-probabilities are served by Chat Completions only",
        neutral=(False, 0),
    ),
    *_noted(
        "responseModalities", "speechConfig", "imageConfig", reason="the model writes text only", neutral=(["TEXT"],)
    ),
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
