"""Histories that go on behind another head: with other tools, or another system prompt.

Pure. A request's *head* is its tools and the system messages at its beginning, its *history* the messages after them.
An agent that is resumed with one tool fewer sends the same history behind another head; so does one agent that hands
over to another. Invariant: what `Histories` finds is a turn whose whole history the request quotes, its reply included.
"""

from __future__ import annotations

import msgspec

from outrider.messages import Role
from outrider.tokens.tree.canonical import MessageKey, extend
from outrider.tokens.tree.nodes import PromptNode, TurnNode, call_ids_agree, reasoning_agrees
from outrider.tokens.tree.request_index import Request
from outrider.trajectory import ForkCause


class Elsewhere(msgspec.Struct, frozen=True):
    """`turn` is of another head, and accounts for the request's first `covered` messages but for the head."""

    turn: TurnNode
    covered: int
    cause: ForkCause


class Histories:
    """A session's turns by their histories, whatever their heads."""

    def __init__(self) -> None:
        self._turns: dict[bytes, list[TurnNode]] = {}
        self._waiting: list[TurnNode] = []

    def add(self, turn: TurnNode) -> None:
        if turn.said is not None and turn.prompt.messages > turn.prompt.lead:
            self._waiting.append(turn)

    def _index(self) -> None:
        """Only for requests that quote what is not recorded as theirs: most sessions have none."""
        for turn in self._waiting:
            if turn.said is not None:
                self._turns.setdefault(extend(turn.prompt.history, turn.said), []).append(turn)
        self._waiting.clear()

    def find(self, request: Request) -> Elsewhere | None:
        """The turn with the longest history that the request's begins with, where that is longer than what is recorded
        behind the request's own head. Of several that read alike it is the newest whose call ids the request has, else
        the newest."""
        if not request.rewritten:
            return None
        self._index()
        path, ends = b"", []
        for at, key in enumerate(request.keys[request.lead :], request.lead):
            path = extend(path, key.body)
            if at >= request.covered and key.role is Role.ASSISTANT and path in self._turns:
                ends.append((at + 1, path))
        for covered, end in reversed(ends):
            alike = [(turn, _keys_behind(turn, request)) for turn in reversed(self._turns[end])]
            found = [(turn, keys) for turn, keys in alike if reasoning_agrees(turn, keys, None)]
            if found:
                same = [turn for turn, keys in found if call_ids_agree(turn, keys)]
                turn = same[0] if same else found[0][0]
                return Elsewhere(turn, covered, _cause(turn.prompt, request))
        return None


def _keys_behind(turn: TurnNode, request: Request) -> list[MessageKey]:
    """The request's keys, with the history where the turn has it."""
    lead = turn.prompt.lead
    if lead == request.lead:
        return request.keys
    return [*(request.keys[:1] * lead), *request.keys[request.lead :]]


def _cause(before: PromptNode, request: Request) -> ForkCause:
    if before.system == request.system():
        return ForkCause.TOOLS_CHANGED
    return ForkCause.SYSTEM_CHANGED if before.tools == request.tools_digest else ForkCause.TOOLS_AND_SYSTEM_CHANGED


def history_begin(turn: TurnNode) -> tuple[PromptNode, int | None]:
    """The prompt with which the turn's history began, rendered whole; and, where the turn's ids do not begin with that
    prompt's, how many ids stand before the history."""
    prompt = turn.prompt
    while prompt.parent is not None:
        prompt = prompt.parent.prompt
    return (prompt.splice.rendered, prompt.splice.head) if prompt.splice is not None else (prompt, None)
