"""Outrider: agent rollouts as a service for reinforcement learning."""

from __future__ import annotations

TYPE_CHECKING = False  # not typing.TYPE_CHECKING: importing typing is slow, and a Ctrl-C meanwhile shows a traceback
if TYPE_CHECKING:
    from outrider.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    """Import the client classes only when they are used: many programs import this package without needing them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.client import client

    return getattr(client, name)
