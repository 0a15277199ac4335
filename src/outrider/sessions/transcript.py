"""The main conversation of a session, read back from its stored turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.messages import Message
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import Turn


def transcript(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the messages of the newest answered turn of the main conversation, its reply included.

    If a harness has replaced its history by a summary, the messages begin with the summary. The result is empty if no
    turn was answered. `turns[i].index` must be `i`.
    """
    lines = lineages(turns)
    answered = (turn for turn in reversed(turns) if lines[turn.index].main_line and turn.reply is not None)
    turn = next(answered, None)
    messages: list[Message] = []
    while turn is not None:
        if turn.reply is not None:
            messages.append(turn.reply)
        messages.extend(reversed(turn.messages))
        turn = turns[turn.parent] if turn.parent is not None else None
    return tuple(reversed(messages))
