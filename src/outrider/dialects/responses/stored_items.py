"""The stored responses of a session: the items behind a later `previous_response_id` or item reference.

It handles no messages and no tokens. Invariant: equal input items are kept once, so storing a response costs its new
items and a reference to each earlier item.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

from outrider.dialects.base import Memory
from outrider.dialects.json import decode, quoted, refuse
from outrider.dialects.responses.items import STORED, Item, PlacedItem
from outrider.errors import RequestError

_KEY = "store"
_STRING = msgspec.json.Decoder(str)
_ITEM = msgspec.json.Decoder(Item)

MAX_STORED = 64 << 20
"""Maximum bytes of the input items kept for a session. Above this size all items are dropped. Only a session with ever
new items reaches it."""


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

    def conversation(self, previous: str | None, items: Sequence[Item], *, stored: bool) -> list[PlacedItem]:
        """Return the whole conversation of a request: the previous response's conversation, then the new items, with
        each reference replaced by its item. `stored` is True if the response may be stored. Raises RequestError."""
        placed: list[PlacedItem] = []
        if previous is not None:
            known = self._responses.get(previous)
            if known is None:
                # The message and the code are the API's own: clients check for them and send the whole conversation
                # again.
                raise PreviousResponseNotFound(
                    f"Previous response with id {quoted(previous)} not found.", field="previous_response_id"
                )
            placed = [PlacedItem(item, item.kind(), STORED) for item in known]
        for position, item in enumerate(items):
            kind = item.kind()
            if kind == "item_reference":
                where = f"input[{position}].id"
                if not item.id:
                    refuse(where, "is missing")
                wanted = decode(_STRING, item.id, where)
                found = self._references.get(wanted)
                if found is None:
                    stored_only = "only items of stored responses can be referred to"
                    refuse(where, f"an item {quoted(wanted)} is not stored: {stored_only}")
                item, kind = found, found.kind()
            placed.append(PlacedItem(self._kept_once(item) if stored else item, kind, position))
        return placed

    def keep(self, conversation: Iterable[PlacedItem], response_id: str, output: Iterable[dict[str, Any]]) -> None:
        """Store a response: the conversation before it and its own items."""
        said = [_ITEM.decode(msgspec.json.encode(item)) for item in output]
        self._references |= {_STRING.decode(item.id): item for item in said}
        self._responses[response_id] = (*(at.item for at in conversation), *said)

    def _kept_once(self, item: Item) -> Item:
        """Return the kept copy of the item, made if there is none."""
        raw = b",".join(item.pieces())
        key = xxhash.xxh3_128_digest(raw)
        known = self._items.get(key)
        if known is None:
            self._size += len(raw)
            if self._size > MAX_STORED:
                self._responses.clear()
                self._references.clear()
                self._items.clear()
                self._size = len(raw)
            known = self._items[key] = item.copy()
        return known


def store_of(memory: Memory) -> ResponseStore:
    """The session's store, made at its first request."""
    store: ResponseStore = memory.setdefault(_KEY, ResponseStore())
    return store
