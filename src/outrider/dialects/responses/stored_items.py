"""Stores the responses of a session, so that later requests can refer to a response (`previous_response_id`) or to an
item.

Invariant: equal items, and equal beginnings of conversations, are stored once. So storing a response takes memory only
for its new items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from outrider.dialects.base import Memory
from outrider.dialects.reading import decode, quoted, refuse
from outrider.dialects.responses.items import STORED, Item, PlacedItem
from outrider.errors import RequestError

_KEY = "store"
_STRING = msgspec.json.Decoder(str)
_ITEM = msgspec.json.Decoder(Item)

MAX_STORED = 64 << 20
"""Maximum number of bytes stored for a session. Above this limit, everything stored so far is dropped. Only a session
with an unusually large number of new items reaches this limit."""

ENTRY_BYTES = 256
"""Approximate memory of one dictionary entry, in bytes, without the item's JSON."""


class PreviousResponseNotFound(RequestError):
    """The previous response is not stored. Either it was not made in this session, its request had `store: false`, it
    did not finish, or it was dropped at MAX_STORED."""

    code = "previous_response_not_found"


class StoredConversation(NamedTuple):
    """A stored conversation, as a linked list. `item` is the last item. `before` is the conversation before it, or
    None. `digest` identifies the whole list of items."""

    before: StoredConversation | None
    item: Item
    digest: bytes

    def items(self) -> list[Item]:
        found = []
        conversation: StoredConversation | None = self
        while conversation is not None:
            found.append(conversation.item)
            conversation = conversation.before
        return found[::-1]


class ResponseStore:
    """The stored responses of one session. A request keeps a reference to its own conversation, so that `keep` can
    store the response even if the store has dropped everything in the meantime."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredConversation] = {}
        """The conversation up to and including a response, by response id."""
        self._references: dict[str, Item] = {}
        self._items: dict[bytes, Item] = {}
        self._conversations: dict[bytes, StoredConversation] = {}
        self._size = 0

    def conversation(
        self, previous: str | None, items: Sequence[Item], *, stored: bool
    ) -> tuple[list[PlacedItem], StoredConversation | None]:
        """Return two values. The first has all items of a request's conversation: those of the previous response's
        conversation, then the new items. References are replaced by the items they refer to. The second value is the
        stored conversation, for `keep`, or None if `stored` is False. Raises RequestError."""
        placed: list[PlacedItem] = []
        known: StoredConversation | None = None
        if previous is not None:
            known = self._responses.get(previous)
            if known is None:
                # Clients check for OpenAI's message and code, and then send the whole conversation.
                raise PreviousResponseNotFound(
                    f"Previous response with id {quoted(previous)} not found.", field="previous_response_id"
                )
            placed = [PlacedItem(item, item.kind(), STORED) for item in known.items()]
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
            if stored:
                known = self._extended(known, item)
                item = known.item
            placed.append(PlacedItem(item, kind, position))
        return placed, known if stored else None

    def keep(self, conversation: StoredConversation | None, response_id: str, output: Iterable[dict[str, Any]]) -> None:
        """Store a response. `conversation` is the conversation before the response. `output` has the response's own
        items, at least one."""
        references: dict[str, Item] = {}
        for item in output:
            stored = _ITEM.decode(msgspec.json.encode(item))
            conversation = self._extended(conversation, stored)
            references[_STRING.decode(stored.id)] = conversation.item
        assert conversation is not None
        self._make_room(ENTRY_BYTES * (1 + len(references)))
        self._references |= references
        self._responses[response_id] = conversation

    def _extended(self, before: StoredConversation | None, item: Item) -> StoredConversation:
        """Return the stored conversation that is `before` plus `item`. Stores it if necessary."""
        raw = b",".join(item.pieces())
        key = xxhash.xxh3_128_digest(raw)
        digest = key if before is None else xxhash.xxh3_128_digest(before.digest + key)
        known = self._conversations.get(digest)
        if known is None:
            own = self._items.get(key)
            if own is None:
                self._make_room(len(raw) + ENTRY_BYTES)
                own = self._items[key] = item.copy()
            self._make_room(ENTRY_BYTES)
            known = self._conversations[digest] = StoredConversation(before, own, digest)
        return known

    def _make_room(self, size: int) -> None:
        """Count `size` bytes that are about to be stored. Above MAX_STORED, drop everything stored so far."""
        self._size += size
        if self._size > MAX_STORED:
            self._responses.clear()
            self._references.clear()
            self._items.clear()
            self._conversations.clear()
            self._size = size


def store_of(memory: Memory) -> ResponseStore:
    """Return the session's store. The session's first request creates it."""
    store: ResponseStore = memory.setdefault(_KEY, ResponseStore())
    return store
