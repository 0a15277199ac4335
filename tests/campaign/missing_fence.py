"""A campaign's service with a planted bug: its store accepts turns of any attempt of a session."""

from __future__ import annotations

from campaign import service
from outrider.store import store

UNFENCED = """INSERT INTO turns (session_id, attempt, turn_index, turn)
    SELECT id, ?4, ?1, ?2 FROM sessions WHERE id = ?3
    ON CONFLICT DO NOTHING"""


def main(*arguments: str) -> None:
    store.ADD_TURN = UNFENCED
    service.main(*arguments)
