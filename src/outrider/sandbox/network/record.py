"""The record of a sandbox's plain HTTP requests, and its replay.

A record is a file of JSON lines. Only requests without a body are recorded and replayed. Tunnels (HTTPS) are not
recorded, because the proxy cannot read them. Invariant: a replay reaches no server.
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
"""Maximum bytes of the replies of one record. Encoded, they fit into one artifact."""
MAX_FILE = 64 << 20


class RecordedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a record. `reply` is the whole reply, with its head. A line whose `reply` is None means that replies
    are missing because the record was full."""

    phase: Phase
    method: str = ""
    url: str = ""
    reply: bytes | None = None


class NetworkRecord:
    """Keeps the replies of one sandbox. `phase` returns the current phase."""

    def __init__(self, phase: Callable[[], Phase | None]) -> None:
        self._phase = phase
        self._left = MAX_BYTES
        self._full = False
        self.replies: list[RecordedReply] = []

    def replay(self, request: RequestHead) -> bytes | None:
        return None

    def room(self) -> int:
        return self._left

    def keep(self, request: RequestHead, reply: bytes) -> None:
        if request.length or (phase := self._phase()) is None:
            return
        if len(reply) > self._left:
            self.skip()
            return
        self._left -= len(reply)
        self.replies.append(RecordedReply(phase, request.method, _url(request), reply))

    def skip(self) -> None:
        """Note that a reply is missing."""
        if not self._full and (phase := self._phase()) is not None:
            self._full = True
            self.replies.append(RecordedReply(phase))


class NetworkReplay:
    """Answers requests from a record: the n-th request for a URL in a phase gets the n-th reply, and later requests the
    last one."""

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
            raise RuntimeUnavailable(
                f"{file.name} is no record of a network: {error}",
                hint="a session with task.runtime.network.record keeps one as its artifact outrider:network.jsonl",
            ) from error

    def replay(self, request: RequestHead) -> bytes | None:
        phase = self._phase()
        if request.tunnel:
            raise NotRecorded("a replay has no tunnels (HTTPS): use http:// addresses, or a mirror such as mirror:pip")
        found = None if phase is None else self._replies.get((phase, request.method, _url(request)))
        if request.length or not found:
            full = "; the record was full" if self._full else ""
            raise NotRecorded(f"the record has no reply to {request.method} {_url(request)[:300]}{full}")
        return found.pop(0) if len(found) > 1 else found[0]

    def room(self) -> int:
        return 0

    def keep(self, request: RequestHead, reply: bytes) -> None:
        """Keep nothing."""

    def skip(self) -> None:
        """Note nothing."""


class NotRecorded(NotAllowed):
    """The record has no reply to a request."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.status = "504 Gateway Timeout"


def record_file(records: Iterable[NetworkRecord]) -> bytes:
    """Return the file of the records of a session's sandboxes, within MAX_BYTES of replies."""
    lines, left = [], MAX_BYTES
    for one in (reply for record in records for reply in record.replies):
        left -= len(one.reply or b"")
        if left < 0:
            lines.append(msgspec.json.encode(RecordedReply(one.phase)))
            break
        lines.append(msgspec.json.encode(one))
    return b"".join(line + b"\n" for line in lines)


def _url(request: RequestHead) -> str:
    return f"http://{request.origin}{request.path}"
