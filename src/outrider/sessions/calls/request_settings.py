"""Determines the settings of one model call from the choices of the task and the client, and from the engine's
abilities.

The module is pure, and does not depend on dialects. Invariant: the name of every client setting that is left out is
recorded with the turn.
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
"""The largest seed. Every engine accepts seeds of 31 bits: llama.cpp's seeds have 32 bits, vLLM's have 64 bits with a
sign."""

UNNAMED_TOKENS = 32_768
"""Maximum number of sampled tokens of a call that sets no maximum, for a model of unknown context length."""


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
    """Return the sampling parameters of a call. Each has the task's value, or else the client's value, or else the
    neutral value. Parameters that no task can set, such as stop strings, have the client's value. `unsampled` is the
    number of tokens that the session has left. `context` is the model's context in tokens (None: unknown), of which the
    prompt takes `prompt_tokens`. `stop_ids` end every reply."""
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
    """Return the task's choice. If the task has none, return the client's choice, or else the default."""
    if task is not None:
        return task
    return otherwise if asked is None else asked


def seed_for(task: SamplingSpec, client: RequestedSampling, *, sample: int, call: int) -> int | None:
    """Return the seed of a call, from 0 to MAX_SEED; None if neither the task nor the client has a seed. `sample` is
    the sample's index in its group, and `call` the number of the call in its attempt.

    With a task's seed, each call of each sample gets a different seed: with one seed for all, the samples of a group
    would be copies of each other. With a client's seed, all calls of a sample get the same seed, because the client may
    expect equal replies to equal calls. Later attempts of a session repeat the seeds of the first attempt. The result
    is the same on any machine and in any version.
    """
    if task.seed is not None:
        text = f"{task.seed}/{sample}/{call}"
    elif client.seed is not None:
        text = f"{client.seed}/{sample}"
    else:
        return None
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") & MAX_SEED


def client_may_be_at_fault(request: ModelRequest) -> bool:
    """Return True if an engine may have refused the request for a setting that only the client can choose, such as a
    schema that does not compile. The refusal is then the client's error: an agent must not be able to make its session
    fail with an engine's error."""
    asked = request.sampling
    return (
        request.tool_choice is not None
        or asked.constraint is not None
        or bool(asked.logit_bias)
        or bool(asked.stop_token_ids)
    )


def constrained(request: ModelRequest, assigned: ServingEngine, family: str) -> ModelRequest:
    """Return the request with a constraint that enforces the request's choice of tools. A request without such a choice
    is returned unchanged. `family` is the model family of the renderer.

    Raises RequestError if the engine does not support the constraint or the choice of tools, or if the request has
    both. An engine that takes token ids also allows no constraint together with tools.
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
    """Raise EngineMisbehaved for a finished reply that breaks the client's choice of tools. A reply that was cut off
    (at a limit, by an abort, or by the stop string `stop`) may lack calls."""
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
    """Raise RequestError if the engine cannot constrain the reply as requested. An engine that takes token ids cannot
    constrain the reply to a request with tools."""
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
    """Return the sampling parameters that OpenAI's own API has, and the names of the requested settings that are left
    out."""
    neutral = SamplingParams(max_tokens=sampling.max_tokens)
    unknown = ("top_k", "min_p", "repetition_penalty", "min_tokens")
    asked = [name for name in unknown if getattr(sampling, name) != getattr(neutral, name)]
    told = msgspec.structs.replace(sampling, **{name: getattr(neutral, name) for name in unknown})
    asked += ["stop_token_ids"] * bool(client.stop_token_ids) + ["thinking"] * (thinking is not None)
    return told, tuple(asked)


def clamped(sampling: SamplingParams, share: TokenShare) -> SamplingParams:
    """Return the sampling parameters, limited to the tokens that the session has left. Other calls may have used up
    tokens while this call waited for its share."""
    if sampling.max_tokens <= share.unsampled:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=share.unsampled)


def recorded(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """Return a turn's sampling parameters and `thinking` as plain values, as they are stored with the turn."""
    told: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    return told | {"thinking": thinking}


def described_notes(described: Mapping[int, Sequence[str]], *, first: int) -> tuple[str, ...]:
    """Return one note for each file of a tool's result that the model read as text. A note is RESULT followed by the
    file's media type. `described` has the media types of these files by message number. Messages before number `first`
    are left out, because a turn notes only the files of its own messages."""
    return bounded_notes(RESULT + kind for at in sorted(described) if at >= first for kind in described[at])
