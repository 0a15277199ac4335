"""Ports for servers that a test starts in another process."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of this machine that is free now. Another process may take the port before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
