"""Finds replies that a later request of the session quotes.

A program may use a reply without continuing the reply's conversation: as the result of a tool, in the prompt of the
next step, or as one vote of several. The program then sends the text, or a part of the text, in another message. A
reply that is quoted is part of the task's work, whatever the request for the reply looks like.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import deque
from collections.abc import Collection, Iterator

from outrider.messages import Message
from outrider.tokens.branches.segments import QUOTE_LENGTH, SegmentedSession
from outrider.trajectory import Turn

MAX_PARTS = 8
"""Maximum number of parts of a reply, the longest ones, that are searched for."""
MAX_COMPARED_PARTS = 4 * MAX_PARTS
"""Maximum number of parts of a reply that are compared with the request for the reply."""
MAX_WAITING = 100
"""Maximum number of replies, the newest ones, that are searched for in a request. Without this limit, the time for a
session with many unquoted replies would be quadratic in their number."""
MAX_COMPARED = 10**9
"""Maximum number of characters that one search reads, about a second's work. Replies that were not found by then count
as quoted, because replies that the agent used must not be left out of the training."""

_FENCE = re.compile(r"```(?:json)?[ \t]*\n")


class _Answer:
    """A reply that is searched for in later messages."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        assert turn.reply is not None
        self._text = turn.reply.content.strip().lower()
        asked = "\n".join(message.content for message in turn.messages).lower()
        parts = {part.lower() for part in parts_of_reply(turn.reply)}
        # A part that is also in the request itself may have another origin, so it is no evidence that the reply was
        # used.
        longest = heapq.nlargest(MAX_COMPARED_PARTS, parts, key=lambda part: (len(part), part))
        new = [part for part in longest if part not in asked][:MAX_PARTS]
        self.parts = list(dict.fromkeys(form for part in new for form in (part, json.dumps(part)[1:-1])))

    def is_quoted(self, texts: Collection[str], joined: str) -> bool:
        """Return True if the reply is one of the texts, or one of its parts is in their concatenation `joined`."""
        for part in self.parts:
            if part in joined:
                return True
        return bool(self._text) and self._text in texts


def quoting_turns(session: SegmentedSession, replies: Collection[int]) -> dict[int, int]:
    """Find the turns in `replies` whose reply a later request quotes. Returns, for each of them, the first turn with
    such a request.

    A message quotes a reply if the message is the whole reply, or has a part of the reply (a line, or a text in a JSON
    reply or in a tool call's arguments) that was not in the request for the reply. A part has at least QUOTE_LENGTH
    characters. A message that a turn of the session sampled does not count. The comparison ignores the case of letters.
    """
    found: dict[int, int] = {}
    waiting: deque[_Answer] = deque(maxlen=MAX_WAITING)
    compared = 0
    for turn in session.turns:
        new = (message.content for message in session.new_messages(turn) if not session.was_sampled(message))
        texts = {text.strip().lower() for text in new} if waiting else set()
        joined = "\n".join(texts)
        for answer in list(waiting) if texts else ():
            compared += len(joined) * len(answer.parts)
            if compared > MAX_COMPARED or answer.is_quoted(texts, joined):
                found[answer.turn.index] = turn.index
                waiting.remove(answer)
        if turn.index in replies and turn.reply is not None:
            waiting.append(_Answer(turn))
    return found


def parts_of_reply(reply: Message) -> Iterator[str]:
    """Yield the parts of a reply that have at least QUOTE_LENGTH characters: lines of its text, and of the texts in its
    tool calls' arguments."""
    yield from _parts(reply.content)
    for call in reply.tool_calls:
        yield from _parts(call.arguments)


def _parts(text: str) -> Iterator[str]:
    """Yield the lines of a text that have at least QUOTE_LENGTH characters. For JSON, yields lines of the strings in
    it."""
    body = text
    if (fence := _FENCE.search(text)) is not None:
        inside, end, _ = text[fence.end() :].partition("```")
        body = inside if end else text
    leaves: list[str] = []
    if body.lstrip()[:1] in ("{", "["):
        try:
            leaves = list(_texts_in(json.loads(body)))
        except (ValueError, RecursionError):
            leaves = []
    for piece in leaves or [text]:
        for line in map(str.strip, piece.splitlines()):
            if len(line) >= QUOTE_LENGTH:
                yield line


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
