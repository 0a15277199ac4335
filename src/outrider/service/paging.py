"""A page of results, bounded in bytes as well as in groups.

Groups are added encoded, so that what a page takes in memory is known while it grows. Invariant: the page's
cursor is that of its last group; what did not fit is past it.
"""

from __future__ import annotations

from outrider.schemas import GroupView

PAGE_BYTES = 8 << 20


class EncodedPage:
    """`groups` in the order they were added; `json` is a `wire.ResultsPage` of them."""

    def __init__(self, after: int) -> None:
        self.groups: list[GroupView] = []
        self.cursor = after
        self._bodies: list[bytes] = []
        self._size = 0

    def add(self, group: GroupView, body: bytes, *, room: int) -> bool:
        """Add a group, whose JSON is `body`. Whether there was room for it; there always is for the first."""
        if self.groups and self._size + len(body) > room:
            return False
        self.groups.append(group)
        self._bodies.append(body)
        self._size += len(body)
        self.cursor = group.cursor or self.cursor
        return True

    def json(self) -> bytes:
        return b'{"groups":[%s],"cursor":%d}' % (b",".join(self._bodies), self.cursor)
