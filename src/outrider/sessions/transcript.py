"""Restores the main conversation of a session from its stored turns."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.messages import Message
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import Turn, path_to


def transcript(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the messages of the newest answered turn of the main conversation, including its reply, or () if no turn
    was answered. `turns[i].index` must be `i`.

    If a harness has replaced its history by a summary, the messages begin with the summary.
    """
    lines = lineages(turns)
    answered = (turn for turn in reversed(turns) if lines[turn.index].main_line and turn.reply is not None)
    newest = next(answered, None)
    messages: list[Message] = []
    for turn in [] if newest is None else path_to(newest, turns):
        messages += turn.messages
        if turn.reply is not None:
            messages.append(turn.reply)
    return tuple(messages)
