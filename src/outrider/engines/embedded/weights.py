"""Reads, updates and exports the weights of the model. Some tensors that Hugging Face publishes separately are one
fused parameter in model.py.

Invariant: an update checks every tensor before it changes a parameter, so the update is applied completely or not at
all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.engines.embedded.model import Llama, ModelShape
from outrider.errors import EngineRejected, ModelMismatch

StateDict = Mapping[str, Tensor]


class FusedSlice(msgspec.Struct, frozen=True):
    """The place of a published tensor in the model: the tensor `name` is rows [start, start + rows) of the model's
    parameter `parameter`."""

    name: str
    parameter: str
    start: int
    rows: int


def fused_slices(shape: ModelShape) -> Iterator[FusedSlice]:
    """Yield a `FusedSlice` for every published tensor of a model of this shape."""
    yield FusedSlice("model.embed_tokens.weight", "embed.weight", 0, shape.vocab)
    yield FusedSlice("model.norm.weight", "norm", 0, shape.hidden)
    if not shape.tied:
        yield FusedSlice("lm_head.weight", "head.weight", 0, shape.vocab)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            yield FusedSlice(f"{theirs}.self_attn.q_proj.{kind}", f"{ours}.qkv.{kind}", 0, width)
            yield FusedSlice(f"{theirs}.self_attn.k_proj.{kind}", f"{ours}.qkv.{kind}", width, kv_width)
            yield FusedSlice(f"{theirs}.self_attn.v_proj.{kind}", f"{ours}.qkv.{kind}", width + kv_width, kv_width)
        yield FusedSlice(f"{theirs}.self_attn.o_proj.weight", f"{ours}.out.weight", 0, shape.hidden)
        yield FusedSlice(f"{theirs}.mlp.gate_proj.weight", f"{ours}.gate_up.weight", 0, shape.mlp)
        yield FusedSlice(f"{theirs}.mlp.up_proj.weight", f"{ours}.gate_up.weight", shape.mlp, shape.mlp)
        yield FusedSlice(f"{theirs}.mlp.down_proj.weight", f"{ours}.down.weight", 0, shape.hidden)
        yield FusedSlice(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm", 0, shape.hidden)
        yield FusedSlice(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm", 0, shape.hidden)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json in a model's folder. Raises ModelMismatch if it is missing or unreadable."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelMismatch(
            f"{folder} holds no readable config.json: {error}",
            hint="give a folder in Hugging Face layout: config.json and *.safetensors",
        ) from error
    if not isinstance(config, dict):
        raise ModelMismatch(f"config.json in {folder} is not an object")
    return config


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, or of all such files in a folder. Raises EngineRejected if there are
    none, or if a file is unreadable."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise EngineRejected(f"no *.safetensors in {path}")
    state: dict[str, Tensor] = {}
    try:
        for file in files:
            state.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise EngineRejected(f"cannot read weights from {path}: {error}") from error
    return state


def apply_weights(model: Llama, state: StateDict) -> None:
    """Copy published tensors into the model's parameters, as float32.

    Raises EngineRejected if a tensor is missing, has another shape, or is not finite. In that case, no parameter is
    changed.
    """
    targets = {part.name: _target(model, part) for part in fused_slices(model.shape)}
    for name, target in targets.items():
        source = state.get(name)
        if source is None:
            raise EngineRejected(f"weights lack {name}")
        if source.shape != target.shape:
            raise EngineRejected(f"{name} has shape {tuple(source.shape)}, the model {tuple(target.shape)}")
        # A single NaN would make every logit NaN, without an error that shows the cause.
        if not bool(torch.isfinite(source).all()):
            raise EngineRejected(f"{name} holds values that are not finite")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state[name])


def export_weights(model: Llama) -> dict[str, Tensor]:
    """Return contiguous copies of the model's weights, by their published names."""
    return {part.name: _target(model, part).clone() for part in fused_slices(model.shape)}


def load_model(folder: Path) -> Llama:
    """Load a model from a folder in Hugging Face layout, ready to serve. Raises ModelMismatch or EngineRejected."""
    shape = ModelShape.from_config(read_config(folder))
    model = Llama(shape)
    model.requires_grad_(False)
    apply_weights(model, read_weights(folder))
    return model


def _target(model: Llama, part: FusedSlice) -> Tensor:
    return model.get_parameter(part.parameter).detach().narrow(0, part.start, part.rows)
