"""Checks the demo's samples: every text that is trained on is one that a turn sampled, by decoding the ids again.

Pure. It runs no model. Whether the engine was given exactly these ids is what the service's count of drift says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.demo.run import Rollouts
from outrider.schemas import TurnView
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Sample


def sample_faults(rollouts: Rollouts, tokenizer: Tokenizer) -> list[str]:
    """What is wrong with the samples, in words; empty when nothing is."""
    found: list[str] = []
    for group in rollouts.groups:
        trained: dict[str, int] = {session.id: 0 for session in group.sessions}
        for sample in group.samples or ():
            trained[sample.session_id] += sum(sample.loss_mask)
            found += _one_sample_faults(sample, rollouts.turns[sample.session_id], tokenizer)
        for session in group.sessions:
            expected = session.result.tokens.trained if session.result else 0
            if trained[session.id] != expected:
                found.append(
                    f"{session.id}: its samples train {trained[session.id]} tokens, its result says {expected}"
                )
    return found


def _one_sample_faults(sample: Sample, turns: Sequence[TurnView], tokenizer: Tokenizer) -> Iterator[str]:
    name = f"{sample.session_id} row {sample.row}"
    lengths = {len(column) for column in (sample.ids, sample.loss_mask, sample.logprobs, sample.versions)}
    if len(lengths) != 1:
        yield f"{name}: its columns have different lengths"
        return
    sampled = {turn.sampled for turn in turns}
    # One turn is one unbroken run of tokens that are trained on.
    for mask, run in groupby(zip(sample.loss_mask, sample.ids, strict=True), key=lambda pair: pair[0]):
        if mask and (text := tokenizer.decode([token for _, token in run])) not in sampled:
            yield f"{name}: {text!r} is trained on, but no turn said it"
    for mask, logprob, version in zip(sample.loss_mask, sample.logprobs, sample.versions, strict=True):
        if not (logprob <= 0.0 and version >= 0 if mask else logprob == 0.0 and version == -1):
            yield f"{name}: mask {mask} with log-probability {logprob} and version {version}"
            return
