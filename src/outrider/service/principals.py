"""Who calls the control API, as its routes and the service are told.

It knows no token; `tokens.py` finds out who has sent one.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from outrider.spec import Role

ALLOWED: dict[Role, frozenset[Role]] = {
    "read": frozenset({"read"}),
    "submit": frozenset({"read", "submit"}),
    "node": frozenset({"node"}),
    "admin": frozenset(get_args(Role)),
}
"""By the role of a token, the roles that it may act in."""


class Principal(NamedTuple):
    """Who calls: the name of a token, its role, and how many sessions it may have queued or running (None: any)."""

    name: str
    role: Role
    max_queued: int | None = None

    def may(self, role: Role) -> bool:
        return role in ALLOWED[self.role]


LOCAL = Principal("local", "admin")
"""Everybody on this machine, while the service has no token."""
OPERATOR = Principal("operator", "admin")
"""Whoever has the token of the settings."""
