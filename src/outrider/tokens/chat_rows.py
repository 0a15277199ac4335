"""Training rows as conversations, for trainers that apply a chat template themselves.

A pure function of the stored turns, like `samples.py`, whose rows these are. It renders nothing: the messages are those
that the agent sent and was given, so a template may print them otherwise than the model saw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from outrider.messages import Image, Message, image_file
from outrider.tokens.rendering.chat_template import message_dict
from outrider.tokens.samples import build_samples
from outrider.trajectory import ChatRow, Sample, SessionResult, Turn

IMAGES = "images"
"""The folder of images beside an exported file."""


def chat_rows(turns: Sequence[Turn], result: SessionResult) -> list[ChatRow]:
    """A row for each sample of the session. `turns[i].index` must be `i`."""
    return [_chat_row(sample, turns) for sample in build_samples(turns, result)]


def _chat_row(sample: Sample, turns: Sequence[Turn]) -> ChatRow:
    path = [turns[index] for index in sample.turns]
    in_parts = bool(sample.images)
    messages = []
    for turn, (start, end) in zip(path, sample.turn_spans, strict=True):
        messages += [_message(message, in_parts) for message in turn.messages]
        if turn.reply is not None:  # None where the client had hung up
            messages.append(_message(turn.reply, in_parts) | {"weight": int(1 in sample.loss_mask[start:end])})
    first, last = path[0], path[-1]
    known = first.tools == last.tools and bool(first.tools) == bool(first.tool_specs)
    return ChatRow(
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


def _message(message: Message, in_parts: bool) -> dict[str, Any]:
    shown = message_dict(replace(message, parts=()))
    if in_parts:
        text = ({"type": "text", "text": message.content},) if message.content else ()
        shown["content"] = [
            _image(part) if isinstance(part, Image) else {"type": "text", "text": part.text} for part in message.parts
        ] or list(text)
    return shown


def _image(image: Image) -> dict[str, str]:
    where = {"url": image.url} if image.url is not None else {"path": f"{IMAGES}/{image_file(image)}"}
    return {"type": "image", **where}
