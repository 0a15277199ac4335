"""Samples one token for each sequence from its logits. Each sequence has its own parameters and random numbers.

Invariant: the reported log-probability is always the log-softmax of the raw logits. Penalties, bias, temperature and
truncation change how the token is drawn, but not this value.
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
    """A token id, and its natural log-probability computed from the raw logits."""

    token: int
    logprob: float


class SamplingState:
    """The sampling parameters of a sequence, its random numbers, and its counts of earlier tokens for the penalties.
    The same seed gives the same random numbers."""

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
        """Count a sampled token for the penalties and the minimum length."""
        if self.params.altered:
            self._output[token] += 1

    def alter(self, logits: Tensor) -> None:
        """Change a row of logits, of shape (vocab,), in place: add the bias, apply the penalties as vLLM does, and
        forbid stop tokens before the minimum length."""
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
            if len(stops) < len(logits):  # otherwise no token would be left to sample
                logits[list(stops)] = -torch.inf

    def uniform(self) -> float:
        """Return the next random number in [0, 1). With temperature 0, return 0 without consuming a random number."""
        if self.params.temperature == 0:
            return 0.0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def check_sampling(params: SamplingParams) -> None:
    """Check that all sampling parameters are in range. Raises EngineRejected with the name of the wrong parameter."""
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
    """Sample one token for each row of `logits`, float32 of shape (sequences, vocab). With temperature 0, the likeliest
    token is chosen.

    The method is inverse transform sampling in float64. A row with a temperature above 0 consumes one random number of
    its state.
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
        # In rows with temperature 0, the clamp only avoids a division by zero: the code below gives these rows the
        # likeliest token.
        weights = (logits.double() / temperatures.clamp_min(1e-6)).softmax(dim=-1)
        if any(state.params.top_k > 0 or state.params.top_p < 1 or state.params.min_p > 0 for state in states):
            weights = _truncate(weights, [state.params for state in states])
        cumulative = weights.cumsum(dim=-1)
        uniform = _column([state.uniform() for state in states]) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, uniform, right=True)[:, 0]
        # After rounding, a random number can equal the last cumulative sum. `drawn` is then past the last token, and
        # the likeliest token is used instead.
        fallback = (temperatures[:, 0] == 0) | (drawn >= logits.shape[-1])
        chosen = torch.where(fallback, chosen, drawn)
    logprobs = raw.gather(1, chosen[:, None])[:, 0].tolist()
    return [SampledToken(token, logprob) for token, logprob in zip(chosen.tolist(), logprobs, strict=True)]


def _truncate(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights with 0 for the tokens that min_p, top_k or top_p exclude. top_p applies to the tokens that the
    other two leave. The likeliest token always remains."""
    vocab = weights.shape[-1]
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    min_p = _column([each.min_p for each in params])
    top_k = torch.tensor([each.top_k if each.top_k > 0 else vocab for each in params])
    top_p = _column([each.top_p for each in params])
    keep = (ordered >= min_p * ordered[:, :1]) & (torch.arange(vocab) < top_k[:, None])
    kept = ordered * keep
    before = kept.cumsum(dim=-1) - kept
    # Test for top_p 1 separately, because rounding in the cumulative sum could cut off unlikely tokens.
    kept = kept * ((before < top_p * kept.sum(dim=-1, keepdim=True)) | (top_p == 1))
    return torch.zeros_like(weights).scatter(1, tokens, kept)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
