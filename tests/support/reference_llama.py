"""A second implementation of the policy's forward pass, straight from the papers: one sequence at a time, without a
cache and without fused operations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.later import torch


class ReferenceLlama:
    """The model with the published weights in float64, so any measured error is the engine's."""

    def __init__(self, folder: Path, state: Mapping[str, torch.Tensor] | None = None) -> None:
        from safetensors.torch import load_file  # imported here, because it imports torch

        self.config = json.loads((folder / "config.json").read_text())
        published = load_file(folder / "model.safetensors") if state is None else state
        self.state = {name: tensor.double() for name, tensor in published.items()}

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the raw log-probability of each output token after the prompt."""
        ids = [*prompt, *output]
        table = self.logits(ids).log_softmax(dim=-1)
        first = len(prompt) - 1
        return [float(table[first + offset, token]) for offset, token in enumerate(output)]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        embedding = self.state["model.embed_tokens.weight"]
        x = embedding[torch.tensor(list(ids))]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(name, self._norm(x, f"{name}.input_layernorm"))
            x = x + self._mlp(name, self._norm(x, f"{name}.post_attention_layernorm"))
        return self._norm(x, "model.norm") @ self.state.get("lm_head.weight", embedding).T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.state[f"{name}.weight"]

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = self._linear(f"{name}.mlp.gate_proj", x)
        return self._linear(f"{name}.mlp.down_proj", gate * gate.sigmoid() * self._linear(f"{name}.mlp.up_proj", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        result = x @ self.state[f"{name}.weight"].T
        return result + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else result

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, tokens = self.config["head_dim"], len(x)
        query = self._turn(self._linear(f"{name}.self_attn.q_proj", x).view(tokens, heads, dim))
        key = self._turn(self._linear(f"{name}.self_attn.k_proj", x).view(tokens, kv_heads, dim))
        value = self._linear(f"{name}.self_attn.v_proj", x).view(tokens, kv_heads, dim)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, shared].T / dim**0.5
            mixed.append(scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value[:, shared])
        return self._linear(f"{name}.self_attn.o_proj", torch.cat(mixed, dim=-1))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the rotary position embedding as a complex multiplication. Element i is paired with element
        i + dim / 2."""
        tokens, _, dim = x.shape
        speed = self.config["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(tokens, dtype=torch.float64)[:, None, None] * speed
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1)
