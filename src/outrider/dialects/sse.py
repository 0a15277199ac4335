"""Server-sent events, as the dialects that stream over them write them (WHATWG HTML, section 9.2).

It knows no dialect and no payload. Invariant: the data of an event is one line for every client, also for
those that split at Unicode line ends.
"""

from __future__ import annotations

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def event(data: bytes, name: bytes | None = None) -> bytes:
    """One event. `data` is JSON as a compact encoder gives it: without a raw line break."""
    if name is None:
        return b"data: %b\n\n" % one_line(data)
    return b"event: %b\ndata: %b\n\n" % (name, one_line(data))


def one_line(data: bytes) -> bytes:
    """The same JSON value without U+0085, U+2028 and U+2029, at which some clients' line readers split."""
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )
