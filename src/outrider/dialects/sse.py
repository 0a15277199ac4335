"""Server-sent events, the format of streamed replies.

Invariant: the data of an event is one line for every client, also for clients that split at Unicode line ends.

Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""The end of a stream of Chat Completions."""
PING = b": ping\n\n"
"""A comment that keeps a silent connection open; clients skip it."""


def event(data: bytes, name: bytes | None = None) -> bytes:
    """Format one event. `data` is compact JSON without a raw line break. `name` is the event's type; None for
    the default type, "message"."""
    if name is None:
        return b"data: %b\n\n" % one_line(data)
    return b"event: %b\ndata: %b\n\n" % (name, one_line(data))


def one_line(data: bytes) -> bytes:
    """The same JSON value without raw U+0085, U+2028 and U+2029."""
    # Some clients read streams with Python's str.splitlines, which splits at these characters although the format does
    # not.
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )
