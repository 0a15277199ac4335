"""The timeline of an attempt: what happened, and when. Model calls that became turns are left out, because a turn
already has its own times.

An attempt adds entries to a `Timeline`, and the attempt's node stores new entries from time to time. All times are
seconds since the epoch by the node's wall clock, like those of turns. Invariants: a timeline has a bounded number of
entries of each kind, and counts the entries that it leaves out; the text of an entry has at most MOST_CHARACTERS
characters, and contains none of the task's secrets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from outrider.errors import OutriderError, storable
from outrider.redaction import redacted

MOST_ENTRIES = 1000
"""Maximum number of entries of each kind. A limit is needed, because an agent can start any number of commands and
processes."""
MOST_CHARACTERS = 200
"""Maximum number of characters of an entry's name."""
MOST_BYTES = 8 << 20
"""Maximum bytes of a `TimelinePart`. A part of this size has room for the maximum number of entries of every kind, each
with the longest text."""
MOST_PARTS = 500
"""Maximum number of `TimelinePart`s that are stored in one call."""


class EntryKind(StrEnum):
    STAGE = "stage"  # one stage of the attempt, as in `StageSeconds`
    SANDBOX = "sandbox"  # from the request for a sandbox until it is ready, its prepare steps included
    COMMAND = "command"  # a command or the input of a live shell, run by the tool server
    PROCESS = "process"  # a process in the sandbox
    FAILED_CALL = "failed_call"  # a model call whose client got an error
    NETWORK = "network"  # the requests of a sandbox to one server in one phase
    STORED = "stored"  # the times at which turns were stored
    LEFT_OUT = "left_out"  # the numbers of entries that were left out, by kind


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event or an activity. `number` identifies the entry in the timeline: a later entry with the same number
    replaces it. `end` is None while the activity goes on. `data` has further values, which depend on the kind."""

    number: int
    kind: EntryKind
    name: str
    start: float
    end: float | None = None
    data: dict[str, Any] = {}


class TimelinePart(msgspec.Struct, frozen=True, kw_only=True):
    """Timeline entries of an attempt, to be stored together. `entries` is a list of `Entry` in MessagePack. `part` is
    the part's number in the attempt. The store ignores a part whose number it already has."""

    session_id: str
    attempt: int
    part: int
    entries: Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]


class Timeline:
    """Collects the timeline entries of one attempt. `secrets` are texts that no entry may contain. The numbers of
    entries and of parts start at `first`. If an attempt has two timelines, the numbers of the two must not overlap."""

    def __init__(
        self,
        session_id: str,
        attempt: int,
        *,
        secrets: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        first: int = 0,
    ) -> None:
        self._session_id = session_id
        self._attempt = attempt
        self._secrets = secrets
        self._clock = clock
        self._counts: Counter[EntryKind] = Counter()
        self._entries = self._parts = first
        self._open: dict[int, Entry] = {}
        """Entries without an end, by number."""
        self._changed: dict[int, Entry] = {}
        """Entries to store, by number."""
        self._stored: dict[str, float] = {}
        """When each turn was stored, for the turns since the last part. The keys are `MODEL/INDEX`: the frozen model,
        or "" for the policy, and the turn's index."""
        self._left_out: Counter[EntryKind] = Counter()
        self._left_out_changed = False

    def begin(self, kind: EntryKind, name: str, **data: Any) -> int:
        """Add an entry for an activity that begins now. Returns the entry's number, to be passed to `end`."""
        return self.add(kind, name, self._clock(), None, **data)

    def end(self, number: int, *, at: float | None = None, **data: Any) -> None:
        """Set the end of an entry to `at` (default: now). Does nothing if there is no open entry with this number."""
        if (entry := self._open.pop(number, None)) is not None:
            end = self._clock() if at is None else at
            self._changed[number] = msgspec.structs.replace(entry, end=end, data=entry.data | data)

    def update(self, number: int, **data: Any) -> None:
        """Change the data of an open entry (one without an end)."""
        if (entry := self._open.get(number)) is not None:
            self._changed[number] = self._open[number] = msgspec.structs.replace(entry, data=entry.data | data)

    def rename(self, number: int, name: str) -> None:
        """Change the name of an open entry."""
        if (entry := self._open.get(number)) is not None:
            self._changed[number] = self._open[number] = msgspec.structs.replace(entry, name=self._clean(name))

    def add(self, kind: EntryKind, name: str, start: float, end: float | None, **data: Any) -> int:
        """Add an entry. Returns the entry's number, or -1 if the entry is left out because there are too many entries
        of its kind."""
        self._counts[kind] += 1
        if self._counts[kind] > MOST_ENTRIES:
            self._left_out[kind] += 1
            self._left_out_changed = True
            return -1
        number = self._entries
        self._entries += 1
        entry = Entry(number, kind, self._clean(name), start, end, data)
        if end is None:
            self._open[number] = entry
        self._changed[number] = entry
        return number

    def note_failed_call(self, error: OutriderError, began: float, *, action: str, dialect: str, status: int) -> None:
        """Add an entry for a model call that began at the time `began` and failed now. `action` is the kind of request,
        such as "generate", and `status` is the HTTP status of the reply."""
        about = {"action": action, "dialect": dialect, "status": status, "message": self._clean(error.message)}
        self.add(EntryKind.FAILED_CALL, error.code, began, self._clock(), **about)

    def note_stored(self, index: int, model: str | None) -> None:
        """Record that a turn was stored now. `model` is the frozen model that sampled the turn, or None for the
        policy."""
        self._stored[f"{model or ''}/{index}"] = self._clock()

    def take(self) -> TimelinePart | None:
        """Return the entries that changed since the last call, as a part to store; None if nothing changed."""
        found: list[Entry] = list(self._changed.values())
        if self._stored:
            times: Iterable[float] = self._stored.values()
            found.append(Entry(-1, EntryKind.STORED, "", min(times), None, dict(self._stored)))
        if self._left_out_changed:
            counts = {kind.value: count for kind, count in self._left_out.items()}
            found.append(Entry(-1, EntryKind.LEFT_OUT, "", self._clock(), None, counts))
        if not found:
            return None
        self._changed.clear()
        self._stored.clear()
        self._left_out_changed = False
        part = TimelinePart(
            session_id=self._session_id,
            attempt=self._attempt,
            part=self._parts,
            entries=msgspec.msgpack.encode(found),
        )
        self._parts += 1
        return part

    def _clean(self, text: str) -> str:
        return redacted(storable(text[: 4 * MOST_CHARACTERS]), self._secrets)[:MOST_CHARACTERS]
