"""Defines the callers of the control API and the rights of their roles.

`tokens.py` authenticates the caller. `Store.create_group` refuses a group beyond `max_queued`.
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
"""The roles whose rights a caller has, by the role of the caller's token."""


class Principal(NamedTuple):
    """A caller: the name of the token, the role, the tenant that owns the caller's groups, and the maximum number of
    sessions queued or running (None: unlimited)."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None = None

    @property
    def sees(self) -> str | None:
        """The tenant whose objects the caller may see and act on; None for all tenants."""
        return None if self.may("admin") else self.tenant

    def may(self, role: Role) -> bool:
        return role in ALLOWED[self.role]


LOCAL = Principal("local", "admin", OPERATOR_TENANT)
"""The caller of every request while the service has no token. Such a service listens on this machine only."""
OPERATOR = Principal("operator", "admin", OPERATOR_TENANT)
"""The caller who has the token in the settings."""
