"""The server's side of the RPC protocol Connect, with JSON. A body is one message or a stream of frames."""

from __future__ import annotations

import json
import struct
from typing import Any

from aiohttp import web

LAST = 2
STATUS = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "unauthenticated": 401,
    "unimplemented": 501,
    "unavailable": 503,
}


class ConnectFault(Exception):
    """An error reply to a call. `code` is an error code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def fault_reply(code: str, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=STATUS.get(code, 500))


def frame(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def last_frame(fault: ConnectFault | None = None) -> bytes:
    return frame({} if fault is None else {"error": {"code": fault.code, "message": str(fault)}}, LAST)


def messages(data: bytes) -> list[dict[str, Any]]:
    """Parse all messages of a stream. Raises ConnectFault for a broken stream."""
    found: list[dict[str, Any]] = []
    while data:
        if len(data) < 5 or len(data) < 5 + (size := struct.unpack(">I", data[1:5])[0]) or data[0] & 1:
            raise ConnectFault("invalid_argument", "a broken frame")
        if not data[0] & LAST:
            found.append(read(data[5 : 5 + size]))
        data = data[5 + size :]
    return found


def read(data: bytes) -> dict[str, Any]:
    """Parse one message. Raises ConnectFault if it is not a JSON object."""
    try:
        message = json.loads(data or b"{}")
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectFault("invalid_argument", "not a JSON object")
    return message
