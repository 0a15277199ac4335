"""A decoder-only transformer of the Llama family (Llama, Qwen2), in plain torch.

The caller of `hidden` chooses the attention: over a cache to serve the model, over the whole sequence to train it.
Invariant: parameters are float32. The weights for query, key and value form one matrix. The weights for gate and up
form another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import ModelMismatch

FAMILIES = ("llama", "qwen2")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model, from its config.json. `context` is the length in tokens of the longest sequence that it
    supports."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qkv_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the sizes from a Hugging Face config. Raises ModelMismatch for an architecture that this module does not
        support."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelMismatch(
                f"the embedded engine cannot run models of type {family!r}", hint=f"known: {', '.join(FAMILIES)}"
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unsupported = {
            "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
            "sliding window attention": bool(config.get("use_sliding_window")),
            "biases": family == "llama" and bool(config.get("attention_bias") or config.get("mlp_bias")),
            "the activation function": config.get("hidden_act", "silu") != "silu",
            "quantised weights": "quantization_config" in config,
        }
        if found := [name for name, present in unsupported.items() if present]:
            raise ModelMismatch(f"the embedded engine does not support {', '.join(found)} of this model")
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                vocab=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                mlp=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                context=int(config["max_position_embeddings"]),
                rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2",
            )
        except KeyError as error:
            raise ModelMismatch(f"the model's config.json lacks {error}") from error


class Attend(Protocol):
    """Computes the attention of one layer for the new tokens. `query` has the shape (batch, heads, tokens, dim), `key`
    and `value` have (batch, kv heads, tokens, dim). The result has the shape of `query`."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute grouped-query attention without copying keys: query heads that share a key head become rows of one
    matrix.

    `query` has the shape (batch, heads, tokens, dim), `key` and `value` have (batch, kv heads, length, dim). `mask` is
    None, or a boolean tensor from `grouped_mask` of shape (batch or 1, 1, heads / kv heads * tokens, length), True
    where attention is allowed.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    return functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).reshape(query.shape)


def grouped_mask(mask: Tensor, group: int) -> Tensor:
    """Repeat a mask of shape (batch, tokens, length) for the `group` query heads of each key head. The result has the
    shape (batch, 1, group * tokens, length) that `attention` needs."""
    return mask[:, None].repeat(1, 1, group, 1)


class CausalAttention:
    """Attention of whole sequences to themselves, for training."""

    def __init__(self, shape: ModelShape, tokens: int) -> None:
        causal = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
        self._mask = grouped_mask(causal, shape.heads // shape.kv_heads)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, self._mask)


class CachedAttention:
    """Attention of new tokens to cached tokens and to themselves. `mask`, of shape (rows, columns), is 0 for padding.
    The attribute `cache` starts as a copy of the argument `cache`, and each call adds the keys and values of its
    tokens."""

    def __init__(self, shape: ModelShape, mask: Tensor, tokens: int, cache: list[tuple[Tensor, Tensor]]) -> None:
        self.cache = list(cache)
        columns = mask.shape[1]
        own = torch.arange(columns) - torch.arange(columns - tokens, columns)[:, None]
        # Padding attends to itself, because the softmax of a row without allowed columns would be NaN.
        allowed = (mask[:, None].bool() & (own < 0)) | (own == 0)
        self._mask = grouped_mask(allowed, shape.heads // shape.kv_heads)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer < len(self.cache):
            keys, values = self.cache[layer]
            self.cache[layer] = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        else:
            self.cache.append((key, value))
        return attention(query, *self.cache[layer], self._mask)


class Layer(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """One block of the model: attention, then a gated MLP. Each reads an RMS norm of its input, and its result is added
    to that input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Linear(shape.hidden, width + 2 * kv_width, bias=shape.qkv_bias)
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, index: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape = self.shape
        batch, tokens, _ = x.shape
        qkv = self.qkv(self._norm(x, self.attention_norm))
        heads = qkv.view(batch, tokens, -1, shape.head_dim).transpose(1, 2)
        rotated, value = heads.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        query, key = rotated.split([shape.heads, shape.kv_heads], dim=1)
        mixed = attend(index, query, key, value).transpose(1, 2).reshape(batch, tokens, -1)
        x = x + self.out(mixed)
        gate, up = self.gate_up(self._norm(x, self.mlp_norm)).chunk(2, dim=-1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_eps)


class Llama(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """The whole model. Its weights are arbitrary until they are loaded (weights.py) or initialised by a trainer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab, bias=False)
        # The rotary tables have the shape (context, head_dim). The second half of each row repeats the first, as in
        # Hugging Face's layout.
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states after the last layer and its norm, of shape (batch, tokens, hidden). `ids` has the
        shape (batch, tokens), `positions` has (batch or 1, tokens)."""
        x = self.embed(ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            x = layer(index, x, cos, sin, attend)
        return functional.rms_norm(x, (self.shape.hidden,), self.norm, self.shape.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, of shape (..., vocab), for hidden states of shape (..., hidden)."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return functional.linear(hidden, weight)

    def extend(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute the logits of the next tokens from `cache` and `ids`; see `batch.Forward`."""
        attend = CachedAttention(self.shape, mask, ids.shape[1], cache)
        return self.logits(self.hidden(ids, positions, attend)[:, -1]), attend.cache
