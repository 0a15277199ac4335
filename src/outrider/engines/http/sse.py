"""Parses server-sent events: accepts bytes as they arrive, and returns the payloads of `data:` lines.

Event names, ids and comments are dropped, because no supported engine uses them. Invariant: the payloads do not depend
on how the stream is divided into chunks.
"""

from __future__ import annotations


class SseReader:
    """The parser of one `text/event-stream` response.

    Lines may end in LF, CRLF or CR. If an event has several data lines, they are joined by a newline. An incomplete
    event at the end of the stream is dropped, as the HTML standard requires (section 9.2.6).
    """

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Parse a chunk, and return the payloads of the events that it completes."""
        if chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and not (self._partial or self._data):
            # Engines usually send chunks of whole events with one line each. Splitting such a chunk takes half as long
            # as the general parser below, which also handles line breaks in a payload.
            payloads = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(payloads) and b"\r" not in chunk:
                self._after_cr = False
                return payloads
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        lines = chunk.splitlines()
        ended = chunk.endswith((b"\n", b"\r"))
        self._after_cr = chunk.endswith(b"\r")
        if len(lines) == 1 and not ended:
            self._partial.append(chunk)
            return []
        if self._partial:
            lines[0] = b"".join((*self._partial, lines[0]))
            self._partial = []
        if not ended:
            self._partial.append(lines.pop())
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
