"""The processors, memory and GPUs of a node: how much there is, and how much is set aside for sandboxes.

Each runtime limits its sandbox, and this module keeps the sum of these limits within the total. Actual usage is not
measured. Invariants: no more is set aside than exists, and no GPU belongs to two shares at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from outrider.config import SandboxesConfig
from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.runtimes.elsewhere import ELSEWHERE
from outrider.sandbox.runtimes.kernel.cgroups import UNIFIED, by_controller
from outrider.sandbox.runtimes.nvidia import NVIDIA, NvidiaDriver
from outrider.schemas import ResourceStats
from outrider.sessions.priority_semaphore import PrioritySemaphore, Quantities, Slot
from outrider.spec import MEBIBYTE, RuntimeSpec, TaskSpec

MILLI = 1000
MAX_CPUS, MAX_MEMORY_MB, MAX_GPUS, MAX_GPU_NAME = 1 << 16, 1 << 40, 1 << 10, 256
"""Upper bounds for the numbers that nodes on other machines report. No real machine exceeds them."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

GpuName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GPU_NAME)]


class ResourceAmount(msgspec.Struct, frozen=True, kw_only=True):
    """A number of processors, of MiB of memory, and of GPUs."""

    cpus: Annotated[float, msgspec.Meta(ge=0, le=MAX_CPUS)] = 0.0
    memory_mb: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_MB)] = 0
    gpus: Annotated[int, msgspec.Meta(ge=0, le=MAX_GPUS)] = 0

    @property
    def quantities(self) -> Quantities:
        """The same amount as integers: millicpus, MiB and GPUs."""
        return round(self.cpus * MILLI), self.memory_mb, self.gpus

    def within(self, other: ResourceAmount) -> bool:
        return all(mine <= theirs for mine, theirs in zip(self.quantities, other.quantities, strict=True))

    def in_words(self) -> str:
        return f"{self.cpus:g} cpus, {self.memory_mb} MiB of memory and {self.gpus} GPUs"


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a machine that its sandboxes may use. `gpus` are the names of GPUs, as runtimes use them."""

    cpus: Annotated[float, msgspec.Meta(gt=0, le=MAX_CPUS)]
    memory_mb: Annotated[int, msgspec.Meta(gt=0, le=MAX_MEMORY_MB)]
    gpus: Annotated[tuple[GpuName, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()

    @property
    def amount(self) -> ResourceAmount:
        return ResourceAmount(cpus=self.cpus, memory_mb=self.memory_mb, gpus=len(self.gpus))


def required(runtime: RuntimeSpec) -> ResourceAmount:
    """Return the resources to set aside for a task's sandbox. The amount of each resource is the sandbox's limit, or 0
    if the sandbox has no limit. Nothing is set aside for a sandbox on other machines, such as E2B's or a Kubernetes
    cluster's."""
    if runtime.sandbox_kind in ELSEWHERE:
        return ResourceAmount()
    resources = runtime.resources
    return ResourceAmount(cpus=resources.cpus or 0.0, memory_mb=resources.memory_mb or 0, gpus=resources.gpus)


class ResourceShare(Slot):
    """Resources that are set aside. `gpus` are the names of the GPUs that belong to this share until its release."""

    def __init__(self, give_back: Callable[[], None] = lambda: None, gpus: tuple[str, ...] = ()) -> None:
        super().__init__(give_back)
        self.gpus = gpus


def session_needs(task: TaskSpec) -> ResourceAmount:
    """Return the resources to set aside for a session. They are enough for each of these:

    - the agent's sandbox, with a sandbox that grades an earlier step and has no GPUs
    - the sandbox that grades the last step, after the agent's sandbox has stopped

    A session takes all these resources at once. If sessions requested the second sandbox's resources later, each could
    wait for resources that another session holds.
    """
    agent = required(task.runtime)
    *beside, last = [
        ResourceAmount() if step.carry is None else required(step.runtime or task.runtime)
        for step in (task.evaluator, *(later.evaluator for later in task.then))
    ]
    return ResourceAmount(
        cpus=max(agent.cpus + max((each.cpus for each in beside), default=0.0), last.cpus),
        memory_mb=max(agent.memory_mb + max((each.memory_mb for each in beside), default=0), last.memory_mb),
        gpus=max(agent.gpus, last.gpus),
    )


class NodeResources:
    """The resources of a node. `take` sets a part of them aside, and waits in the order of `PrioritySemaphore`."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.total = capacity.amount
        self._taken = PrioritySemaphore(*self.total.quantities)
        self._free_gpus = set(capacity.gpus)

    async def take(self, amount: ResourceAmount, priority: int = 0, tenant: str = "") -> ResourceShare:
        """Wait until an amount is free, and set it aside. For an empty amount, there is no wait. Raises
        RuntimeUnavailable if the amount is larger than the node's resources."""
        quantities = amount.quantities
        if not any(quantities):
            return ResourceShare()
        if not amount.within(self.total):
            raise RuntimeUnavailable(
                f"the sandbox needs {amount.in_words()}; the node has {self.total.in_words()}",
                hint="submit the task again with less, or serve it with more: see the settings sandboxes.cpus, "
                "sandboxes.memory_mb and sandboxes.gpus",
            )
        return self._share(await self._taken.take(quantities, priority, tenant), amount.gpus)

    def try_take(self, amount: ResourceAmount, tenant: str = "") -> ResourceShare | None:
        """Set an amount aside without waiting, for a use that is optional. Returns None if the amount is not free, or
        if it must be left for waiting requests."""
        if not any(quantities := amount.quantities):
            return ResourceShare()
        slot = self._taken.try_take(quantities, tenant)
        return None if slot is None else self._share(slot, amount.gpus)

    def _share(self, slot: Slot, number: int) -> ResourceShare:
        """Assign `number` free GPUs to a share. `slot` guarantees that enough GPUs are free."""
        gpus = tuple([name for name in self.capacity.gpus if name in self._free_gpus][:number])
        self._free_gpus.difference_update(gpus)

        def give_back() -> None:
            self._free_gpus.update(gpus)  # before `release`, which may give these GPUs to the next request
            slot.release()

        return ResourceShare(give_back, gpus)

    def stats(self) -> ResourceStats:
        millicpus, memory_mb, gpus = self._taken.taken
        return ResourceStats(
            cpus=self.total.cpus,
            cpus_set_aside=millicpus / MILLI,
            memory_mb=self.total.memory_mb,
            memory_mb_set_aside=memory_mb,
            gpus=self.total.gpus,
            gpus_set_aside=gpus,
            waiting=self._taken.waiting,
            served=self._taken.served,
            waited_seconds=self._taken.waited_seconds,
        )


def capacity_of(settings: SandboxesConfig, driver: NvidiaDriver = NVIDIA) -> Capacity:
    """Return the resources of this machine that sandboxes may use: the amounts in the settings, or else the whole
    machine. Raises InvalidField if two names stand for one GPU."""
    machine = machine_capacity()
    gpus = tuple(gpu.name for gpu in driver.visible()) if settings.gpus is None else settings.gpus
    for gpu in driver.gpus():
        if len(same := [name for name in gpus if gpu.known_as(name)]) > 1:
            raise InvalidField(
                f"{' and '.join(map(repr, same))} are the same GPU, a {gpu.model}",
                field="sandboxes.gpus",
                hint="name each GPU once",
            )
    return Capacity(
        cpus=machine.cpus if settings.cpus is None else settings.cpus,
        memory_mb=machine.memory_mb if settings.memory_mb is None else settings.memory_mb,
        gpus=gpus,
    )


def total_of(stats: ResourceStats) -> ResourceAmount:
    return ResourceAmount(cpus=stats.cpus, memory_mb=stats.memory_mb, gpus=stats.gpus)


def free_of(stats: ResourceStats) -> ResourceAmount:
    return ResourceAmount(
        cpus=stats.cpus - stats.cpus_set_aside,
        memory_mb=stats.memory_mb - stats.memory_mb_set_aside,
        gpus=stats.gpus - stats.gpus_set_aside,
    )


def machine_capacity(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> ResourceAmount:
    """Return the processors and memory that this process may use: the machine's, or less if control groups (v1 or v2)
    limit the process. A limit that cannot be read is ignored."""
    try:
        processors = len(os.sched_getaffinity(0))
    except AttributeError:  # missing on macOS
        processors = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = by_controller(_text(proc / "self" / "cgroup"))
    cpu_limits, memory_limits = [float(processors)], [float(memory)]
    for folder in _group_folders(cgroups, groups.get(UNIFIED)):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        cpu_limits.append(_processors(quota, period))
        memory_limits.append(_limit(_text(folder / "memory.max")))
    for folder in _group_folders(cgroups / "cpu", groups.get("cpu")):
        cpu_limits.append(_processors(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")))
    for folder in _group_folders(cgroups / "memory", groups.get("memory")):
        memory_limits.append(_limit(_text(folder / "memory.limit_in_bytes")))
    return ResourceAmount(cpus=min(cpu_limits), memory_mb=int(min(memory_limits) // MEBIBYTE))


def _group_folders(mount: Path, group: str | None) -> Iterator[Path]:
    """Yield the folder of a control group and the folders of all groups above it, because the limits of all these
    groups apply.

    In a container, /proc may show the group's path on the host. If this path does not exist below the container's
    mount, the mount itself is the folder of the process's group.
    """
    if group is None:
        return
    below = PurePosixPath(group.lstrip("/"))
    yield from (mount / folder for folder in (below, *below.parents) if ".." not in folder.parts)


def _processors(quota: str, period: str) -> float:
    """Convert a control group's quota to processors: `quota` microseconds of processor time per `period`
    microseconds."""
    limit = _limit(quota)
    return limit / _limit(period) if math.isfinite(limit) else math.inf


def _limit(text: str) -> float:
    """Parse a control group's limit, a positive number. `max` (v2), -1 (v1) and an empty string mean that there is no
    limit."""
    text = text.strip()
    return float(text) if text.isdigit() and int(text) > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
