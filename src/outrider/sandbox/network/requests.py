"""Parses the head of a request to the proxy, and the head of a server's reply.

All functions are pure. Invariant: the parser rejects a head that two servers may interpret differently.
"""

from __future__ import annotations

import re
from typing import Self

import msgspec

from outrider.destinations import host_name, split_port

MAX_HEAD = 64 << 10
REQUEST_LINE = re.compile(r"([A-Z-]{1,32}) ([\x21-\x7e]+) (HTTP/1\.[01])")
STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-9][0-9]{2})( [\t\x20-\x7e\x80-\xff]*)?")
FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
"""A valid header line. The pattern rejects a space before the colon, the continuation of the previous line, and a CR or
LF within a line."""
LENGTH = re.compile("[0-9]{1,18}")
NOT_PASSED = frozenset(
    {
        *("connection", "expect", "host", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "upgrade"),
    }
)
"""Request and reply headers that concern only one connection. The proxy drops them or writes its own."""

COOKIES = frozenset({"set-cookie", "set-cookie2"})
PERSONAL = frozenset({"authorization", "cookie", "cookie2"})
"""If a request has one of these headers, its reply may contain private data of the sender."""


class NotPassedOn(Exception):
    """The proxy refuses a request, or cannot get a valid reply to it. `status` is the status of the proxy's own reply,
    such as "403 Forbidden"."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class NotAllowed(NotPassedOn):
    """The rules do not allow a request to this server."""

    def __init__(self, text: str) -> None:
        super().__init__("403 Forbidden", text)


class Unreachable(NotPassedOn):
    """The request is allowed, but its server cannot be reached or does not reply with valid HTTP."""

    def __init__(self, text: str) -> None:
        super().__init__("502 Bad Gateway", text)


class RequestHead(msgspec.Struct, frozen=True):
    """The parsed head of a request.

    `host`: the name or the address of the server, as `host_name` normalises it.
    `path`: the path with the query, or "" for a tunnel (CONNECT).
    `fields`: the header lines for the server.
    `length`: the size of the body in bytes.
    """

    method: str
    host: str
    port: int
    path: str
    version: str
    fields: list[str]
    length: int

    @property
    def tunnel(self) -> bool:
        return self.method == "CONNECT"

    @property
    def place(self) -> str:
        return place_of(self.host, self.port)

    @property
    def personal(self) -> bool:
        """True if the reply may contain private data of the sender."""
        return any(name in PERSONAL for name, _ in _named(self.fields))

    @property
    def origin(self) -> str:
        """The server as in a Host header: `host:port`, or only the host for port 80."""
        return place_of(self.host, self.port, hidden=80)

    def head(self, target: str, origin: str, *more: str, only: frozenset[str] | None = None) -> bytes:
        """Return the head to send to the server, with the additional lines `more`. `only`, if given, contains the names
        (in lower case) of the client's headers to send. The others are dropped."""
        kept = [field for field in self.fields if only is None or field.partition(":")[0].lower() in only]
        lines = [f"{self.method} {target} {self.version}", f"Host: {origin}", *kept, "Connection: close", *more]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class ReplyHead(msgspec.Struct, frozen=True):
    """The parsed head of a server's reply. `length` is the size of the body in bytes. It is None if the body is chunked
    or ends with the connection."""

    status: int
    line: str
    fields: list[str]
    length: int | None
    chunked: bool

    @classmethod
    def read(cls, head: bytes) -> Self:
        """Parse the head of a reply, including the empty line at its end. Raises Unreachable if the head is
        malformed."""
        first, *fields = head[:-4].decode("latin-1").split("\r\n")
        line = STATUS_LINE.fullmatch(first)
        if line is None or not all(FIELD.fullmatch(field) for field in fields):
            raise Unreachable("the server's reply is not HTTP")
        named = _named(fields)
        lengths = {value for name, value in named if name == "content-length"}
        chunked = any(name == "transfer-encoding" for name, _ in named)
        if len(lengths) > 1 or not all(map(LENGTH.fullmatch, lengths)) or (chunked and lengths):
            raise Unreachable("the length of the server's reply is not clear")
        kept = _passed(fields, named)
        return cls(int(line[1]), first, kept, int(lengths.pop()) if lengths else None, chunked)

    def value(self, name: str) -> str:
        """Return the value of a header, or "" if the reply does not have this header."""
        return next((value for each, value in _named(self.fields) if each == name), "")

    def head(self, *, recorded: bool = False) -> bytes:
        """Return the head to send to the client. With `recorded`, return the head for a record (see record.py): the
        same without cookies."""
        kept = [field for field in self.fields if not (recorded and field.partition(":")[0].lower() in COOKIES)]
        return ("\r\n".join([self.line, *kept, "Connection: close"]) + "\r\n\r\n").encode("latin-1")


def place_of(host: str, port: int, *, hidden: int = 0) -> str:
    """Return `host:port`, or only the host if the port equals `hidden`."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port == hidden else f"{shown}:{port}"


def read_request(head: bytes) -> RequestHead:
    """Parse the head of a request, including the empty line at its end.

    Raises NotPassedOn for a head that servers might interpret differently, because it has a malformed line, a user name
    in the URL, a Host header that differs from the URL, or an unclear length of the body.
    """
    first, *fields = head[:-4].decode("latin-1").split("\r\n")
    line = REQUEST_LINE.fullmatch(first)
    if line is None:
        raise NotPassedOn("400 Bad Request", f"{first[:200]!r} is no request of HTTP/1.1")
    for field in fields:
        if not FIELD.fullmatch(field):
            raise NotPassedOn("400 Bad Request", f"{field[:200]!r} is no header line")
    named = _named(fields)
    if any(name == "transfer-encoding" for name, _ in named):
        raise NotPassedOn("411 Length Required", "a body needs a Content-Length; Transfer-Encoding is not supported")
    lengths = [value for name, value in named if name == "content-length"]
    if len(lengths) > 1 or not all(map(LENGTH.fullmatch, lengths)):
        raise NotPassedOn("400 Bad Request", "Content-Length is not one number")
    tunnel = line[1] == "CONNECT"
    host, port, path = _tunnel_target(line[2]) if tunnel else _url_target(line[2])
    hosts = [value for name, value in named if name == "host"]
    if not tunnel and hosts and [_place(value, 80) for value in hosts] != [(host, port)]:
        raise NotPassedOn("400 Bad Request", f"the Host {hosts[0][:200]!r} is not that of the address")
    length = 0 if tunnel or not lengths else int(lengths[0])
    return RequestHead(line[1], host, port, path, line[3], _passed(fields, named), length)


def body_length(head: bytes) -> int | None:
    """Return the size in bytes of the body of a request to the model gateway. Returns None if the head does not show
    where the body ends: the body is chunked, the protocol may change, or the length is unclear."""
    named = _named(head[:-4].decode("latin-1").split("\r\n")[1:])
    lengths = {value for name, value in named if name == "content-length"}
    unclear = len(lengths) > 1 or not all(map(LENGTH.fullmatch, lengths))
    if unclear or any(name in ("transfer-encoding", "upgrade") for name, _ in named):
        return None
    return int(lengths.pop()) if lengths else 0


def _named(fields: list[str]) -> list[tuple[str, str]]:
    return [(name.lower(), value.strip(" \t")) for name, _, value in (field.partition(":") for field in fields)]


def _passed(fields: list[str], named: list[tuple[str, str]]) -> list[str]:
    """Return the header lines to forward: all except those in NOT_PASSED and those that the `Connection` header lists.
    Content-Length and Content-Type are always forwarded."""
    listed = {one.strip().lower() for name, value in named if name == "connection" for one in value.split(",")}
    without = NOT_PASSED | (listed - {"content-length", "content-type", "close"})
    return [field for field, (name, _) in zip(fields, named, strict=True) if name not in without]


def _tunnel_target(target: str) -> tuple[str, int, str]:
    found = None if re.search(r"[/?#@\\]", target) else _place(target, 443)
    if found is None:
        raise NotPassedOn("400 Bad Request", f"{target[:200]!r} is not HOST:PORT")
    return *found, ""


def _url_target(target: str) -> tuple[str, int, str]:
    """Split an http:// URL into its host, its port, and its path with the query. Raises NotPassedOn for an invalid
    URL."""
    if not target.lower().startswith("http://"):
        raise NotPassedOn("400 Bad Request", f"{target[:200]!r} is no http:// address")
    whole = target[len("http://") :].partition("#")[0]
    authority = re.split("[/?]", whole, maxsplit=1)[0]
    path = whole[len(authority) :]
    if "@" in authority or "\\" in authority:
        raise NotPassedOn("400 Bad Request", "an address must not have a user name or a backslash before its path")
    found = _place(authority, 80)
    if found is None:
        raise NotPassedOn("400 Bad Request", f"{authority[:200]!r} is no host")
    return *found, path if path.startswith("/") else f"/{path}"


def _place(text: str, port: int) -> tuple[str, int] | None:
    """Split `text` into host and port; `port` is the default. Returns None if the text is invalid or ambiguous."""
    name, given = split_port(text)
    host = host_name(name)
    if host is None or (given is not None and (not re.fullmatch("[0-9]{1,5}", given) or not 0 < int(given) < 65536)):
        return None
    if ":" in host and not text.startswith("["):
        return None
    return host, port if given is None else int(given)
