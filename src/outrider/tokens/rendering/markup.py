"""How each model family marks reasoning and tool calls in its text: a table, used to stream.

A family that is not listed is served all the same; its text reaches the client when the turn is complete.
"""

from __future__ import annotations

import msgspec


class Markup(msgspec.Struct, frozen=True):
    """`call_open` begins a tool call: from there on text is held until the turn is parsed."""

    think_open: str
    think_close: str
    call_open: str


_HERMES = Markup("<think>", "</think>", "<tool_call>")
_KIMI = Markup("<think>", "</think>", "<|tool_calls_section_begin|>")
_DEEPSEEK = Markup("<think>", "</think>", "<｜tool▁calls▁begin｜>")  # noqa: RUF001 - the model's own characters

MARKUP: dict[str, Markup] = {
    "qwen3": _HERMES,
    "prime-qwen3": _HERMES,
    "qwen3-vl": _HERMES,
    "qwen3.5": _HERMES,
    "qwen3.6": _HERMES,
    "qwen3.8": _HERMES,
    "glm-4.5": _HERMES,
    "glm-5": _HERMES,
    "glm-5.1": _HERMES,
    "glm-5.3": _HERMES,
    "nemotron-3": _HERMES,
    "minimax-m2": Markup("<think>", "</think>", "<minimax:tool_call>"),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
}
