"""Requests reconstructed from the stored turns of an attempt: their messages, and their order of arrival.

A turn has only its request's added messages, and turns are numbered in the order in which their calls ended. This
module reverses both, to restore a tree from turns. Invariant: to the model, the messages of a restored request equal
the client's messages. The replies among them are the recorded replies, not the client's echoes of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from outrider.errors import ServiceError
from outrider.messages import Message, ToolSpec
from outrider.trajectory import Turn


def cannot_go_on(reason: str) -> ServiceError:
    return ServiceError(
        f"the attempt cannot go on from its stored turns: {reason}",
        hint="the session is tried again from its start, if it has attempts left",
    )


def check_complete(turns: Sequence[Turn]) -> None:
    """Raise ServiceError unless all turns up to the last are present, and each turn continues an earlier turn with a
    reply, or none."""
    for index, turn in enumerate(turns):
        if turn.index != index:
            raise cannot_go_on(f"turn {index} is not stored, but turn {turn.index} is")
        if any(known is not None and not 0 <= known < index for known in (turn.parent, turn.forked_from)):
            raise cannot_go_on(f"turn {index} goes on from a turn that is not before it")
        if turn.parent is not None and turns[turn.parent].reply is None:
            raise cannot_go_on(f"turn {index} goes on from turn {turn.parent}, which has no reply")


def arrivals(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """For each turn, yield the turns whose requests arrived between the recording of the previous turn and of this
    turn, in order of arrival."""
    by_time = sorted(turns, key=lambda turn: (turn.timings.received, turn.index))
    if any(earlier.timings.finished > later.timings.finished for earlier, later in pairwise(turns)):
        by_time = []  # the clock was set back, so its order is wrong: each call counts as arrived when it ended
    waiting, arrived = deque(by_time), set[int]()
    for turn in turns:
        came = []
        while waiting and waiting[0].timings.received < turn.timings.finished:
            other = waiting.popleft()
            # A request arrived after the turns that it joins were recorded, whatever the clock shows.
            known = max((at for at in (other.parent, other.forked_from) if at is not None), default=-1)
            if known < turn.index and other.index not in arrived:
                came.append(other)
        if turn.index not in arrived and turn not in came:
            came.append(turn)
        arrived |= {other.index for other in came}
        yield came


class StoredRequest:
    """The request of a stored turn, as `WireMessages`: the messages of its parent's request, the parent's reply, and
    the turn's own added messages. Nothing is copied, so many long requests fit in memory."""

    def __init__(self, turns: Sequence[Turn], turn: Turn) -> None:
        path = [turn]
        while (parent := path[-1].parent) is not None:
            path.append(turns[parent])
        path.reverse()
        self._path = path
        # The position at which each turn's own messages begin. The previous turn's reply is at the position before.
        self._starts = list(accumulate((len(one.messages) + 1 for one in path[:-1]), initial=0))

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._path[0].tool_specs

    @property
    def tools_raw(self) -> bytes:
        """Bytes that identify the tools, as `raw` does for a message."""
        return b"tools of turn %d" % self._path[0].index

    def __len__(self) -> int:
        return self._starts[-1] + len(self._path[-1].messages)

    def raw(self, index: int) -> bytes:
        return b"message %d of turn %d" % (index, self._path[self._place(index)].index)

    def head(self, count: int) -> bytes:
        return self.raw(count - 1)  # the last message determines all messages before it

    def size(self, index: int) -> int:
        return size_of(self.parse(index))

    def parse(self, index: int) -> Message:
        place = self._place(index)
        turn, at = self._path[place], index - self._starts[place]
        if at < len(turn.messages):
            return turn.messages[at]
        assert turn.reply is not None
        return turn.reply

    def _place(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def size_of(message: Message) -> int:
    """Characters of a message's texts."""
    return (
        len(message.content)
        + len(message.reasoning or "")
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    )
