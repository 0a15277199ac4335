"""A campaign's service with a planted bug: it waits on and on for the attempts of a node that is gone."""

from __future__ import annotations

from campaign import service
from outrider.nodes.remote_node import NodeConnection

lose_attempts = NodeConnection.lose_attempts


def keep_attempts(self: NodeConnection) -> None:
    self._attempts = {}
    lose_attempts(self)


def main(*arguments: str) -> None:
    NodeConnection.lose_attempts = keep_attempts  # type: ignore[method-assign]
    service.main(*arguments)
