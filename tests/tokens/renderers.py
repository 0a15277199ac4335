"""Renderers of the streamed Qwen families over one small tokenizer."""

from __future__ import annotations

from functools import cache

from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.tokenizer import make_tokenizer

FAMILIES = ("qwen3", "qwen3.5", "qwen3.6")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@cache
def small_tokenizer() -> Tokenizer:
    backend = make_tokenizer()
    backend.add_special_tokens(list(VISION))
    return Tokenizer(backend, name_or_path="small-qwen", settings={"eos_token": "<|im_end|>"})


@cache
def family_renderer(family: str = "qwen3") -> Renderer:
    return Renderer(small_tokenizer(), family)
