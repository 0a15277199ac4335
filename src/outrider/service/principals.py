"""The callers of the control API, and the rights of their roles.

`tokens.py` authenticates callers. `Store.create_group` refuses a group that exceeds the caller's `max_queued`.
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
"""For each role of a token, the roles whose rights a caller with that token has."""


class Principal(NamedTuple):
    """A caller of the API. `name` and `role` are those of its token. `tenant` owns the caller's groups. `max_queued` is
    the maximum number of sessions that the token may have queued or running (None: unlimited). `expires` is the time at
    which the token expires, in seconds since the epoch (None: never)."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None = None
    expires: float | None = None

    @property
    def sees(self) -> str | None:
        """The tenant whose objects the caller may see and change. None stands for all tenants."""
        return None if self.may("admin") else self.tenant

    def may(self, role: Role) -> bool:
        return role in ALLOWED[self.role]


LOCAL = Principal("local", "admin", OPERATOR_TENANT)
"""The caller of every request if the service has no token. Such a service listens on this machine only."""
OPERATOR = Principal("operator", "admin", OPERATOR_TENANT)
"""The caller whose token is the one in the settings."""
