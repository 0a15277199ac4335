"""Files from which the next node continues an agent's run in a sandbox that may outlive its node.

The record of the run is in the sandbox's folder while the agent runs. The pulse, in the node's folder, holds the time
at which the node was last alive. Invariant: only this user can read the record, which holds the session's credential
and the sandbox's secret.
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

from outrider.sandbox.runtimes.kernel.process_marks import RUN_FILE

log = logging.getLogger("outrider.node")

PULSE_FILE = "pulse.json"
PULSE_SECONDS = 2.0


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A time at which a node was alive: `at`, in seconds since the machine's boot. `stalled_seconds` is the number of
    seconds until then that are charged to no session."""

    at: float
    stalled_seconds: float = msgspec.field(name="stood_still")

    @classmethod
    def now(cls, stalled_seconds: float) -> Self:
        # Unlike the monotonic clock, this clock counts while the machine is suspended, and is the same for all
        # processes.
        return cls(at=time.clock_gettime(time.CLOCK_BOOTTIME), stalled_seconds=stalled_seconds)

    def seconds_since(self, earlier: Pulse) -> float:
        """Return the seconds to charge to a session that ran from `earlier` until now."""
        return max(0.0, self.at - earlier.at - max(0.0, self.stalled_seconds - earlier.stalled_seconds))


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an agent's run. `runtime` is the sandbox's spec as JSON, without prepare steps and without
    environment: the tool server has the environment, which may hold secrets. `handle` is returned by
    `Outlives.may_outlive`. `key` is the credential for the agent's model calls. `session_seconds` and `agent_seconds`
    were left to the run at `began`."""

    session_id: str
    attempt: int
    key: str
    runtime: str
    handle: dict[str, str]
    began: Pulse
    session_seconds: float
    agent_seconds: float

    def write(self, directory: Path) -> None:
        """Write the record. Blocks; raises OSError."""
        _replace(directory / RUN_FILE, msgspec.json.encode(self))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the record. Blocks; raises OSError, and ValueError for a file of another version."""
        return msgspec.json.decode((directory / RUN_FILE).read_bytes(), type=cls)

    def charged(self, seconds: float) -> Self:
        """Return the record with `seconds` deducted from the time that is left."""
        return msgspec.structs.replace(
            self,
            session_seconds=max(0.0, self.session_seconds - seconds),
            agent_seconds=max(0.0, self.agent_seconds - seconds),
        )


class Outlived(NamedTuple):
    """A sandbox that has outlived its node: its folder, and the record left by the node."""

    directory: Path
    run: KeptRun


def outlived(folder: Path, directories: Sequence[Path]) -> dict[str, Outlived]:
    """Return, by session, the sandboxes that have outlived the node of this folder. The time until the node's last
    pulse is deducted from their records. A sandbox whose record cannot be read is logged and left out. Blocks."""
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
    """Remove the record: the sandbox of this folder must not outlive its node any more. Blocks."""
    (directory / RUN_FILE).unlink(missing_ok=True)


async def note_pulse(folder: Path, stalled_seconds: Callable[[], float]) -> None:
    """Record that the node of this folder is alive. Call this function every PULSE_SECONDS. Raises OSError."""
    pulse = msgspec.json.encode(Pulse.now(stalled_seconds()))
    await asyncio.to_thread(_replace, folder / PULSE_FILE, pulse)


def _last_pulse(folder: Path) -> Pulse:
    """Return the last pulse of the folder's last node. Blocks; raises OSError, ValueError."""
    return msgspec.json.decode((folder / PULSE_FILE).read_bytes(), type=Pulse)


def _replace(file: Path, data: bytes) -> None:
    """Replace a file atomically; only this user can read it."""
    new = file.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(data)
    new.replace(file)
