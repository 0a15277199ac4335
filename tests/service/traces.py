"""The traces of a test on this host. They must be the same before and after the test."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.node_host import PREFIX

from .marks import descendants, identity, marked, mounts, names


class Traces(NamedTuple):
    """Traces on this host. `processes` has ids with start times, which distinguish a process from a later one with the
    same id."""

    processes: frozenset[tuple[int, str]]
    mounts: tuple[str, ...]
    sockets: frozenset[str]
    groups: frozenset[str]
    temporaries: tuple[str, ...]
    descriptors: int


def traces(temporary: Path, *marks: str, nodes: Collection[int] = ()) -> Traces:
    """Return the traces of this process and its descendants, of everything that carries a mark or the folder's name,
    and the control groups of nodes in this process or in `nodes`. Traces of other tests and services are left out,
    because they may change meanwhile."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    return Traces(
        processes=frozenset(map(identity, descendants() | marked(*marks, str(temporary)))),
        mounts=tuple(mounts(temporary)),
        sockets=frozenset(name for name in sockets if str(temporary) in name),
        groups=frozenset(control_groups({os.getpid(), *nodes})),
        temporaries=tuple(names(temporary)),
        descriptors=len(os.listdir("/proc/self/fd")),
    )


def control_groups(nodes: Collection[int]) -> set[str]:
    """Return the control groups of the nodes in these processes, and of the nodes' sandboxes."""
    found = set()
    for parent in cgroups.find().folders.values():
        for folder in parent.glob(f"{PREFIX}*"):
            if folder.name.split("-")[2] in map(str, nodes):
                found |= {str(path.relative_to(parent)) for path in (folder, *folder.glob("*/"))}
    return found
