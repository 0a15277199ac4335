"""A campaign's service with a planted bug: what it wrote to a connection that breaks it takes for arrived."""

from __future__ import annotations

from campaign import service
from outrider.nodes.resumable import ResumableSocket

acknowledge = ResumableSocket._acknowledge


def main(*arguments: str) -> None:
    ResumableSocket._acknowledge = lambda self, arrived: acknowledge(self, self._written)  # type: ignore[method-assign]
    service.main(*arguments)
