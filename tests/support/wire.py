"""The head of a call, for tests that only read its body."""

from __future__ import annotations

from typing import Literal

from outrider.dialects.base import Action, Dialect, RouteTable, WireCall

CALL = WireCall("POST", "/v1/chat/completions")


def action_of(dialect: Dialect, call: WireCall) -> Action | Literal["not served"] | None:
    """The action of a call; None for a call that is outside the dialect."""
    routed = RouteTable([dialect]).find(call)
    return None if routed is None else routed.action or "not served"
