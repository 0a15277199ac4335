"""Who calls the control API, as its routes and the service are told.

It knows no token; `tokens.py` finds out who has sent one.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from outrider.spec import OPERATOR_TENANT, Role

ALLOWED: dict[Role, frozenset[Role]] = {
    "read": frozenset({"read"}),
    "submit": frozenset({"read", "submit"}),
    "node": frozenset({"node"}),
    "admin": frozenset(get_args(Role)),
}
"""By the role of a token, the roles that it may act in."""


class Principal(NamedTuple):
    """Who calls: the name of a token, its role, whose its groups are (the tenant), and how many sessions it may have
    queued or running (None: any)."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None = None

    @property
    def sees(self) -> str | None:
        """The tenant whose things it is shown and may act on; None for everybody's."""
        return None if self.may("admin") else self.tenant

    def may(self, role: Role) -> bool:
        return role in ALLOWED[self.role]


LOCAL = Principal("local", "admin", OPERATOR_TENANT)
"""Everybody on this machine, while the service has no token."""
OPERATOR = Principal("operator", "admin", OPERATOR_TENANT)
"""Whoever has the token of the settings."""
