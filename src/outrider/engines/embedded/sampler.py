"""Samples one token for each sequence from its logits, with the sequence's own parameters and random numbers.

Invariant: the reported log-probability is computed from the raw logits (log-softmax before penalties, bias, temperature
and truncation), whatever distribution the token was drawn from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from outrider.engines.base import SamplingParams
from outrider.errors import EngineRejected


class SampledToken(msgspec.Struct, frozen=True):
    """A token id and the natural log of its raw probability."""

    token: int
    logprob: float


class SamplingState:
    """One sequence's sampling parameters, its random numbers, and counts of earlier tokens for the penalties. The
    same seed gives the same tokens again."""

    def __init__(self, params: SamplingParams, *, prompt: Iterable[int] = ()) -> None:
        self.params = params
        self._prompt = frozenset(map(int, prompt)) if params.repetition_penalty != 1 else frozenset[int]()
        self._output: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def accept(self, token: int) -> None:
        """Record the token that was sampled."""
        if self.params.altered:
            self._output[token] += 1

    def alter(self, logits: Tensor) -> None:
        """Change one row of logits (vocab,) in place: bias, penalties (as vLLM applies them), then forbidden tokens."""
        params, penalty = self.params, self.params.repetition_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if penalty != 1:
            seen = torch.tensor(sorted(self._prompt | self._output.keys()))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if self._output and (params.presence_penalty or params.frequency_penalty):
            tokens = torch.tensor(list(self._output))
            counts = torch.tensor(list(self._output.values()), dtype=logits.dtype)
            logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        if self._output.total() < params.min_tokens:
            stops = {token for token in params.stop_token_ids if token < len(logits)}
            if len(stops) < len(logits):  # one token must stay possible
                logits[list(stops)] = -torch.inf

    def uniform(self) -> float:
        """Return the next random number in [0, 1). Greedy sampling consumes none."""
        if self.params.temperature == 0:
            return 0.0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def check_sampling(params: SamplingParams) -> None:
    """Raise EngineRejected, with the parameter's name, if a sampling parameter is out of range."""
    legal = {
        "max_tokens": params.max_tokens >= 1,
        "temperature": 0 <= params.temperature < float("inf"),
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k >= -1,
        "min_p": 0 <= params.min_p <= 1,
        "seed": params.seed is None or 0 <= params.seed < 1 << 63,
        "stop": all(params.stop),
        "min_tokens": params.min_tokens >= 0,
        "repetition_penalty": 0 < params.repetition_penalty < float("inf"),
        "presence_penalty": abs(params.presence_penalty) < float("inf"),
        "frequency_penalty": abs(params.frequency_penalty) < float("inf"),
        "logit_bias": all(abs(bias) < float("inf") for bias in params.logit_bias.values()),
    }
    if wrong := [name for name, fine in legal.items() if not fine]:
        raise EngineRejected(f"{wrong[0]} is out of range: {getattr(params, wrong[0])!r}", field=wrong[0])


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Sample one token for each row of `logits` (sequences, vocab), float32. Temperature 0 takes the likeliest token.

    The method is inverse transform sampling in float64, with one uniform number per row, whatever the size of the
    vocabulary.
    """
    raw = logits.log_softmax(dim=-1)
    altered_rows = [row for row, state in enumerate(states) if state.params.altered]
    if altered_rows:
        logits = logits.clone()
        for row in altered_rows:
            states[row].alter(logits[row])
    chosen = logits.argmax(dim=-1)
    if any(state.params.temperature != 0 for state in states):
        temperatures = _column([state.params.temperature for state in states])
        # Rows of temperature 0 keep the likeliest token below. The bound on the temperature only keeps their division
        # finite.
        weights = (logits.double() / temperatures.clamp_min(1e-6)).softmax(dim=-1)
        if any(state.params.top_k > 0 or state.params.top_p < 1 or state.params.min_p > 0 for state in states):
            weights = _truncate(weights, [state.params for state in states])
        cumulative = weights.cumsum(dim=-1)
        uniform = _column([state.uniform() for state in states]) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, uniform, right=True)[:, 0]
        # By rounding, a number can lie on the upper edge of the last token, and so be past every token.
        fallback = (temperatures[:, 0] == 0) | (drawn >= logits.shape[-1])
        chosen = torch.where(fallback, chosen, drawn)
    logprobs = raw.gather(1, chosen[:, None])[:, 0].tolist()
    return [SampledToken(token, logprob) for token, logprob in zip(chosen.tolist(), logprobs, strict=True)]


def _truncate(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set to zero the weights cut off by min_p, then top_k, then top_p. The likeliest token always stays."""
    vocab = weights.shape[-1]
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    min_p = _column([each.min_p for each in params])
    top_k = torch.tensor([each.top_k if each.top_k > 0 else vocab for each in params])
    top_p = _column([each.top_p for each in params])
    keep = (ordered >= min_p * ordered[:, :1]) & (torch.arange(vocab) < top_k[:, None])
    kept = ordered * keep
    before = kept.cumsum(dim=-1) - kept
    # top_p of 1 keeps every token: rounding in the cumulative sum must not cut off the tail.
    kept = kept * ((before < top_p * kept.sum(dim=-1, keepdim=True)) | (top_p == 1))
    return torch.zeros_like(weights).scatter(1, tokens, kept)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
