"""Samples in the shapes of trainers that read data instead of being called: NeMo Gym's `/run` reply, training samples
of prime-rl, traces of verifiers, and the datums of Tinker-style clients.

Plain dicts and lists, so none of these trainers need be installed. Invariant: ids, mask and log-probabilities are those
of the sample, to the bit; a sample that must not be trained on is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outrider.errors import InvalidField
from outrider.trajectory import Sample

Decode = Callable[[list[int]], str]
"""Makes text of ids, as a tokenizer's `decode`."""


class Span(NamedTuple):
    """Ids [start, end) of a row, either trained or context."""

    start: int
    end: int
    trained: bool


def spans_of(sample: Sample) -> Iterator[Span]:
    """The row cut wherever its mask changes; together the spans are the whole row."""
    start = 0
    for end in range(1, len(sample.ids) + 1):
        if end == len(sample.ids) or sample.loss_mask[end] != sample.loss_mask[start]:
            yield Span(start, end, bool(sample.loss_mask[start]))
            start = end


def nemo_gym_reply(sample: Sample, request: Mapping[str, Any], *, decode: Decode | None = None) -> dict[str, Any]:
    """The reply to NeMo Gym's `POST /run` with the body `request`: an output item for each trained span.

    Each item has all ids before it as its prompt, so the prompts extend each other, as NeMo RL asserts. The text of
    an item is empty without `decode`. Raises InvalidField for a sample without a reward.
    """
    reward = _reward(sample)
    output = [
        {
            "id": f"{sample.session_id}-{sample.row}-{span.start}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": _text(sample, span, decode), "annotations": []}],
            "prompt_token_ids": sample.ids[: span.start],
            "generation_token_ids": sample.ids[span.start : span.end],
            "generation_log_probs": sample.logprobs[span.start : span.end],
        }
        for span in spans_of(sample)
        if span.trained
    ]
    echoed = {name: value for name, value in request.items() if name.startswith("_") or name == "agent_ref"}
    response = {"id": sample.session_id, "object": "response", "output": output}
    return {
        **echoed,
        "responses_create_params": request.get("responses_create_params", {}),
        "response": response,
        "reward": reward,
        **{name: value for name, value in sample.metrics.items() if name not in ("response", "reward")},
    }


def prime_rl_sample(
    sample: Sample, *, env_name: str, temperature: float, advantage: float | Sequence[float]
) -> dict[str, Any]:
    """The fields of prime-rl's TrainingSample; its lists have equal length. The advantage is one number for the row, or
    one for each id, as made of `Sample.token_rewards()`; it is 0.0 on context. Raises InvalidField for a sample without
    a reward."""
    return {
        "token_ids": list(sample.ids),
        "mask": [bool(trained) for trained in sample.loss_mask],
        "logprobs": list(sample.logprobs),
        "temperatures": [temperature] * len(sample.ids),
        "advantages": _advantages(sample, advantage),
        "env_name": env_name,
        "reward": _reward(sample),
    }


def verifiers_nodes(samples: Sequence[Sample], *, decode: Decode | None = None) -> list[dict[str, Any]]:
    """The `nodes` of a verifiers trace with a path for each sample of a session, from a root of its own.

    A trained span is an assistant's node and sampled; context is a user's, because a row does not tell whose it is.
    Along a path the nodes' `token_ids` are the row, and their `logprobs` those of its trained ids.
    """
    nodes: list[dict[str, Any]] = []
    for sample in samples:
        _reward(sample)
        parent: int | None = None
        for span in spans_of(sample):
            role = "assistant" if span.trained else "user"
            nodes.append(
                {
                    "parent": parent,
                    "message": {"role": role, "content": _text(sample, span, decode)},
                    "sampled": span.trained,
                    "token_ids": sample.ids[span.start : span.end],
                    "mask": [span.trained] * (span.end - span.start),
                    "logprobs": sample.logprobs[span.start : span.end] if span.trained else [],
                }
            )
            parent = len(nodes) - 1
    return nodes


def tinker_datum(sample: Sample, *, advantage: float | Sequence[float]) -> dict[str, Any]:
    """A datum of a Tinker-style client, for its losses importance_sampling, ppo and cispo: `model_input` are the ids
    without the last, and in `loss_fn_inputs` position i belongs to the id i + 1 of the row. The advantage is one number
    for the row, or one for each of its ids.

    `weights` are 1.0 where an id trains: cross_entropy takes them in place of the other two. tinker's own class is
    `Datum(model_input=ModelInput.from_ints(made["model_input"]), loss_fn_inputs=made["loss_fn_inputs"])`.
    Raises InvalidField for a sample without a reward, and for one that begins with a trained id: nothing predicts it.
    """
    _reward(sample)
    if sample.loss_mask[:1] == [1]:
        raise InvalidField(f"row {sample.row} of session {sample.session_id} has no prompt", field="sample")
    mask = sample.loss_mask[1:]
    return {
        "model_input": sample.ids[:-1],
        "loss_fn_inputs": {
            "target_tokens": sample.ids[1:],
            "logprobs": sample.logprobs[1:],
            "advantages": _advantages(sample, advantage)[1:],
        },
        "weights": [float(trained) for trained in mask],
    }


def _advantages(sample: Sample, advantage: float | Sequence[float]) -> list[float]:
    given = [advantage] * len(sample.ids) if isinstance(advantage, float | int) else advantage
    if len(given) != len(sample.ids):
        raise InvalidField(f"{len(given)} advantages for {len(sample.ids)} ids", field="advantage")
    return [value if trained else 0.0 for value, trained in zip(given, sample.loss_mask, strict=True)]


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise InvalidField(
            f"row {sample.row} of session {sample.session_id} has no reward: it must not be trained on",
            field="sample",
            hint="export samples whose reward is not None",
        )
    return sample.reward


def _text(sample: Sample, span: Span, decode: Decode | None) -> str:
    return decode(sample.ids[span.start : span.end]) if decode is not None else ""
