"""Determines the settings of one model call from the task's settings, the client's request, and the abilities of the
engine.

The module does not depend on the client's API. Invariant: if a setting of the client is not used, the name of the
setting is recorded with the turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from outrider.constraint import ConstraintKind, ToolChoice
from outrider.dialects.base import ModelRequest, RequestedSampling
from outrider.dialects.reading import RESULT, bounded_notes
from outrider.engines.base import SamplingParams
from outrider.engines.pool.placement import ServingEngine
from outrider.errors import EngineMisbehaved, RequestError
from outrider.messages import Message
from outrider.sessions.calls.limits import TokenShare
from outrider.spec import SamplingSpec
from outrider.tokens.rendering.call_grammar import call_constraint, openai_choice
from outrider.trajectory import FinishReason, TokenMode

T = TypeVar("T")

MAX_SEED = (1 << 31) - 1
"""The largest seed. Every engine accepts seeds of 31 bits: llama.cpp uses unsigned 32-bit seeds, vLLM signed 64-bit
seeds."""

UNNAMED_TOKENS = 32_768
"""How many tokens a call may sample if neither its request nor the task sets a maximum, and the model's context length
is unknown."""


def sampling_for(
    task: SamplingSpec,
    client: RequestedSampling,
    *,
    unsampled: int,
    context: int | None,
    prompt_tokens: int,
    seed: int | None,
    stop_ids: tuple[int, ...],
) -> SamplingParams:
    """Return the sampling parameters of a call. A parameter has the task's value, or else the client's value, or else
    the neutral value. A parameter that no task can set, such as stop strings, has the client's value.

    unsampled: the number of tokens that the session has left.
    context: the model's context length in tokens, or None. The prompt takes `prompt_tokens` tokens of the context.
    stop_ids: token ids that end every reply."""
    room = unsampled if context is None else min(unsampled, context - prompt_tokens)
    unnamed = room if context is not None else UNNAMED_TOKENS
    return SamplingParams(
        max_tokens=max(1, min(first_of(task.max_tokens, client.max_tokens, unnamed), room)),
        temperature=first_of(task.temperature, client.temperature, 1.0),
        top_p=first_of(task.top_p, client.top_p, 1.0),
        top_k=first_of(task.top_k, client.top_k, -1),
        min_p=first_of(task.min_p, client.min_p, 0.0),
        seed=seed,
        stop=client.stop,
        stop_token_ids=tuple(dict.fromkeys((*stop_ids, *client.stop_token_ids))),
        min_tokens=client.min_tokens or 0,
        repetition_penalty=first_of(task.repetition_penalty, client.repetition_penalty, 1.0),
        presence_penalty=first_of(task.presence_penalty, client.presence_penalty, 0.0),
        frequency_penalty=first_of(task.frequency_penalty, client.frequency_penalty, 0.0),
        logit_bias=client.logit_bias,
        constraint=client.constraint,
    )


def first_of(task: T | None, asked: T | None, otherwise: T) -> T:
    """Return the task's value, or else the client's value (`asked`), or else the default (`otherwise`)."""
    if task is not None:
        return task
    return otherwise if asked is None else asked


def seed_for(task: SamplingSpec, client: RequestedSampling, *, sample: int, call: int) -> int | None:
    """Return the seed of a call, from 0 to MAX_SEED, or None if neither the task nor the client sets a seed. `sample`
    is the sample's index in its group, and `call` is the number of the call in its attempt.

    With the task's seed, each call of each sample gets a different seed, because otherwise the samples of a group would
    be copies of each other. With the client's seed, all calls of a sample get the same seed, because the client may
    expect equal replies to equal calls. A retry repeats the seeds of the first attempt. The result does not depend on
    the machine or the version.
    """
    if task.seed is not None:
        text = f"{task.seed}/{sample}/{call}"
    elif client.seed is not None:
        text = f"{client.seed}/{sample}"
    else:
        return None
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") & MAX_SEED


def client_may_be_at_fault(request: ModelRequest) -> bool:
    """Return True if the request has a setting that only the client can choose, such as a JSON schema. An engine's
    refusal of such a request counts as the client's error. Otherwise an agent could make its session fail with an
    engine error."""
    asked = request.sampling
    return (
        request.tool_choice is not None
        or asked.constraint is not None
        or bool(asked.logit_bias)
        or bool(asked.stop_token_ids)
    )


def constrained(request: ModelRequest, assigned: ServingEngine, family: str) -> ModelRequest:
    """Return the request with a constraint that enforces its `tool_choice`. A request without `tool_choice` is returned
    unchanged. `family` is the renderer's model family.

    Raises RequestError if the engine does not support the constraint or the tool choice, or if the request has both a
    constraint and a tool choice. If the engine takes token ids, also raises RequestError for a constraint together with
    tools.
    """
    choice = request.tool_choice
    if choice is None:
        _check_constraint(request, assigned)
        return request
    if request.sampling.constraint is not None:
        raise RequestError(
            f"{choice.field}: a reply cannot be held to a form and to calls of tools at once",
            field=choice.field,
            hint="send either structured output or a choice of tools",
        )
    if ConstraintKind.TOOL_CALLS not in assigned.constraints:
        raise RequestError(
            f"{choice.field}: engine {assigned.engine!r} cannot be held to calls of chosen tools",
            field=choice.field,
            hint="send the choice 'auto', or attach an engine with grammars: docs/engines.md",
        )
    if assigned.mode is TokenMode.TOKENS:
        constraint = call_constraint(family, request.tools, choice)
    else:
        constraint = openai_choice(choice, request.tools)
    sampling = msgspec.structs.replace(request.sampling, constraint=constraint)
    return msgspec.structs.replace(request, sampling=sampling)


def check_choice_kept(choice: ToolChoice | None, reply: Message, finish: FinishReason, stop: int | str | None) -> None:
    """Raise EngineMisbehaved if a finished reply breaks the client's tool choice. A reply that was cut off (at a limit,
    by an abort, or by the stop string `stop`) may lack tool calls."""
    if choice is None:
        return
    whole = finish is FinishReason.STOP and not isinstance(stop, str)
    other = [call.name for call in reply.tool_calls if call.name not in choice.names]
    if other or (whole and choice.required and not reply.tool_calls):
        made = f"calls {other[0]!r}" if other else "calls no tool"
        raise EngineMisbehaved(
            f"the reply {made}, although the request's {choice.field} allows only calls of {', '.join(choice.names)}",
            hint="start the engine's server with a grammar backend, XGrammar 0.2 or later",
        )


def _check_constraint(request: ModelRequest, assigned: ServingEngine) -> None:
    """Raise RequestError if the engine cannot apply the request's constraint. An engine that takes token ids cannot
    constrain a reply if the request has tools."""
    constraint = request.sampling.constraint
    if constraint is None:
        return
    if constraint.kind not in assigned.constraints:
        raise RequestError(
            f"engine {assigned.engine!r} cannot constrain a reply by a {constraint.kind.value}",
            hint="ask without structured output, or attach an engine that can: docs/engines.md",
        )
    if request.tools and assigned.mode is TokenMode.TOKENS:
        raise RequestError(
            "a constrained reply cannot call a tool: a request has either structured output or tools",
            hint="ask for structured output in a request without tools, or with the tool choice `none`",
        )


def for_openai_api(
    sampling: SamplingParams, thinking: bool | None, client: RequestedSampling
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Return only the sampling parameters that OpenAI's own API supports, and the names of the requested settings that
    were left out."""
    neutral = SamplingParams(max_tokens=sampling.max_tokens)
    unknown = ("top_k", "min_p", "repetition_penalty", "min_tokens")
    asked = [name for name in unknown if getattr(sampling, name) != getattr(neutral, name)]
    sent = msgspec.structs.replace(sampling, **{name: getattr(neutral, name) for name in unknown})
    asked += ["stop_token_ids"] * bool(client.stop_token_ids) + ["thinking"] * (thinking is not None)
    return sent, tuple(asked)


def clamped(sampling: SamplingParams, share: TokenShare) -> SamplingParams:
    """Return the sampling parameters with `max_tokens` reduced to the tokens that the session has left. Other calls may
    have used tokens while this call waited for its share."""
    if sampling.max_tokens <= share.unsampled:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=share.unsampled)


def recorded(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """Return a turn's sampling parameters and its `thinking` setting in the form in which they are stored."""
    sent: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    return sent | {"thinking": thinking}


def described_notes(described: Mapping[int, Sequence[str]], *, first: int) -> tuple[str, ...]:
    """Return one note for each file in a tool result that the model read as text: the text RESULT, followed by the
    file's media type.

    `described` maps a message number to the media types of its files. Messages before number `first` are left out,
    because a turn lists only the files of its own messages."""
    return bounded_notes(RESULT + kind for at in sorted(described) if at >= first for kind in described[at])
