"""Builds training rows that contain conversations, for trainers that apply a chat template themselves.

The rows are a pure function of the stored turns and their samples. They contain the messages that the agent sent and
received, but not the text of the model's prompt. The format of the messages under a trainer's template may therefore
differ from their format in the model's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from outrider.messages import Message, Text, image_file
from outrider.tokens.rendering.chat_template import message_dict
from outrider.trajectory import ChatRow, Sample, Turn

IMAGES = "images"
"""The name of the folder next to an exported file, with the file's images."""


def chat_rows(samples: Sequence[Sample], turns: Sequence[Turn]) -> list[ChatRow]:
    """Return one row for each sample. `turns` are all turns of the session, and `turns[i].index` must be `i`."""
    rows = []
    for sample in samples:
        path = [turns[index] for index in sample.turns]
        in_parts = bool(sample.images)
        messages = []
        for turn, (start, end) in zip(path, sample.turn_spans, strict=True):
            messages += [_message(message, in_parts) for message in turn.messages]
            if turn.reply is not None:  # there is no reply if the client disconnected early
                messages.append(_message(turn.reply, in_parts) | {"weight": int(sample.loss_mask[start:end].any())})
        first, last = path[0], path[-1]
        known = first.tools == last.tools and bool(first.tools) == bool(first.tool_specs)
        rows.append(
            ChatRow(
                messages=messages,
                tools=list(first.tool_specs) if known else None,
                group_id=sample.group_id,
                session_id=sample.session_id,
                sample_index=sample.sample_index,
                row=sample.row,
                kind=sample.kind,
                label=sample.label,
                reward=sample.reward,
                metrics=sample.metrics,
                stop_reason=sample.stop_reason,
                labels=sample.labels,
                images=sample.images,
            )
        )
    return rows


def _message(message: Message, in_parts: bool) -> dict[str, Any]:
    shown = message_dict(replace(message, parts=()))
    if in_parts:
        content: list[dict[str, str]] = []
        for part in message.parts or ((Text(message.content),) if message.content else ()):
            if isinstance(part, Text):
                content.append({"type": "text", "text": part.text})
            elif part.url is not None:
                content.append({"type": "image", "url": part.url})
            else:
                content.append({"type": "image", "path": f"{IMAGES}/{image_file(part)}"})
        shown["content"] = content
    return shown
