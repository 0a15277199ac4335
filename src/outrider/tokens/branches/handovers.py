"""Which strands go on as the conversation whose history they have, though with other tools or another system prompt.

An agent is resumed with one tool fewer, hands over to another, or is asked for its last answer without tools. A side
call with a question about the history looks alike: it is told by what happened afterwards. Pure; decides no kinds.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.messages import Role
from outrider.tokens.branches.branch_signals import PURPOSES
from outrider.tokens.branches.segments import Session, Strand, history_of, was_seen
from outrider.trajectory import ForkCause, Turn


def goings_on(session: Session, summaries: set[int], label: Callable[[Strand], str]) -> set[int]:
    """The numbers of these strands. `summaries` are the turns that wrote a summary, `label` gives the words of a side
    call."""
    reading = _Handovers(session, summaries, label)
    found = (reading.goes_on(before) for before in session.elsewhere)
    return {strand.number for strand in found if strand is not None}


class _Handovers:
    def __init__(self, session: Session, summaries: set[int], label: Callable[[Strand], str]) -> None:
        self._session = session
        self._summaries = summaries
        self._label = label
        self._until = [turn.index for turn in session.turns]
        """By turns, the last one that what follows goes on to."""
        self._next: dict[int, list[Turn]] = {}
        """By turns, those that go on from it with its own tools and system prompt, and were seen."""
        for turn in reversed(session.turns):
            taken = history_of(turn)
            before = turn.parent if taken is None else taken
            if before is not None:
                self._until[before] = max(self._until[before], self._until[turn.index])
            if taken is None and turn.parent is not None and self._was_used(turn):
                self._next.setdefault(turn.parent, []).append(turn)

    def _was_used(self, turn: Turn) -> bool:
        return turn.index in self._session.gone_on or (was_seen(turn) and turn.index not in self._summaries)

    def goes_on(self, before: int) -> Strand | None:
        """Of the strands that have the history of the turn `before`, the one in which its conversation goes on; None
        where it ends, or goes on without them."""
        turn = self._session.turns[before]
        may = [strand for strand in self._session.elsewhere[before] if self._may_go_on(strand, turn)]
        replied = [strand for strand in may if self._is_replied_to(strand)]
        if not may:
            return None
        *others, last = replied or may
        rivals = [*self._next.get(before, []), *(other.head for other in others if replied)]
        ended = all(self._until[rival.index] < last.head.index for rival in rivals)
        return last if ended and (replied or not rivals) else None

    def _may_go_on(self, strand: Strand, before: Turn) -> bool:
        """Whether it is the work of the same agent, as far as its client says, and no question about the history."""
        head = strand.head
        if (head.agent_id, head.parent_agent_id) != (before.agent_id, before.parent_agent_id):
            return False
        if head.purpose != before.purpose and (head.purpose or "").lower() in PURPOSES:
            return False
        if self._is_replied_to(strand):
            return True
        return not self._is_question(strand) and all(turn.index not in self._summaries for turn in strand.turns)

    def _is_replied_to(self, strand: Strand) -> bool:
        return any(turn.index in self._session.gone_on for turn in strand.turns)

    def _is_question(self, strand: Strand) -> bool:
        """Whether it asks something, in the words of a side call, of a model that is not the agent by its system prompt
        or cannot do what the agent can."""
        head = strand.head
        if head.messages[-1].role is Role.TOOL or (head.tools and head.cause is not ForkCause.TOOLS_AND_SYSTEM_CHANGED):
            return False
        return bool(self._label(strand))
