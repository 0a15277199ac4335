"""What a session's segments are told apart by."""

from __future__ import annotations

from outrider.messages import Message, Role
from outrider.tokens.branches.segments import SegmentedSession


def test_an_empty_reply_is_no_sign_of_a_history() -> None:
    """A model that only thinks says nothing; clients send that back as empty text, in any conversation."""
    empty = Message(role=Role.ASSISTANT, content="")
    spoken = Message(role=Role.ASSISTANT, content="Done.")
    session = SegmentedSession([])
    assert session.replies_among([empty, Message(role=Role.USER, content="Done.")]) == set()
    assert session.replies_among([empty, spoken]) == session.replies_among([spoken]) != set()
