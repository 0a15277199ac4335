"""Resources are never given out twice, smaller requests do not delay larger ones, and a machine's capacity is found."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import SandboxesConfig
from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.runtimes.nvidia import NvidiaDriver
from outrider.sessions.resources import (
    Capacity,
    NodeResources,
    ResourceAmount,
    ResourceShare,
    capacity_of,
    free_of,
    machine_capacity,
    required,
)
from outrider.spec import MEBIBYTE, RuntimeSpec

GPUS = ("0", "1", "2")


def some_resources(cpus: float = 4.0, memory_mb: int = 1000) -> NodeResources:
    return NodeResources(Capacity(cpus=cpus, memory_mb=memory_mb, gpus=GPUS))


def cpus(number: float) -> ResourceAmount:
    return ResourceAmount(cpus=number)


class Line:
    """Takers that wait for resources. `served` has their names in the order in which they were served. A taker gives
    its resources back when `leaves` is called."""

    def __init__(self, resources: NodeResources, group: asyncio.TaskGroup) -> None:
        self.resources = resources
        self.served: list[str] = []
        self._group = group
        self._leave: dict[str, asyncio.Event] = {}

    async def comes(self, name: str, amount: ResourceAmount, priority: int = 0) -> asyncio.Task[None]:
        self._leave[name] = asyncio.Event()
        task = self._group.create_task(self._take(name, amount, priority))
        await settled()
        return task

    async def leaves(self, name: str) -> None:
        self._leave[name].set()
        await settled()

    async def _take(self, name: str, amount: ResourceAmount, priority: int) -> None:
        async with await self.resources.take(amount, priority):
            self.served.append(name)
            await self._leave[name].wait()


async def settled() -> None:
    """Wait until every task is blocked. No task needs more than a few steps of the event loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_request_is_not_passed_by_small_ones_that_would_fit() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("first", cpus(3))
        await line.comes("large", cpus(4))
        await line.comes("small", cpus(1))
        assert line.served == ["first"]
        assert line.resources.stats().waiting == 2
        await line.leaves("first")
        assert line.served == ["first", "large"]
        await line.leaves("large")
        assert line.served == ["first", "large", "small"]
        await line.leaves("small")
    assert line.resources.stats().cpus_set_aside == 0


async def test_priority_goes_before_age() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("first", cpus(4))
        await line.comes("low", cpus(2))
        await line.comes("high", cpus(3), priority=5)
        await line.leaves("first")
        assert line.served == ["first", "high"]
        await line.leaves("high")
        await line.leaves("low")


async def test_what_asks_for_nothing_waits_for_nobody() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("all", cpus(4))
        await line.comes("waits", cpus(1))
        await line.comes("nothing", required(RuntimeSpec()))
        assert line.served == ["all", "nothing"]
        for name in ("all", "waits", "nothing"):
            await line.leaves(name)
        assert line.resources.stats().served == 2


async def test_who_gives_up_lets_those_behind_go_on() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("first", cpus(3))
        large = await line.comes("large", cpus(4))
        await line.comes("small", cpus(1))
        large.cancel()
        await settled()
        assert line.served == ["first", "small"]
        await line.leaves("first")
        await line.leaves("small")
    assert free_of(line.resources.stats()) == line.resources.total


async def test_who_gives_up_as_it_is_served_gives_it_back() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        held = await line.resources.take(cpus(4))
        doomed = await line.comes("doomed", cpus(4))
        held.release()
        doomed.cancel()
        await settled()
        assert line.served == []
    assert free_of(line.resources.stats()) == line.resources.total


async def test_both_must_be_there() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("memory", ResourceAmount(memory_mb=800))
        await line.comes("both", ResourceAmount(cpus=1, memory_mb=300))
        assert line.served == ["memory"]
        stats = line.resources.stats()
        assert (stats.cpus_set_aside, stats.memory_mb_set_aside, stats.waiting) == (0, 800, 1)
        await line.leaves("memory")
        await line.leaves("both")


async def test_who_wants_nothing_of_what_others_wait_for_passes_and_delays_nobody() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("all gpus", ResourceAmount(gpus=3))
        await line.comes("next gpu", ResourceAmount(gpus=1, cpus=2))
        await line.comes("later gpu", ResourceAmount(gpus=1, cpus=2))
        await line.comes("too many cpus", cpus(3))  # the first in line will get two of the four cpus
        await line.comes("few cpus", cpus(1))  # there is room, but an earlier taker waits for cpus
        await line.comes("memory", ResourceAmount(memory_mb=500))
        assert line.served == ["all gpus", "memory"]
        await line.leaves("all gpus")
        assert line.served == ["all gpus", "memory", "next gpu", "later gpu"]
        await line.leaves("next gpu")
        await line.leaves("later gpu")
        assert line.served[4:] == ["too many cpus", "few cpus"]
        for name in ("too many cpus", "few cpus", "memory"):
            await line.leaves(name)
    assert free_of(line.resources.stats()) == line.resources.total


async def test_cpus_are_given_out_while_many_wait_for_gpus() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        names = [f"gpu {number}" for number in range(9)]
        for name in names:
            await line.comes(name, ResourceAmount(gpus=1, cpus=0.5))
        await line.comes("cpus", cpus(2))  # the cpus that three takers leave free, less the need of the first in line
        assert line.served == [*names[:3], "cpus"]
        for name in [*names, "cpus"]:
            await line.leaves(name)
    assert line.served == [*names[:3], "cpus", *names[3:]]


async def test_those_who_pass_do_not_starve_who_waits_for_gpus_and_cpus() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(some_resources(), group)
        await line.comes("gpus", ResourceAmount(gpus=3))
        await line.comes("large", ResourceAmount(gpus=1, cpus=4))
        for number in range(3):
            await line.comes(f"small {number}", cpus(1))
        assert line.served == ["gpus"]
        await line.leaves("gpus")
        assert line.served == ["gpus", "large"]
        await line.leaves("large")
        for number in range(3):
            await line.leaves(f"small {number}")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_no_gpu_is_given_to_two_at_once(steps: list[tuple[int, int, int, int]]) -> None:
    """Takers arrive, give up and leave in any order."""

    async def play() -> None:
        resources = some_resources()
        held: list[ResourceShare] = []
        waiting: list[asyncio.Task[ResourceShare]] = []
        for wanted_cpus, wanted, priority, choice in steps:
            match choice:
                case 0 | 1 if held:
                    held.pop(choice % len(held)).release()
                case 2 if waiting:
                    waiting[0].cancel()  # perhaps at the moment when it is served
                case 3 if (share := resources.try_take(ResourceAmount(gpus=wanted, cpus=wanted_cpus))) is not None:
                    held.append(share)
                case _:
                    amount = ResourceAmount(gpus=wanted, cpus=wanted_cpus)
                    waiting.append(asyncio.create_task(resources.take(amount, priority)))
            if choice % 2:
                await settled()
            held += [task.result() for task in waiting if task.done() and not task.cancelled()]
            waiting = [task for task in waiting if not task.done()]
            names = [name for share in held for name in share.gpus]
            assert len(names) == len(set(names))
            assert set(names) <= set(GPUS)
        for task in waiting:
            task.cancel()
        await settled()
        held += [task.result() for task in waiting if not task.cancelled()]
        for share in held:
            share.release()
        assert free_of(resources.stats()) == resources.total
        everything = await resources.take(ResourceAmount(gpus=3))
        assert everything.gpus == GPUS

    asyncio.run(play())


async def test_a_share_names_its_gpus() -> None:
    resources = some_resources()
    first, second = [await resources.take(ResourceAmount(gpus=number)) for number in (2, 1)]
    assert (first.gpus, second.gpus) == (("0", "1"), ("2",))
    assert resources.stats().gpus_set_aside == 3
    assert (await resources.take(cpus(1))).gpus == ()
    first.release()
    first.release()
    assert (await resources.take(ResourceAmount(gpus=1))).gpus == ("0",)


@pytest.mark.parametrize("amount", [cpus(4.5), ResourceAmount(memory_mb=1001), ResourceAmount(gpus=4)])
async def test_more_than_the_whole_is_never_waited_for(amount: ResourceAmount) -> None:
    with pytest.raises(RuntimeUnavailable, match="the node has 4 cpus, 1000 MiB"):
        await some_resources().take(amount)


async def test_parts_of_a_processor_add_up_exactly() -> None:
    resources = some_resources(cpus=0.3)
    slots = [await resources.take(cpus(0.1)) for _ in range(3)]
    for slot in slots:
        slot.release()
    assert resources.stats().cpus_set_aside == 0


async def test_the_sum_never_exceeds_the_whole() -> None:
    resources, chance = some_resources(), random.Random(7)

    async def taker() -> None:
        amount = ResourceAmount(
            cpus=chance.choice([0, 0.5, 1, 4]), memory_mb=chance.choice([0, 100, 1000]), gpus=chance.randrange(4)
        )
        async with await resources.take(amount, chance.randrange(3)):
            stats = resources.stats()
            assert 0 <= stats.cpus_set_aside <= stats.cpus
            assert 0 <= stats.memory_mb_set_aside <= stats.memory_mb
            assert 0 <= stats.gpus_set_aside <= stats.gpus
            for _ in range(chance.randrange(5)):
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(taker()) for _ in range(300)]
        for task in chance.sample(tasks, 60):
            await asyncio.sleep(0)
            task.cancel()
    assert free_of(resources.stats()) == resources.total
    assert resources.stats().waiting == 0


async def test_what_one_can_do_without_is_taken_only_where_nobody_waits() -> None:
    resources = some_resources()
    first = resources.try_take(cpus(3))
    assert first is not None
    assert resources.try_take(cpus(2)) is None
    assert resources.try_take(required(RuntimeSpec())) is not None
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(resources.take(cpus(2)))
        await settled()
        assert resources.try_take(cpus(1)) is None
        first.release()
        (await waiting).release()
    whole = resources.try_take(cpus(4))
    assert whole is not None
    whole.release()
    assert free_of(resources.stats()) == resources.total


def laid_out(folder: Path, group: str, files: dict[str, str]) -> Path:
    """Write a /proc and a /sys/fs/cgroup below `folder`. Returns `folder`."""
    for name, text in {"proc/self/cgroup": group, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(folder: Path) -> tuple[float, int]:
    amount = machine_capacity(proc=folder / "proc", cgroups=folder / "cgroup")
    return amount.cpus, amount.memory_mb


def test_without_bounds_it_is_the_machines(tmp_path: Path) -> None:
    whole = found(tmp_path)
    assert whole[0] >= 1
    assert whole[1] > 16
    unbounded = {"a/cpu.max": "max 100000\n", "a/memory.max": "max\n"}
    assert found(laid_out(tmp_path, "0::/a/b\n", unbounded)) == whole


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n", "memory.max": f"{64 * MEBIBYTE}\n"}),
        (
            "0::/a/b\n",
            {
                "a/b/cpu.max": "max 100000\n",
                "a/cpu.max": "25000 50000\n",
                "a/b/memory.max": f"{64 * MEBIBYTE}\n",
                "a/memory.max": f"{65 * MEBIBYTE}\n",
            },
        ),
        (
            "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n0::/\n",
            {
                "cpu/cpu.cfs_quota_us": "50000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": f"{64 * MEBIBYTE}\n",
            },
        ),
    ],
    ids=["version 2 in a container", "version 2, from above", "version 1 in a container"],
)
def test_the_tightest_bound_counts(tmp_path: Path, group: str, files: dict[str, str]) -> None:
    assert found(laid_out(tmp_path, group, files)) == (0.5, 64)


def test_no_bound_of_version_1(tmp_path: Path) -> None:
    whole = found(tmp_path)
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert found(laid_out(tmp_path, "3:cpu,cpuacct:/\n2:memory:/\n", files)) == whole


def gpus_of(folder: Path, *, settings: SandboxesConfig) -> tuple[str, ...]:
    """Return the GPUs of a node with these settings on a machine with two GPUs."""
    for number, bus in enumerate(("0000:07:00.0", "0000:0a:00.0")):
        (folder / "proc/gpus" / bus).mkdir(parents=True)
        text = f"Model: Test\nGPU UUID: GPU-{number}{number}\nDevice Minor: {number}\n"
        (folder / "proc/gpus" / bus / "information").write_text(text)
        (folder / "dev").mkdir(exist_ok=True)
        (folder / f"dev/nvidia{number}").touch()
    return capacity_of(settings, NvidiaDriver(proc=folder / "proc", dev=folder / "dev")).gpus


def test_a_machine_has_the_gpus_that_are_found_or_those_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(tmp_path / "a", settings=SandboxesConfig()) == ("0", "1")
    assert gpus_of(tmp_path / "b", settings=SandboxesConfig(gpus=())) == ()
    assert gpus_of(tmp_path / "c", settings=SandboxesConfig(gpus=("1", "amd.com/gpu=0"))) == ("1", "amd.com/gpu=0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_of(tmp_path / "d", settings=SandboxesConfig()) == ("1",)
    with pytest.raises(InvalidField, match=r"'1' and 'nvidia.com/gpu=GPU-11' are the same GPU") as refused:
        gpus_of(tmp_path / "e", settings=SandboxesConfig(gpus=("0", "1", "nvidia.com/gpu=GPU-11")))
    assert refused.value.field == "sandboxes.gpus"
