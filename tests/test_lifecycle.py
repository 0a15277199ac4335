"""States and their legal moves."""

from __future__ import annotations

from outrider.lifecycle import MOVES, SessionState


def test_every_state_has_its_moves_and_all_lead_to_done() -> None:
    assert set(MOVES) == set(SessionState)
    assert MOVES[SessionState.DONE] == frozenset()
    reachable, frontier = {SessionState.QUEUED}, [SessionState.QUEUED]
    while frontier:
        for state in MOVES[frontier.pop()] - reachable:
            reachable.add(state)
            frontier.append(state)
    assert reachable == set(SessionState)
    assert all(state is SessionState.DONE or SessionState.DONE in MOVES[state] for state in SessionState)
