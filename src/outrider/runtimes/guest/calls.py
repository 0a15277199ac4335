"""The calls under way: what they need of the server, and how they answer.

Invariant: a call is answered once with "ok" or "error", after any number of parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.runtimes.guest.connection import Connection
from outrider.runtimes.guest.filesystem.paths import DEFAULT_PATH, find_program
from outrider.runtimes.guest.poll_loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Calls:
    """`running` maps the calls that can be cancelled to the way to do it."""

    def __init__(self, loop: Loop, connection: Connection) -> None:
        self.loop = loop
        self.connection = connection
        self.running: dict[int, Callable[[], object]] = {}
        self.base_env: dict[str, str] = {}
        self.marking = ""
        self.python: list[str] = []
        """How to start a Python where the sandbox has none of its own."""
        self.known_shell = ""

    def mark(self, owner: int) -> bytes:
        """What is in the environment of all that `owner` (a call, or minus a shell) started. It lets a time limit
        find descendants that left both their session and their parent."""
        return f"OUTRIDER_CALL={self.marking}:{owner}\0".encode()

    def environment(self, extra: dict[str, str], owner: int) -> dict[str, str]:
        env = dict(self.base_env)
        env.update(extra)
        env["OUTRIDER_CALL"] = f"{self.marking}:{owner}"
        return env

    def shell(self) -> str:
        """The shell of this sandbox: bash, or sh where there is none. Looked for once."""
        if not self.known_shell:
            path = self.base_env.get("PATH", DEFAULT_PATH)
            self.known_shell = "bash" if find_program("bash", path) else "sh"
        return self.known_shell

    def reply(self, call: int, fields: dict[str, Any]) -> None:
        self.connection.send([call, "ok", fields])

    def part(self, call: int, data: bytes) -> None:
        self.connection.send([call, "part", {"data": data}])

    def fail(self, call: int, code: str, text: str) -> None:
        self.connection.send([call, "error", {"code": code, "text": text}])
