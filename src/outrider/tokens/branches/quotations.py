"""Finds replies that a later request of the session quotes.

A program may use a reply without continuing the reply's conversation: as the result of a tool, in the prompt of the
next step, or as one vote of several. It then puts all or part of the reply's text into another message. So a quoted
reply is part of the task's work.
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
"""Maximum number of parts of one reply that are searched for. The longest parts are used."""
MAX_COMPARED_PARTS = 4 * MAX_PARTS
"""Maximum number of parts of a reply that are compared with the reply's own request."""
MAX_WAITING = 100
"""Maximum number of replies (the newest ones) that are searched for in each request. Without this limit, a session with
many unquoted replies would take quadratic time."""
MAX_COMPARED = 10**9
"""Maximum number of characters that the search reads in a session, about one second of work. After that, the search
ends, and every reply that was not found yet counts as quoted. If these replies counted as unquoted, a reply that the
agent used might be lost from the training data."""

_FENCE = re.compile(r"```(?:json)?[ \t]*\n")


class _Answer:
    """A reply that is searched for in later messages."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        assert turn.reply is not None
        self._text = turn.reply.content.strip().lower()
        asked = "\n".join(message.content for message in turn.messages).lower()
        parts = {part.lower() for part in parts_of_reply(turn.reply)}
        # A part that also appears in the reply's own request may have been copied from that request, so the part does
        # not prove that the reply was used.
        longest = heapq.nlargest(MAX_COMPARED_PARTS, parts, key=lambda part: (len(part), part))
        new = [part for part in longest if part not in asked][:MAX_PARTS]
        self.parts = list(dict.fromkeys(form for part in new for form in (part, json.dumps(part)[1:-1])))

    def is_quoted(self, texts: Collection[str], joined: str) -> bool:
        """Return True if one of `texts` equals the reply, or if `joined`, the concatenation of `texts`, contains a part
        of the reply."""
        for part in self.parts:
            if part in joined:
                return True
        return bool(self._text) and self._text in texts


def quoting_turns(session: SegmentedSession, replies: Collection[int]) -> dict[int, int]:
    """Find which turns in `replies` have a reply that a later request quotes. Returns a dictionary from each of these
    turns to the first turn whose request quotes the reply.

    A message quotes a reply if the message equals the reply, or contains a part of the reply that was not in the
    reply's own request. A part is a line or a JSON string of at least QUOTE_LENGTH characters. Messages that are
    replies of the session are not searched. The comparison ignores case.
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
    """Yield the parts of a reply that have at least QUOTE_LENGTH characters: lines of its text and of its tool calls'
    arguments."""
    yield from _parts(reply.content)
    for call in reply.tool_calls:
        yield from _parts(call.arguments)


def _parts(text: str) -> Iterator[str]:
    """Yield the lines of a text that have at least QUOTE_LENGTH characters. If the text is JSON, yields the lines of
    its strings."""
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
