"""What runs the sessions of a run: the service's own processes, and machines that join it, each over a way of its own.

A machine has a folder for temporary files of its own, as real ones have: what it leaves there when it is killed, only
itself can remove.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from campaign.nursery import descendants
from campaign.processes import Nursery, Program
from campaign.way import Way

MACHINES = (1, 2)
"""How many processes each of the machines has that join."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """`processes` are the service's; `machines` has the number of each one's that joins. `elsewhere`: the service takes
    these for machines that do not reach its engine, whose tokens then go through it."""

    processes: int
    machines: tuple[int, ...] = ()
    elsewhere: bool = False

    @property
    def several(self) -> bool:
        """Whether processes beside the service's run sessions."""
        return self.processes > 1 or bool(self.machines)


def fleet_of(seed: int) -> Fleet:
    """One process, two, or machines that join, in turn; of these runs every second one has a process of the service's
    own, too, and two in four have the engine's tokens go through the service."""
    if seed % 3:
        return Fleet(processes=seed % 3)
    number = seed // 3
    return Fleet(processes=number % 2, machines=MACHINES, elsewhere=number // 2 % 2 == 1)


class Machine:
    """One that joins, under `name`. `program` is what keeps it joined."""

    def __init__(self, name: str, processes: int, way: Way, program: Program, temporary: Path) -> None:
        self.name = name
        self.processes = processes
        self.way = way
        self.program = program
        self.temporary = temporary

    @property
    def nodes(self) -> set[str]:
        """Their names."""
        return {self.name} if self.processes == 1 else {f"{self.name}-{number}" for number in range(self.processes)}

    def kill(self) -> int:
        """All its processes end in the same moment, as with a loss of power; how many did. It is then started again."""
        number = 0
        for pid in self._stopped():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                number += 1
        return number

    def end(self) -> None:
        """All its processes get SIGTERM at once, those in its sandboxes, too, as Slurm does it."""
        if self.program.alive:
            for pid in (self.program.pid, *descendants(self.program.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _stopped(self) -> set[int]:
        """Its processes, none of which can start another one."""
        stopped: set[int] = set()
        while self.program.alive and (new := {self.program.pid, *descendants(self.program.pid)} - stopped):
            stopped |= new
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        return stopped


@asynccontextmanager
async def machines_of(fleet: Fleet, nursery: Nursery, folder: Path, port: int) -> AsyncIterator[list[Machine]]:
    """The machines of a run in that folder, which are to be started; their ways to the service at that port are open
    while the block runs."""
    async with AsyncExitStack() as ways:
        machines = []
        for number, processes in enumerate(fleet.machines):
            name = f"far{number}"
            temporary = folder / name
            temporary.mkdir()
            way = Way(port)
            await ways.enter_async_context(way.open())
            arguments = (way.url, name, str(processes))
            log = folder / f"{name}.log"
            program = Program(nursery, "campaign.machine", arguments, log=log, temporary=temporary)
            machines.append(Machine(name, processes, way, program, temporary))
        yield machines
