"""Converts samples, the training rows of sessions, to the data formats of trainers: NeMo Gym's `/run` reply, prime-rl's
training samples, verifiers' traces, and the datums of Tinker-style clients.

The results are plain dicts and lists, so no trainer has to be installed. Invariants:

- The ids, mask and log-probabilities are exactly those of the sample.
- A sample without a reward is refused, because such a sample must not be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outrider.errors import InvalidField
from outrider.trajectory import Sample

Decode = Callable[[list[int]], str]
"""A function that converts token ids to text, such as a tokenizer's `decode`."""


class Span(NamedTuple):
    """A range [start, end) of a row's token ids that have the same mask value. `trained` is True for mask 1 and False
    for mask 0."""

    start: int
    end: int
    trained: bool


def spans_of(mask: Sequence[int]) -> Iterator[Span]:
    """Split a mask wherever its value changes. The parts are in order and cover the whole mask."""
    start = 0
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            yield Span(start, end, bool(mask[start]))
            start = end


def nemo_gym_reply(
    sample: Sample, request: Mapping[str, Any], *, decode: Decode | None = None, longest: int | None = None
) -> dict[str, Any]:
    """Return the reply to `request`, the body of a `POST /run` from NeMo Gym. The reply has an output item for each
    range of trained ids in the row.

    An item's prompt is all ids before the item. So each prompt begins with the previous item's prompt, as NeMo RL
    requires. Without `decode`, the items have no text. With `longest`, only the first `longest` ids of the row are
    kept. The usage in the reply counts each kept id once. Raises InvalidField for a sample without a reward.
    """
    reward = _reward(sample)
    ids, mask, logprobs = (column[:longest].tolist() for column in (sample.ids, sample.loss_mask, sample.logprobs))
    output = [
        {
            "id": f"{sample.session_id}-{sample.row}-{span.start}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": _text(sample, span, decode), "annotations": []}],
            "prompt_token_ids": ids[: span.start],
            "generation_token_ids": ids[span.start : span.end],
            "generation_log_probs": logprobs[span.start : span.end],
        }
        for span in spans_of(mask)
        if span.trained
    ]
    echoed = {name: value for name, value in request.items() if name.startswith("_") or name == "agent_ref"}
    sampled = sum(mask)
    response = {
        "id": sample.session_id,
        "object": "response",
        "created_at": 0.0,
        "model": "outrider",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": len(ids) - sampled,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(ids),
        },
    }
    return {
        **sample.metrics,
        **echoed,
        "responses_create_params": request.get("responses_create_params", {}),
        "response": response,
        "reward": reward,
    }


def prime_rl_sample(
    sample: Sample, *, env_name: str, temperature: float, advantage: float | Sequence[float]
) -> dict[str, Any]:
    """Return the fields of prime-rl's TrainingSample, with lists of equal length. `advantage` is one number for the
    whole row, or a list with a number for each id, for example from `Sample.token_rewards()`. Ids with mask 0 get the
    advantage 0.0. Raises InvalidField for a sample without a reward."""
    return {
        "token_ids": sample.ids.tolist(),
        "mask": sample.loss_mask.astype(bool).tolist(),
        "logprobs": sample.logprobs.tolist(),
        "temperatures": [temperature] * len(sample),
        "advantages": _advantages(sample, advantage),
        "env_name": env_name,
        "reward": _reward(sample),
    }


def verifiers_nodes(samples: Sequence[Sample], *, decode: Decode | None = None) -> list[dict[str, Any]]:
    """Return the `nodes` of a verifiers trace. Each sample of the session becomes a path of nodes with its own root.
    Raises InvalidField for a sample without a reward.

    Each range of trained ids becomes an assistant node, marked as sampled. All other ranges become user nodes, because
    a row does not record roles. Joined in order, the `token_ids` of a path's nodes are the row's ids, and their
    `logprobs` are the log-probabilities of the row's trained ids.
    """
    nodes: list[dict[str, Any]] = []
    for sample in samples:
        _reward(sample)
        parent: int | None = None
        for span in spans_of(sample.loss_mask.tolist()):
            role = "assistant" if span.trained else "user"
            nodes.append(
                {
                    "parent": parent,
                    "message": {"role": role, "content": _text(sample, span, decode)},
                    "sampled": span.trained,
                    "token_ids": sample.ids[span.start : span.end].tolist(),
                    "mask": [span.trained] * (span.end - span.start),
                    "logprobs": sample.logprobs[span.start : span.end].tolist() if span.trained else [],
                }
            )
            parent = len(nodes) - 1
    return nodes


def tinker_datum(sample: Sample, *, advantage: float | Sequence[float]) -> dict[str, Any]:
    """Return a datum of a Tinker-style client, for the losses importance_sampling, ppo and cispo.

    `model_input` has all ids but the last. Position i in `loss_fn_inputs` belongs to id i + 1 of the row. `advantage`
    is one number for the whole row, or a list with a number for each id. `weights` are 1.0 for trained ids and 0.0 for
    other ids. For the loss cross_entropy, pass `weights` in place of `logprobs` and `advantages`. To get an object of
    tinker's own class, call
    `Datum(model_input=ModelInput.from_ints(datum["model_input"]), loss_fn_inputs=datum["loss_fn_inputs"])`.

    Raises InvalidField for a sample without a reward, and for a sample whose first id is trained, because the model
    cannot predict an id without a prompt.
    """
    _reward(sample)
    if sample.trained[:1] and sample.trained[0][0] == 0:
        raise InvalidField(f"row {sample.row} of session {sample.session_id} has no prompt", field="sample")
    ids = sample.ids.tolist()
    return {
        "model_input": ids[:-1],
        "loss_fn_inputs": {
            "target_tokens": ids[1:],
            "logprobs": sample.logprobs[1:].tolist(),
            "advantages": _advantages(sample, advantage)[1:],
        },
        "weights": sample.loss_mask[1:].astype(float).tolist(),
    }


def _advantages(sample: Sample, advantage: float | Sequence[float]) -> list[float]:
    given = [advantage] * len(sample) if isinstance(advantage, float | int) else advantage
    if len(given) != len(sample):
        raise InvalidField(f"{len(given)} advantages for {len(sample)} ids", field="advantage")
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
    return decode(sample.ids[span.start : span.end].tolist()) if decode is not None else ""
