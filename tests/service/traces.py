"""All that a test has on this host: what must be as it was when the test is over."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.node_host import PREFIX

from .marks import descendants, identity, marked, mounts, names


class Traces(NamedTuple):
    """Of processes with their start times, so that one is told from a later one of the same number."""

    processes: frozenset[tuple[int, str]]
    mounts: tuple[str, ...]
    sockets: frozenset[str]
    groups: frozenset[str]
    temporaries: tuple[str, ...]
    descriptors: int


def traces(temporary: Path, *marks: str, nodes: Collection[int] = ()) -> Traces:
    """What this process has, and what is below it, carries one of the marks or the name of the folder, or belongs to
    a node that is or was this process or one of `nodes`. Other tests, and other services, have theirs meanwhile."""
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
    """Those of these processes' nodes and of their sandboxes."""
    found = set()
    for parent in cgroups.find().folders.values():
        for folder in parent.glob(f"{PREFIX}*"):
            if folder.name.split("-")[2] in map(str, nodes):
                found |= {str(path.relative_to(parent)) for path in (folder, *folder.glob("*/"))}
    return found
