"""Parts of the embedded engine: the distribution sampled from, and the end of an output."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from outrider.engines.base import SamplingParams
from outrider.trajectory import FinishReason
from support.embedded import TOKENIZER
from support.later import Later, torch

if TYPE_CHECKING:
    from outrider.engines.embedded import sampler, sequence
else:  # both import torch
    sampler, sequence = Later("outrider.engines.embedded.sampler"), Later("outrider.engines.embedded.sequence")

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

PROBABILITIES = (0.4, 0.3, 0.2, 0.08, 0.02)


def drawn(count: int = 4000, **sampling: Any) -> list[float]:
    """The frequency of each token over `count` draws from one seeded state."""
    state = sampler.SamplingState(SamplingParams(max_tokens=1, seed=0, **sampling))
    logits = torch.tensor([PROBABILITIES]).log().repeat(count, 1)
    draws = sampler.sample(logits, [state] * count)
    assert all(draw.logprob == pytest.approx(np.log(PROBABILITIES[draw.token]), abs=1e-5) for draw in draws)
    return [sum(draw.token == token for draw in draws) / count for token in range(len(PROBABILITIES))]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.0}, (1, 0, 0, 0, 0)),
        ({"temperature": 0.5}, [p * p / 0.2968 for p in PROBABILITIES]),
        ({"top_k": 2}, (4 / 7, 3 / 7, 0, 0, 0)),
        ({"top_p": 0.75}, (4 / 9, 3 / 9, 2 / 9, 0, 0)),
        ({"top_p": 0.01}, (1, 0, 0, 0, 0)),
        ({"min_p": 0.45}, (4 / 9, 3 / 9, 2 / 9, 0, 0)),
        ({"top_k": 3, "top_p": 0.75}, (4 / 7, 3 / 7, 0, 0, 0)),
    ],
)
def test_draws_follow_the_truncated_distribution(sampling: dict[str, Any], expected: list[float]) -> None:
    assert drawn(**sampling) == pytest.approx(expected, abs=0.03)


def test_rows_of_a_batch_keep_to_their_own_parameters() -> None:
    rows = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1, top_p=0.3),
    ]
    free = SamplingParams(max_tokens=1, seed=1)
    streams = [*(sampler.SamplingState(row) for row in rows), sampler.SamplingState(free)]
    draws = [sampler.sample(torch.tensor([PROBABILITIES] * 4).log(), streams) for _ in range(100)]
    assert all(draw.token == 0 for step in draws for draw in step[:3])
    assert {step[3].token for step in draws} >= {0, 1, 2}


def stops(text: str, *, limit: int = 100, **sampling: Any) -> tuple[int, object, object] | None:
    """The number of tokens of `text` after which a stop checker stops, the reason, and the match."""
    params = SamplingParams(max_tokens=limit, **sampling)
    watch = sequence.StopChecker(params, limit=limit, text=TOKENIZER.stream())
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        if stop := watch.push(token):
            return count, stop.reason, stop.match
    return None


def test_stop_strings_span_tokens_and_split_characters() -> None:
    text = "aé ☃ is in jade."
    ids = TOKENIZER.encode(text)
    until = next(n for n in range(len(ids)) if "☃ i" in TOKENIZER.decode(ids[:n]))
    assert stops(text, stop=("zone", "☃ i")) == (until, FinishReason.STOP, "☃ i")
    assert stops(text, stop=("☃ i", "é ☃")) == (until - 1, FinishReason.STOP, "é ☃")
    assert stops(text, stop=("jade!",)) is None


def test_stop_ids_win_over_the_limit_and_the_limit_comes_last() -> None:
    (end,) = TOKENIZER.encode("<|im_end|>")
    assert stops(" jade<|im_end|>", limit=2, stop_token_ids=(end,)) == (2, FinishReason.STOP, end)
    assert stops(" jade<|im_end|>", limit=1, stop_token_ids=(end,)) == (1, FinishReason.LENGTH, None)
    assert stops(" jade", stop=(" jade",), limit=1) == (1, FinishReason.STOP, " jade")


LOGITS = (2.0, 1.0, -1.0, 0.0, -2.0)


@pytest.mark.parametrize(
    ("sampling", "prompt", "before", "expected"),
    [
        ({"logit_bias": {4: 3.0}}, (), (), (2, 1, -1, 0, 1)),
        ({"repetition_penalty": 2.0}, (0, 2), (), (1, 1, -2, 0, -2)),
        ({"repetition_penalty": 2.0}, (), (0, 0, 4), (1, 1, -1, 0, -4)),
        ({"presence_penalty": 0.5}, (1,), (0, 0, 3), (1.5, 1, -1, -0.5, -2)),
        ({"frequency_penalty": 0.5}, (1,), (0, 0, 3), (1, 1, -1, -0.5, -2)),
        ({"min_tokens": 2, "stop_token_ids": (1, 99)}, (), (0,), (2, -np.inf, -1, 0, -2)),
        ({"min_tokens": 2, "stop_token_ids": (1, 99)}, (), (0, 0), LOGITS),
    ],
)
def test_what_alters_the_logits(
    sampling: dict[str, Any], prompt: tuple[int, ...], before: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    """The expected values were computed by hand from vLLM's formulas."""
    state = sampler.SamplingState(SamplingParams(max_tokens=9, **sampling), prompt=prompt)
    for token in before:
        state.accept(token)
    row = torch.tensor(LOGITS)
    state.alter(row)
    assert row.tolist() == pytest.approx(expected)


def test_an_altered_row_keeps_its_raw_log_probability_and_its_neighbours() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    biased = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={0: -100.0})
    first, second = sampler.sample(
        logits, [sampler.SamplingState(biased), sampler.SamplingState(SamplingParams(max_tokens=1, temperature=0.0))]
    )
    assert (first.token, second.token) == (1, 0)
    raw = torch.tensor(LOGITS).log_softmax(dim=-1).tolist()
    assert [first.logprob, second.logprob] == pytest.approx([raw[1], raw[0]])
    assert logits.tolist() == [list(LOGITS)] * 2
