"""The processes that run the sessions of a run: the service's own, and machines that join it, each through its own
proxy.

A machine has its own folder for temporary files, as real machines do: files left by a killed machine can be removed
only by the same machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from campaign.processes import Program, ProgramStarter
from campaign.proxy import FaultyProxy
from campaign.starter import descendants

MACHINES = (1, 2)
"""The number of processes of each machine that joins."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """`processes` is the number of the service's processes; `machines` has the number of processes of each joining
    machine. With `elsewhere` the service treats machines as unable to reach its engine, so that their model calls pass
    through the service."""

    processes: int
    machines: tuple[int, ...] = ()
    elsewhere: bool = False

    @property
    def several(self) -> bool:
        """True if sessions run in more than one process."""
        return self.processes > 1 or bool(self.machines)


def fleet_of(seed: int) -> Fleet:
    """Return the fleet of a seed: in turn one process, two processes, or machines that join. In half of the fleets with
    machines the service also has a process of its own, and in half the engine's tokens pass through the service."""
    if seed % 3:
        return Fleet(processes=seed % 3)
    number = seed // 3
    return Fleet(processes=number % 2, machines=MACHINES, elsewhere=number // 2 % 2 == 1)


class Machine:
    """A machine that joins under `name`. `program` runs `outrider nodes join` again whenever the command ends."""

    def __init__(self, name: str, processes: int, proxy: FaultyProxy, program: Program, temporary: Path) -> None:
        self.name = name
        self.processes = processes
        self.proxy = proxy
        self.program = program
        self.temporary = temporary

    @property
    def nodes(self) -> set[str]:
        """The names of the machine's nodes."""
        return {self.name} if self.processes == 1 else {f"{self.name}-{number}" for number in range(self.processes)}

    def kill(self) -> int:
        """Kill all processes at once, as a loss of power does, and return their number. The supervisor then restarts
        the machine."""
        number = 0
        for pid in self._stopped():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                number += 1
        return number

    def end(self) -> None:
        """Send SIGTERM to all processes at once, including those in its sandboxes, as Slurm does."""
        if self.program.alive:
            for pid in (self.program.pid, *descendants(self.program.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _stopped(self) -> set[int]:
        """Stop (SIGSTOP) all processes, so that none can start another one, and return them."""
        stopped: set[int] = set()
        while self.program.alive and (new := {self.program.pid, *descendants(self.program.pid)} - stopped):
            stopped |= new
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        return stopped


@asynccontextmanager
async def machines_of(fleet: Fleet, starter: ProgramStarter, folder: Path, port: int) -> AsyncIterator[list[Machine]]:
    """Yield the machines of a run, with their files in `folder`, not yet started. Their proxies to the service at
    `port` are open during the block."""
    async with AsyncExitStack() as directions:
        machines = []
        for number, processes in enumerate(fleet.machines):
            name = f"far{number}"
            temporary = folder / name
            temporary.mkdir()
            proxy = FaultyProxy(port)
            await directions.enter_async_context(proxy.open())
            arguments = (proxy.url, name, str(processes))
            log = folder / f"{name}.log"
            program = Program(starter, "campaign.machine", arguments, log=log, temporary=temporary)
            machines.append(Machine(name, processes, proxy, program, temporary))
        yield machines
