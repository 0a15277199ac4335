"""What a session's responses leave behind for later requests: the items that `previous_response_id` stands for.

It knows no messages and no tokens. Invariant: equal items are kept once, so that storing every response of a
conversation costs its new items and not its length squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

from outrider.dialects.base import Memory
from outrider.dialects.json import decode, refuse, shown
from outrider.dialects.responses.items import STORED, Item, Placed
from outrider.errors import RequestError

_KEY = "store"
_STRING = msgspec.json.Decoder(str)
_ITEM = msgspec.json.Decoder(Item)


MAX_STORED = 64 << 20
"""Bytes of the items that a session's responses keep. When there are more, those so far are forgotten."""


class PreviousResponseNotFound(RequestError):
    """The response was never made in this session, was not stored, or did not finish."""

    code = "previous_response_not_found"


class ResponseStore:
    """The stored responses of one session."""

    def __init__(self) -> None:
        self._responses: dict[str, tuple[Item, ...]] = {}
        self._references: dict[str, Item] = {}
        self._items: dict[bytes, Item] = {}
        self._size = 0

    def conversation(self, previous: str | None, items: Sequence[Item], *, stored: bool) -> list[Placed]:
        """The whole conversation of a request: what the previous response knew and said, then the new items, with
        references followed; those of a request that is to be `stored` as they are kept. Raises RequestError."""
        placed = [] if previous is None else [Placed(item, STORED) for item in self._stored(previous)]
        for position, item in enumerate(items):
            if item.kind() == "item_reference":
                item = self._followed(item, position)
            placed.append(Placed(self._once(item) if stored else item, position))
        return placed

    def keep(self, response_id: str, conversation: Iterable[Placed], output: Iterable[dict[str, Any]]) -> None:
        """Store a response: the conversation before it and the items that it said."""
        said = [_ITEM.decode(msgspec.json.encode(item)) for item in output]
        self._references |= {_STRING.decode(item.id): item for item in said}
        self._responses[response_id] = (*(at.item for at in conversation), *said)

    def _stored(self, response_id: str) -> tuple[Item, ...]:
        found = self._responses.get(response_id)
        if found is None:
            raise PreviousResponseNotFound(
                f"Previous response with id {shown(response_id)} not found.", field="previous_response_id"
            )
        return found

    def _followed(self, item: Item, position: int) -> Item:
        where = f"input[{position}].id"
        if not item.id:
            refuse(where, "is missing")
        wanted = decode(_STRING, item.id, where)
        found = self._references.get(wanted)
        if found is None:
            refuse(where, f"an item {shown(wanted)} is not stored: only items of stored responses can be referred to")
        return found

    def _once(self, item: Item) -> Item:
        raw = item.raw()
        key = xxhash.xxh3_128_digest(raw)
        known = self._items.get(key)
        if known is None:
            self._size += len(raw)
            if self._size > MAX_STORED:
                self._forget()
                self._size = len(raw)
            known = self._items[key] = item.copy()
        return known

    def _forget(self) -> None:
        """Let all go: only a session that sends ever new items comes to this."""
        self._responses.clear()
        self._references.clear()
        self._items.clear()


def store_of(memory: Memory) -> ResponseStore:
    """The session's store, made when it is first asked for."""
    store: ResponseStore = memory.setdefault(_KEY, ResponseStore())
    return store
