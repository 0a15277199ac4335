"""Draws one token per sequence from logits, each by its own parameters and its own random stream.

It knows no text and no cache. Invariant: the log-probability given is that of the raw logits (log-softmax before
penalties, bias, form, temperature and truncation), whatever was drawn from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from outrider.engines.base import SamplingParams
from outrider.engines.embedded.structured_output import Form
from outrider.errors import EngineRejected


class Draw(msgspec.Struct, frozen=True):
    """One sampled token and the natural log of its raw probability."""

    token: int
    logprob: float


class Stream:
    """One request's sampling parameters, random numbers, and what of its tokens changes the next ones' probabilities. A
    seed makes them repeatable."""

    def __init__(self, params: SamplingParams, *, prompt: Iterable[int] = (), form: Form | None = None) -> None:
        self.params = params
        self._form = form
        self._prompt = frozenset(map(int, prompt)) if params.repetition_penalty != 1 else frozenset[int]()
        self._output: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def truncates(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0

    @property
    def form_failed(self) -> bool:
        """Whether the form gave up: from then on anything may come."""
        return self._form is not None and self._form.failed

    @property
    def form_finished(self) -> bool:
        return self._form is not None and self._form.finished

    def accept(self, token: int) -> None:
        """The token that was drawn."""
        if self.params.altered:
            self._output[token] += 1
            if self._form is not None:
                self._form.accept(token)

    def alter(self, logits: Tensor) -> None:
        """Change one row (vocab,) into what is drawn from: bias, penalties (as in vLLM), then what is forbidden."""
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
        allowed = torch.ones(len(logits), dtype=torch.bool)
        if self._form is not None and not self._form.finished:
            allowed = torch.from_numpy(self._form.allowed())
        if self._output.total() < params.min_tokens:
            longer = allowed.clone()
            longer[[token for token in params.stop_token_ids if token < len(longer)]] = False
            allowed = longer if longer.any() else allowed  # a form that is complete can only end
        logits[~allowed] = -torch.inf

    def uniform(self) -> float:
        """A number in [0, 1); none is spent on a greedy draw."""
        if self.params.temperature == 0:
            return 0.0
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def check_sampling(params: SamplingParams) -> None:
    """Raises EngineRejected naming the parameter that is out of its range."""
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


def sample(logits: Tensor, streams: Sequence[Stream]) -> list[Draw]:
    """One draw per row of `logits` (sequences, vocab), float32. Temperature 0 takes the likeliest token."""
    raw = logits.log_softmax(dim=-1)
    altered = _altered(logits, streams)
    greedy = altered.argmax(dim=-1)
    all_greedy = all(stream.params.temperature == 0 for stream in streams)
    chosen = greedy if all_greedy else _drawn(altered, greedy, streams)
    logprobs = raw.gather(1, chosen[:, None])[:, 0].tolist()
    return [Draw(token, logprob) for token, logprob in zip(chosen.tolist(), logprobs, strict=True)]


def _altered(logits: Tensor, streams: Sequence[Stream]) -> Tensor:
    """What is drawn from. Rows that nothing alters are as they were."""
    rows = [row for row, stream in enumerate(streams) if stream.params.altered]
    if not rows:
        return logits
    altered = logits.clone()
    for row in rows:
        streams[row].alter(altered[row])
    return altered


def _drawn(logits: Tensor, greedy: Tensor, streams: Sequence[Stream]) -> Tensor:
    """Inverse transform sampling in float64: one uniform number per row, whatever the vocabulary."""
    temperatures = _column([stream.params.temperature for stream in streams])
    weights = (logits.double() / temperatures.clamp_min(1e-6)).softmax(dim=-1)
    if any(stream.truncates for stream in streams):
        weights = _truncate(weights, streams)
    cumulative = weights.cumsum(dim=-1)
    uniform = _column([stream.uniform() for stream in streams]) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform, right=True)[:, 0]
    # Rounding can put the number on the last step's upper edge, past every token.
    fallback = (temperatures[:, 0] == 0) | (drawn >= logits.shape[-1])
    return torch.where(fallback, greedy, drawn)


def _truncate(weights: Tensor, streams: Sequence[Stream]) -> Tensor:
    """Zero what min_p, then top_k, then top_p cut off; the likeliest token always stays."""
    vocab = weights.shape[-1]
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    min_p = _column([stream.params.min_p for stream in streams])
    top_k = torch.tensor([stream.params.top_k if stream.params.top_k > 0 else vocab for stream in streams])
    top_p = _column([stream.params.top_p for stream in streams])
    keep = (ordered >= min_p * ordered[:, :1]) & (torch.arange(vocab) < top_k[:, None])
    kept = ordered * keep
    before = kept.cumsum(dim=-1) - kept
    # top_p of 1 keeps all: the cumulated sum must not lose a tail token to rounding.
    kept = kept * ((before < top_p * kept.sum(dim=-1, keepdim=True)) | (top_p == 1))
    return torch.zeros_like(weights).scatter(1, tokens, kept)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
