"""Records the plain HTTP requests of a sandbox with their replies, and replays the replies later.

A record is a file of JSON lines. It contains only requests without a body and without credentials. It contains no HTTPS
requests, because the proxy cannot read the content of a tunnel. Invariants: a replay contacts no server; the size of a
record is bounded, even while replies arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from outrider.destinations import Phase
from outrider.errors import RuntimeUnavailable
from outrider.sandbox.network.requests import NotAllowed, RequestHead

MAX_BYTES = 20 << 20
"""Maximum size of one record: its URLs, its replies, and LINE_BYTES for each line. Its file then fits into one
artifact."""
LINE_BYTES = 256
"""Bytes that each line counts towards MAX_BYTES, in addition to its URL and its reply."""
MAX_FILE = 64 << 20


class RecordedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a record. `reply` is the whole reply with its head. A line with `reply` None says that the record was
    full and lacks replies."""

    phase: Phase
    method: str = ""
    url: str = ""
    reply: bytes | None = None

    @property
    def size(self) -> int:
        """The number of bytes that this line counts towards MAX_BYTES."""
        return LINE_BYTES + len(self.url) + len(self.reply or b"")


class NetworkRecord:
    """An `Archive` that collects the replies to one sandbox's requests. `phase` returns the sandbox's current phase."""

    def __init__(self, phase: Callable[[], Phase | None]) -> None:
        self._phase = phase
        self._left = MAX_BYTES
        self._full = False
        self.replies: list[RecordedReply] = []

    def replay(self, request: RequestHead) -> bytes | None:
        return None

    def keeps(self, request: RequestHead) -> bool:
        return not request.length and not request.personal

    def reserve(self, size: int) -> bool:
        if size > self._left:
            self._skip()
            return False
        self._left -= size
        return True

    def keep(self, request: RequestHead, reply: bytes) -> None:
        phase, line = self._phase(), RecordedReply(Phase.AGENT, request.method, _url(request), reply)
        if phase is not None and self.reserve(line.size - len(reply)):
            self.replies.append(msgspec.structs.replace(line, phase=phase))

    def _skip(self) -> None:
        """Add one line which says that replies are missing."""
        if not self._full and (phase := self._phase()) is not None:
            self._full = True
            self.replies.append(RecordedReply(phase))


class NetworkReplay:
    """An `Archive` that replies from a record. In each phase, the n-th request for a URL gets the n-th recorded reply
    to that URL. Further requests get the last one."""

    def __init__(self, replies: list[RecordedReply], phase: Callable[[], Phase | None]) -> None:
        self._phase = phase
        self._full = any(one.reply is None for one in replies)
        self._replies: defaultdict[tuple[Phase, str, str], list[bytes]] = defaultdict(list)
        for one in replies:
            if one.reply is not None:
                self._replies[one.phase, one.method, one.url].append(one.reply)

    @classmethod
    def read(cls, file: Path, phase: Callable[[], Phase | None]) -> NetworkReplay:
        """Read a record from its file. Blocks. Raises RuntimeUnavailable if the file is not a readable record."""
        try:
            with file.open("rb") as lines:
                data = lines.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise RuntimeUnavailable(f"{file.name} is larger than any record of a network")
            return cls([msgspec.json.decode(line, type=RecordedReply) for line in data.splitlines()], phase)
        except (OSError, msgspec.MsgspecError) as error:
            # Keep the path of the file out of the message: `str(error)` would contain it.
            why = error.strerror if isinstance(error, OSError) else error
            raise RuntimeUnavailable(
                f"{file.name} is no record of a network: {why}",
                hint="a session with task.runtime.network.record keeps one as its artifact outrider:network.jsonl",
            ) from error

    def replay(self, request: RequestHead) -> bytes | None:
        phase = self._phase()
        if request.tunnel:
            raise NotRecorded("a replay has no tunnels (HTTPS): use http:// addresses, or a mirror such as mirror:pip")
        found = None if phase is None else self._replies.get((phase, request.method, _url(request)))
        if request.length or not found:
            full = "; the record was full" if self._full else ""
            # Leave the query out: it may contain a secret, and the session's timeline shows this message.
            shown = _url(request).partition("?")[0][:300]
            raise NotRecorded(f"the record has no reply to {request.method} {shown} with this query{full}")
        return found.pop(0) if len(found) > 1 else found[0]

    def keeps(self, request: RequestHead) -> bool:
        return False

    def reserve(self, size: int) -> bool:
        return False

    def keep(self, request: RequestHead, reply: bytes) -> None:
        """Do nothing, because a replay records no replies."""


class NotRecorded(NotAllowed):
    """A request whose reply is not in the record."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.status = "504 Gateway Timeout"


def record_file(records: Iterable[NetworkRecord]) -> bytes:
    """Join the records of all sandboxes of a session into the content of one file. Replies beyond MAX_BYTES are left
    out."""
    lines, left = [], MAX_BYTES
    for one in (reply for record in records for reply in record.replies):
        left -= one.size
        if left < 0:
            lines.append(msgspec.json.encode(RecordedReply(one.phase)))
            break
        lines.append(msgspec.json.encode(one))
    return b"".join(line + b"\n" for line in lines)


def _url(request: RequestHead) -> str:
    return f"http://{request.origin}{request.path}"
