"""Common parts of engine servers' APIs: finish reasons, log-probabilities, penalties, the list of models.

Invariant: a placeholder for a missing log-probability never leaves this module as a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import SamplingParams
from outrider.errors import UNREADABLE, EngineMisbehaved, EngineRejected
from outrider.trajectory import FinishReason, LogprobKind

T = TypeVar("T")

MISSING_LOGPROB = -9999.0
"""vLLM's substitute for -inf, NaN and missing values."""

LOGPROB_KINDS = {"raw_logprobs": LogprobKind.RAW, "processed_logprobs": LogprobKind.SAMPLING}
"""The kinds of log-probabilities by vLLM's `--logprobs-mode`."""

MAX_CONTEXT = 2**31
MAX_NAMED, MAX_NAME = 8, 200
"""Maximum number of models that an error names, and maximum characters of each name."""

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard] = []


def decode(decoder: msgspec.json.Decoder[T], payload: bytes, engine: str) -> T:
    """Decode one event or response. Raises EngineMisbehaved for a payload that does not match the engine's protocol."""
    try:
        return decoder.decode(payload)
    except UNREADABLE as error:
        shown = payload[:200].decode(errors="replace")
        raise EngineMisbehaved(f"engine {engine!r} sent an event we cannot read ({error}): {shown}") from error


def decode_batch(
    decoder: msgspec.json.Decoder[T], batch: msgspec.json.Decoder[list[T]], payloads: Sequence[bytes], engine: str
) -> Iterable[T]:
    """Decode the events of one read, in order. Raises the errors of `decode`, after the events before the bad event.

    The events are decoded as one JSON array: 17 events take 33 microseconds together, and 136 one by one.
    """
    if len(payloads) == 1:
        return (decode(decoder, payloads[0], engine),)
    try:
        events = batch.decode(b"[%b]" % b",".join(payloads))
    except UNREADABLE:
        events = []
    if len(events) == len(payloads):
        return events
    return (decode(decoder, payload, engine) for payload in payloads)


def finish_of(reason: str, engine: str) -> FinishReason:
    """Return the FinishReason for an engine's `reason`. Raises EngineMisbehaved for a reason that is no proper end of a
    generation, such as `error`."""
    if (finish := FINISH_REASONS.get(reason)) is None:
        raise EngineMisbehaved(f"engine {engine!r} ended a generation with {reason!r}")
    return finish


def checked_logprobs(ids: Sequence[int], logprobs: list[float | None], engine: str) -> list[float]:
    """Return the log-probabilities of `ids`, one for each id. Raises EngineMisbehaved if one is missing, or if there
    are too many."""
    values = [value for value in logprobs if value is not None and value > MISSING_LOGPROB]
    if not len(ids) == len(values) == len(logprobs):
        raise EngineMisbehaved(
            f"engine {engine!r} gave {len(values)} log-probabilities for {len(ids)} sampled tokens"
            + (f" ({len(logprobs) - len(values)} marked as missing)" if len(logprobs) > len(values) else "")
        )
    return values


def served_model(answer: Any, wanted: str | None, engine: str) -> ModelCard:
    """Return the server's model named `wanted`, or its first model if `wanted` is None. Raises EngineRejected if there
    is none."""
    try:
        cards = msgspec.convert(answer, ModelList).data
    except msgspec.ValidationError as error:
        raise EngineMisbehaved(f"engine {engine!r}: /v1/models is not a list of models: {error}") from error
    for card in cards:
        if wanted in (None, card.id, card.root):
            return card
    served = _named(card.id for card in cards) or "no model"
    raise EngineRejected(f"engine {engine!r} does not serve {wanted!r}", hint=f"it serves {served}")


def served_by_all(answers: Sequence[Any], wanted: str | None, engine: str) -> ModelCard:
    """Return the model that all servers behind one URL serve, with the shortest of their contexts. Raises the errors of
    `served_model`, and EngineRejected if the servers have different models."""
    cards = [served_model(answer, wanted, engine) for answer in answers]
    if len({card.id for card in cards}) > 1:
        names = _named(sorted({card.id for card in cards}))
        raise EngineRejected(
            f"engine {engine!r} is a router of several models: {names}", hint="give each its own router"
        )
    return min(cards, key=lambda card: card.max_model_len or MAX_CONTEXT)


def _named(ids: Iterable[str]) -> str:
    """Return the names of the first models of a list, because a server may list any number of models."""
    first = list(islice(ids, MAX_NAMED + 1))
    more = ", …" if len(first) > MAX_NAMED else ""
    return ", ".join(name[:MAX_NAME] for name in first[:MAX_NAMED]) + more


def penalties_and_bias(sampling: SamplingParams) -> dict[str, Any]:
    """Return penalties, bias and minimum length under vLLM's names, which the completions and chat routes of other
    servers use, too. The repetition penalty is always sent: without it the server would apply the penalty of the
    model's generation_config.json."""
    fields: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty}
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        ("min_tokens", min(sampling.min_tokens, sampling.max_tokens)),  # vLLM refuses a number above max_tokens
        ("logit_bias", bias_json(sampling)),
    ):
        if value:
            fields[name] = value
    return fields


def bias_json(sampling: SamplingParams) -> dict[str, float]:
    """Return the bias with ids as strings, because the keys of a JSON object are strings."""
    return {str(token): bias for token, bias in sampling.logit_bias.items()}


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint in the form of vLLM's `structured_outputs`."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"json_object": True}
        case ConstraintKind.JSON_SCHEMA:
            return {"json": msgspec.json.decode(constraint.text)}
        case kind:
            return {kind.value: constraint.text}
