"""What a session's strands are told apart by."""

from __future__ import annotations

from outrider.messages import Message, Role
from outrider.tokens.branches.segments import Session


def test_an_empty_reply_is_no_sign_of_a_history() -> None:
    """A model that only thinks says nothing; clients send that back as empty text, in any conversation."""
    empty = Message(role=Role.ASSISTANT, content="")
    spoken = Message(role=Role.ASSISTANT, content="Done.")
    session = Session([])
    assert session.said([empty, Message(role=Role.USER, content="Done.")]) == set()
    assert session.said([empty, spoken]) == session.said([spoken]) != set()
