"""The request line of a call, for tests that depend only on the body."""

from __future__ import annotations

from typing import Literal

from outrider.dialects.base import Action, Dialect, RouteTable, WireCall

CALL = WireCall("POST", "/v1/chat/completions")


def action_of(dialect: Dialect, call: WireCall) -> Action | Literal["not served"] | None:
    """Return the action of a call, "not served" for a call of the dialect without an action, or None for a call outside
    the dialect."""
    routed = RouteTable([dialect]).find(call)
    return None if routed is None else routed.action or "not served"
