"""The record of a sandbox's plain HTTP requests, and its replay.

A record is a file of JSON lines. It has only requests without a body and without credentials. Tunnels (HTTPS) are not
recorded, because the proxy cannot read them. Invariants: a replay reaches no server; a record, including replies that
are not complete yet, has a bounded size.
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
"""Maximum bytes of the URLs and the replies of one record. Encoded, they fit into one artifact."""
LINE_BYTES = 256
"""Bytes counted for a line of a record, in addition to its URL and its reply."""
MAX_FILE = 64 << 20


class RecordedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a record. `reply` is the whole reply, with its head. A line whose `reply` is None means that replies
    are missing because the record was full."""

    phase: Phase
    method: str = ""
    url: str = ""
    reply: bytes | None = None

    @property
    def size(self) -> int:
        """The bytes that are counted for the line."""
        return LINE_BYTES + len(self.url) + len(self.reply or b"")


class NetworkRecord:
    """Keeps the replies of one sandbox. `phase` returns the current phase."""

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
        """Record that a reply is missing."""
        if not self._full and (phase := self._phase()) is not None:
            self._full = True
            self.replies.append(RecordedReply(phase))


class NetworkReplay:
    """Replies to requests from a record: the n-th request for a URL in a phase gets the n-th reply. If there are more
    requests than replies, the further requests get the last reply."""

    def __init__(self, replies: list[RecordedReply], phase: Callable[[], Phase | None]) -> None:
        self._phase = phase
        self._full = any(one.reply is None for one in replies)
        self._replies: defaultdict[tuple[Phase, str, str], list[bytes]] = defaultdict(list)
        for one in replies:
            if one.reply is not None:
                self._replies[one.phase, one.method, one.url].append(one.reply)

    @classmethod
    def read(cls, file: Path, phase: Callable[[], Phase | None]) -> NetworkReplay:
        """Read a record. Blocks. Raises RuntimeUnavailable."""
        try:
            with file.open("rb") as lines:
                data = lines.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise RuntimeUnavailable(f"{file.name} is larger than any record of a network")
            return cls([msgspec.json.decode(line, type=RecordedReply) for line in data.splitlines()], phase)
        except (OSError, msgspec.MsgspecError) as error:
            # Unlike `str(error)`, strerror does not contain the path of the folder.
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
            # The timeline shows this text, and a query may hold a secret.
            shown = _url(request).partition("?")[0][:300]
            raise NotRecorded(f"the record has no reply to {request.method} {shown} with this query{full}")
        return found.pop(0) if len(found) > 1 else found[0]

    def keeps(self, request: RequestHead) -> bool:
        return False

    def reserve(self, size: int) -> bool:
        return False

    def keep(self, request: RequestHead, reply: bytes) -> None:
        """Keep nothing."""


class NotRecorded(NotAllowed):
    """The record has no reply to a request."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.status = "504 Gateway Timeout"


def record_file(records: Iterable[NetworkRecord]) -> bytes:
    """Return one file with the records of all sandboxes of a session. The records are cut at MAX_BYTES."""
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
