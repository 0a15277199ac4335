"""A campaign's service with a planted bug: it waits for ever for the attempts of a node that is gone."""

from __future__ import annotations

from campaign import service
from outrider.nodes.calls import LinkCalls

end = LinkCalls.end


def keep_calls(self: LinkCalls) -> None:
    self._pending = {}
    end(self)


def main(*arguments: str) -> None:
    LinkCalls.end = keep_calls  # type: ignore[method-assign]
    service.main(*arguments)
