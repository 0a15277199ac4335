"""The processes that run the sessions of a run: the service's own, and machines that join it, each through its own
proxy.

A machine has its own folder for temporary files, as real machines do: only the machine itself can remove what it
leaves there when it is killed.
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
    """`processes` are the service's; `machines` has the number of processes of each joining machine. `elsewhere`: the
    service treats machines as unable to reach its engine, so their tokens go through the service."""

    processes: int
    machines: tuple[int, ...] = ()
    elsewhere: bool = False

    @property
    def several(self) -> bool:
        """Whether processes besides the service's run sessions."""
        return self.processes > 1 or bool(self.machines)


def fleet_of(seed: int) -> Fleet:
    """The seed selects, in turn, one process, two processes, or machines that join. Of the fleets with machines every
    second has a process of the service's own, too, and two in four send the engine's tokens through the service."""
    if seed % 3:
        return Fleet(processes=seed % 3)
    number = seed // 3
    return Fleet(processes=number % 2, machines=MACHINES, elsewhere=number // 2 % 2 == 1)


class Machine:
    """A machine that joins under `name`. `program` keeps it joined."""

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
        """Kill all processes at once, as a loss of power does, and return their number. The machine is then
        restarted."""
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
    """The machines of a run, in `folder`, not yet started. Their proxies to the service at `port` are open during the
    block."""
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
