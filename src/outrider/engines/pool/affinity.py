"""Which engine each session keeps to, and which one a new session gets.

It knows no request and never waits. Invariant: a member's `sessions` and `assigned_tokens` are the count and
the sum of the seats that point at it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engines.pool.load import LoadHeap
from outrider.engines.pool.member import Member


@dataclass
class _Seat:
    member: Member
    tokens: int = 0


class Seats:
    """The seating of one pool. Engines that take tokens and engines that take messages are apart: a
    generation meant for one cannot be served by the other."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._members: dict[str, Member] = {}
        self._heaps = {True: LoadHeap(), False: LoadHeap()}

    def pick(self, session_key: str, kinds: tuple[bool, ...]) -> Member | None:
        """The session's own engine while it serves, else the least loaded one, which becomes its own. A suspect one is
        given only where there is no other of its kind.

        `kinds` says in order of preference whether the engine takes tokens. None when there is none.
        """
        seat = self._seats.get(session_key)
        if seat is not None and seat.member.serves and seat.member.takes_tokens in kinds:
            return seat.member
        for kind in kinds:
            if (name := self._heaps[kind].least()) is not None:
                self._move(session_key, self._members[name])
                return self._members[name]
        return None

    def trusts(self, kind: bool) -> bool:
        """Whether a session that takes a seat now gets an engine of that kind that is not suspect."""
        name = self._heaps[kind].least()
        return name is not None and self._members[name].suspect is None

    def refresh(self, member: Member) -> None:
        """Call after anything that changes the member's load or whether it takes sessions."""
        heap = self._heaps[member.takes_tokens]
        if member.takes_sessions:
            self._members[member.name] = member
            heap.put(member.name, member.load)
        elif self._members.get(member.name) is member:  # its name may be another's by now
            del self._members[member.name]
            heap.drop(member.name)

    def hold(self, session_key: str, member: Member, tokens: int) -> None:
        """The session's context is now so many tokens long, if it still keeps to that engine."""
        seat = self._seats.get(session_key)
        if seat is not None and seat.member is member:
            member.assigned_tokens += tokens - seat.tokens
            seat.tokens = tokens
            self.refresh(member)

    def release(self, session_key: str) -> None:
        """The session is over. Idempotent."""
        seat = self._seats.pop(session_key, None)
        if seat is not None:
            seat.member.sessions -= 1
            seat.member.assigned_tokens -= seat.tokens
            self.refresh(seat.member)

    def leave(self, session_key: str, member: Member) -> None:
        """The session does not keep to that engine any more, if it did."""
        seat = self._seats.get(session_key)
        if seat is not None and seat.member is member:
            self.release(session_key)

    def _move(self, session_key: str, member: Member) -> None:
        self.release(session_key)
        self._seats[session_key] = _Seat(member)
        member.sessions += 1
        self.refresh(member)
