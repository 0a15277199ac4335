"""How many processors and how much memory this process may use: the machine's, or less where a control group says so.

It reads, once for each call, and changes nothing. Invariant: what it cannot read bounds nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from outrider.runtimes.kernel.cgroups import UNIFIED, by_controller
from outrider.sessions.resources import Amount
from outrider.spec import MEBIBYTE

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def machine(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Amount:
    """What this process may use."""
    groups = by_controller(_text(proc / "self" / "cgroup"))
    cpus = min([float(_processors()), *_cpu_bounds(groups, cgroups)])
    memory = min([_memory(), *_memory_bounds(groups, cgroups)])
    return Amount(cpus=cpus, memory_mb=int(memory // MEBIBYTE))


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_bounds(groups: dict[str, str], mount: Path) -> Iterator[float]:
    for folder in _way_up(mount, groups.get(UNIFIED)):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        yield _share(quota, period)
    for folder in _way_up(mount / "cpu", groups.get("cpu")):
        yield _share(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _memory_bounds(groups: dict[str, str], mount: Path) -> Iterator[float]:
    for folder in _way_up(mount, groups.get(UNIFIED)):
        yield _bound(_text(folder / "memory.max"))
    for folder in _way_up(mount / "memory", groups.get("memory")):
        yield _bound(_text(folder / "memory.limit_in_bytes"))


def _way_up(mount: Path, group: str | None) -> Iterator[Path]:
    """The folders of a group and of all above it, each of which bounds it. In a container the group's path may be
    another's: then its own is the mount."""
    if group is None:
        return
    below = PurePosixPath(group.lstrip("/"))
    yield from (mount / folder for folder in (below, *below.parents) if ".." not in folder.parts)


def _share(quota: str, period: str) -> float:
    """Processors' worth of time."""
    bound = _bound(quota)
    return bound / _bound(period) if math.isfinite(bound) else math.inf


def _bound(text: str) -> float:
    """A positive number; `max`, -1 and nothing stand for no bound."""
    text = text.strip()
    return float(text) if text.isdigit() and int(text) > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
