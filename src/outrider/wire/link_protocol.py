"""The shared parts of the protocols of all links: close codes and reasons, heartbeats, and the MessagePack encoder."""

from __future__ import annotations

from enum import IntEnum

import msgspec

MAX_REASON = 120
"""Maximum number of bytes of a close reason. WebSocket allows 123."""

PROXY_STATUSES = frozenset({403, 404})
"""HTTP statuses with which a reverse proxy may reply while the service restarts. A worker or node that was accepted
before tries again after such a reply. Only a new worker or node is refused by it."""

encode = msgspec.msgpack.Encoder().encode


class Close(IntEnum):
    """Codes for closing a connection. After REPLACED, SILENT and WebSocket's own codes, a worker connects again. After
    NONSENSE, CONFLICT, REMOVED and PROTOCOL, a worker gives up, because the service would refuse the worker again. For
    nodes, see `FINAL` in nodes/dialling.py."""

    LEFT = 1000  # the worker or node has left for good
    REPLACED = 4001  # the same worker has connected again
    NONSENSE = 4400  # the peer broke the protocol, or sent impossible tokens
    SILENT = 4408  # no message arrived for too long
    CONFLICT = 4409  # the worker's model is not the engine's, the engine is not a relay, or the node's name is in use
    REMOVED = 4410  # the engine was removed from the service, or the service has given the node up
    PROTOCOL = 4426  # the peer uses another version of the protocol


class Nonsense(Exception):
    """The peer sent a message that the protocol does not allow. The error's text becomes the close reason."""


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A heartbeat. Each side of a link sends a heartbeat when it has sent nothing else for some seconds."""


def close_reason(text: str) -> str:
    """Cut a text to MAX_REASON bytes."""
    return text.encode()[:MAX_REASON].decode(errors="ignore")
