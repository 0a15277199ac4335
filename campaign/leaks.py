"""Finds the resources that the processes of a run leave on the machine, while the last service is idle and after it
has ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from campaign.checks import Finding, Harm
from campaign.starter import descendants
from outrider.client.client import AsyncClient
from outrider.errors import OutriderError
from outrider.sandbox.runtimes.kernel import cgroups, process_marks
from outrider.sandbox.runtimes.node_host import PREFIX

SETTLE_SECONDS = 15.0
"""Seconds to wait for cleanup: the processes of a killed node end a moment after the node, and its keeper some seconds
later."""
LOOK_SECONDS = 0.1


class Home(NamedTuple):
    """A folder for temporary files, and the number of nodes, of the service or of a joined machine, whose folders are
    in it."""

    temporary: Path
    nodes: int
    joined: bool = False


class Footprint(msgspec.Struct, frozen=True):
    """A process's resident memory and open descriptors."""

    mib: float
    descriptors: int


def footprint(pid: int) -> Footprint | None:
    """Return the footprint of a process, or None if it has exited, even if its parent has not waited for it yet."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "VmRSS" not in status:
        return None
    return Footprint(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")))


def nodes_of(*programs: int) -> set[int]:
    """Return the processes that run sessions for services or for joined machines, without their main processes."""
    below = descendants(*programs).items()
    return {pid for pid, command in below if "outrider.cli.node_process" in command}


async def held_by_idle_service(client: AsyncClient, homes: Collection[Home]) -> list[Finding]:
    """List the resources that a service without sessions still holds after some time to release them: slots, seats on
    engines, folders and processes of sandboxes."""
    held = await _settled(lambda: _held(client, homes))
    return [Finding(Harm.LEAKED, f"the idle service holds {what}") for what in held]


async def _settled(look: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Repeat `look` until it finds nothing or SETTLE_SECONDS have passed. Returns the last findings."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        if not (found := await look()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(LOOK_SECONDS)


async def _held(client: AsyncClient, homes: Collection[Home]) -> list[str]:
    try:
        status = await client.status()
    except OutriderError as error:
        return [f"no status: {error}"]
    held = []
    for node in status.nodes:
        held += [f"{lane.in_use} slots of {lane.name}" for lane in node.lanes if lane.in_use or lane.waiting]
        held += [f"{node.sessions} sessions"] * bool(node.sessions)
    for engine in status.engines:
        if engine.in_flight or engine.sessions or engine.assigned_tokens:
            held.append(f"{engine.in_flight} calls and {engine.sessions} seats on {engine.name}")
    for home in homes:
        held += await asyncio.to_thread(_sandboxes, home)
    return held


def _sandboxes(home: Home) -> list[str]:
    found = []
    folders = sorted(home.temporary.iterdir())
    if len(folders) != home.nodes * (1 + home.joined):  # a joined node has another folder, with the tokenizers
        found.append(f"the folders {', '.join(folder.name for folder in folders)} in {home.temporary}")
    for folder in folders:
        found += [f"the sandbox {path.name}" for path in folder.glob("s-*")]
        if marked := process_marks.marked(f"{folder.name}/s-"):
            found.append(f"{len(marked)} processes of sandboxes")
    return found


async def left_behind(starter: int, folder: Path, homes: Collection[Home], hosts: Collection[int]) -> list[Finding]:
    """List the resources that remain after all programs of a run have ended: processes, mounts, control groups,
    folders, sockets. `hosts` are all processes that have run sessions."""
    left = await _settled(lambda: asyncio.to_thread(_left, starter, folder, homes, hosts))
    return [Finding(Harm.LEAKED, f"left behind: {what}") for what in left]


def _left(starter: int, folder: Path, homes: Collection[Home], hosts: Collection[int]) -> list[str]:
    left = [f"process {pid} ({command})" for pid, command in descendants(starter).items()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    for home in homes:
        left += [f"folder {path}" for path in home.temporary.iterdir()]
        left += [f"mount {line.split()[4]}" for line in mounts if str(home.temporary) in line]
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    left += [f"socket {name}" for name in sockets if str(folder) in name]
    # A process id is unique only within its PID namespace, so the names of control groups contain the namespace's
    # number and the process's.
    namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    ours = {(namespace, str(pid)) for pid in hosts}
    for parent in set(cgroups.find().folders.values()):
        for group in parent.glob(f"{PREFIX}*"):
            if tuple(group.name.split("-")[1:3]) in ours:
                left.append(f"control group {group}")
    return left
