"""The corpus: sessions of agent programs, call by call with the requests that these programs send, and the true use of
every answer. `tests/tokens/test_confusion.py` compares the uses with the kinds that Outrider decides."""

from . import compactions, flows, hand_overs, helpers, rewritten, side_calls
from .script import CORPUS, Conversation, Session, Use, played

__all__ = [
    "CORPUS",
    "Conversation",
    "Session",
    "Use",
    "compactions",
    "flows",
    "hand_overs",
    "helpers",
    "played",
    "rewritten",
    "side_calls",
]
