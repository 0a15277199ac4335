"""What a node leaves to the next one about an agent's run in a sandbox that may outlive it.

It is a file in the sandbox's folder, there for as long as the agent runs; another, the pulse, in the node's folder says
until when the node was alive. It knows no runtime. Invariant: only this user can read the file, which has the
credential of the session and the secret of the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from outrider.runtimes.kernel.process_marks import RUN_FILE

log = logging.getLogger("outrider.node")

PULSE_FILE = "pulse.json"
PULSE_SECONDS = 2.0


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A moment in the life of a node: seconds since the machine started, and how many of these count for no session."""

    at: float
    stood_still: float

    @classmethod
    def now(cls, stood_still: float) -> Self:
        # Unlike the monotonic clock it goes on while the machine is suspended, and means the same to every process.
        return cls(at=time.clock_gettime(time.CLOCK_BOOTTIME), stood_still=stood_still)

    def seconds_since(self, earlier: Pulse) -> float:
        """What a session is charged that ran from then until now."""
        return max(0.0, self.at - earlier.at - max(0.0, self.stood_still - earlier.stood_still))


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """`runtime` is the sandbox's spec as JSON, without what prepares it and without its environment, which the tool
    server has and which may hold secrets. `handle` is that of `Outlives.may_outlive`.
    `key` is the credential with which the agent calls its model. `session_seconds` and `agent_seconds` were left to the
    run when it `began`."""

    session_id: str
    attempt: int
    key: str
    runtime: str
    handle: dict[str, str]
    began: Pulse
    session_seconds: float
    agent_seconds: float

    def write(self, directory: Path) -> None:
        """Blocks; raises OSError."""
        _replace(directory / RUN_FILE, msgspec.json.encode(self))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Blocks; raises OSError, and ValueError for a file of another version."""
        return msgspec.json.decode((directory / RUN_FILE).read_bytes(), type=cls)

    def charged(self, seconds: float) -> Self:
        """The run after so many seconds of it."""
        return msgspec.structs.replace(
            self,
            session_seconds=max(0.0, self.session_seconds - seconds),
            agent_seconds=max(0.0, self.agent_seconds - seconds),
        )


class Outlived(NamedTuple):
    """A sandbox that has outlived its node: its folder, and what the node has left about it."""

    directory: Path
    run: KeptRun


def outlived(folder: Path, directories: Sequence[Path]) -> dict[str, Outlived]:
    """Those of the node with this folder, by session, with what they have used of their time. Blocks."""
    found = {}
    for directory in directories:
        try:
            run, pulse = KeptRun.read(directory), _last_pulse(folder)
        except (OSError, ValueError) as error:
            log.error("%s has outlived its node, but what that left cannot be read: %s", directory, error)
            continue
        found[run.session_id] = Outlived(directory, run.charged(pulse.seconds_since(run.began)))
    return found


def forget(directory: Path) -> None:
    """The sandbox of this folder is not to outlive its node any more. Blocks."""
    (directory / RUN_FILE).unlink(missing_ok=True)


async def note_pulse(folder: Path, stood_still: Callable[[], float]) -> None:
    """Note that the node with this folder lives. To be called every PULSE_SECONDS. Raises OSError."""
    pulse = msgspec.json.encode(Pulse.now(stood_still()))
    await asyncio.to_thread(_replace, folder / PULSE_FILE, pulse)


def _last_pulse(folder: Path) -> Pulse:
    """When the last node of this folder was alive. Blocks; raises OSError, ValueError."""
    return msgspec.json.decode((folder / PULSE_FILE).read_bytes(), type=Pulse)


def _replace(file: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    new = file.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(data)
    new.replace(file)
