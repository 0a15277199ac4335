"""The warm pool gives each sandbox to one session, unused and alive, stays within its memory limit, and stops all its
sandboxes at the end."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import pytest

from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import RuntimeFailure
from outrider.lab.fakes.memory_runtime.runtime import MemoryLedger, MemoryRuntime
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.base import MAX_OUTPUT, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandbox, Sandboxes
from outrider.sandbox.warm_pool import (
    ASSUMED_MB,
    CHECK_SECONDS,
    MAX_AGE_SHARE,
    MAX_FAILURES,
    WarmLimits,
    WarmPool,
    kind_key,
)
from outrider.spec import RuntimeSpec
from support.waiting import until

KIND = "sandboxes.test_warm_pool:Watched"
AT_ONCE = RetryPolicy(first=0.0, longest=0.0)


class Watcher:
    """Counters and settings of one test's sandboxes. `started` is set at each start, the next `fails` starts fail,
    `now` is the pool's clock, and `image` is the current image."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.started = asyncio.Event()
        self.tries = 0
        self.fails = 0
        self.standing = 0
        self.most = 0
        self.now = 0.0
        self.image = ""


_watcher: ContextVar[Watcher] = ContextVar("watcher")


class Watched(MemoryRuntime):
    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls.with_ledger(_watcher.get().ledger)(spec, context)

    async def start(self) -> None:
        watcher = _watcher.get()
        watcher.tries += 1
        watcher.started.set()
        if watcher.fails:
            watcher.fails -= 1
            raise RuntimeFailure("no more of these")
        await super().start()
        self._image = watcher.image
        watcher.standing += 1
        watcher.most = max(watcher.most, watcher.standing)

    async def image_is_current(self) -> bool:
        return self._image == _watcher.get().image

    async def read(self, path: str, *, limit: int = MAX_OUTPUT, follow: bool = True) -> bytes:
        await asyncio.sleep(0)  # every real runtime waits for a reply here
        return await super().read(path, limit=limit, follow=follow)

    async def stop(self) -> None:
        if self._state == "running":
            _watcher.get().standing -= 1
        await super().stop()


@contextmanager
def watcher() -> Iterator[Watcher]:
    made = Watcher()
    token = _watcher.set(made)
    try:
        yield made
    finally:
        _watcher.reset(token)


@asynccontextmanager
async def a_pool(*, each: int = 2, memory_mb: int = 4096) -> AsyncIterator[tuple[WarmPool, Watcher]]:
    with tempfile.TemporaryDirectory(prefix="or-") as name, watcher() as seen:
        folder = Path(name)
        async with Host(folder) as host, Chores(Failures()) as owner:
            sandboxes = Sandboxes(host=host, background=owner, paths=HostPaths.of(folder), gateway_socket=folder / "s")
            limits = WarmLimits(each=each, memory_mb=memory_mb)
            async with WarmPool(sandboxes, limits, pauses=AT_ONCE, clock=lambda: seen.now) as pool:
                yield pool, seen
        assert seen.ledger.balanced
        assert set(seen.ledger.stopped.values()) <= {1}
        assert [left for left in os.listdir(folder) if left.startswith("warm")] == []


def spec(number: int = 0, **fields: Any) -> RuntimeSpec:
    return RuntimeSpec.model_validate({"kind": KIND, "env": {"N": str(number)}, **fields})


async def taken(pool: WarmPool, wanted: RuntimeSpec) -> Sandbox:
    sandbox = await pool.take(wanted, ())
    assert sandbox is not None
    return sandbox


async def test_the_second_to_want_one_is_given_it_ready() -> None:
    async with a_pool() as (pool, seen):
        wanted = spec(prepare=[{"run": "echo x > prepared"}])
        assert await pool.take(wanted, ()) is None
        await until(lambda: pool.stats().ready == 2)
        first, second = await taken(pool, wanted), await taken(pool, wanted)
        assert first is not second
        await first.ready()  # already done: nothing starts twice
        assert await first.runtime.read("prepared") == b"x\n"
        await until(lambda: pool.stats().ready == 2)
        assert (pool.stats().taken, pool.stats().misses) == (2, 1)
        assert seen.standing == 4
        await first.stop()
        await second.stop()
        await second.stop()


async def test_none_are_made_unless_they_are_asked_for() -> None:
    async with a_pool(each=0) as (pool, seen):
        assert await pool.take(spec(), ()) is None
        assert (pool.stats().misses, seen.tries) == (0, 0)


async def test_another_spec_or_other_mounts_are_another_kind(tmp_path: Path) -> None:
    async with a_pool() as (pool, _):
        assert await pool.take(spec(1), ()) is None
        await until(lambda: pool.stats().ready == 2)
        assert await pool.take(spec(2), ()) is None
        assert await pool.take(spec(1), (tmp_path,)) is None
        await (await taken(pool, spec(1))).stop()


async def test_a_change_of_what_is_uploaded_is_another_kind(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree/file"
    file.write_text("one")
    wanted = spec(prepare=[{"upload": "tree", "to": "t"}])
    first = kind_key(wanted, (), HostPaths.of(tmp_path))
    assert first == kind_key(wanted, (), HostPaths.of(tmp_path))
    file.write_text("other")
    second = kind_key(wanted, (), HostPaths.of(tmp_path))
    assert second not in (first, None)
    (tmp_path / "tree/out").symlink_to("/etc/passwd")
    assert kind_key(wanted, (), HostPaths.of(tmp_path)) is None


async def test_what_is_mounted_by_a_link_that_was_changed_is_another_kind(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("old")
    wanted = spec(mounts=[{"source": str(link), "target": "/data"}])
    first, as_program = kind_key(wanted, (), HostPaths.of(tmp_path)), kind_key(spec(), (link,), HostPaths.of(tmp_path))
    (tmp_path / "old/more").touch()  # the change is visible in a running sandbox
    assert kind_key(wanted, (), HostPaths.of(tmp_path)) == first
    link.unlink()
    link.symlink_to("new")
    assert kind_key(wanted, (), HostPaths.of(tmp_path)) not in (first, None)
    assert kind_key(spec(), (link,), HostPaths.of(tmp_path)) not in (as_program, None)
    link.unlink()
    assert kind_key(wanted, (), HostPaths.of(tmp_path)) is None


async def test_a_name_that_stands_for_another_image_now_is_not_given_what_was_made_of_the_old_one() -> None:
    async with a_pool() as (pool, seen):
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)
        seen.image = "built anew"
        given = await pool.take(spec(), ())
        assert seen.ledger.stopped.keys() >= {("warm-0", 1), ("warm-1", 1)}
        if given is not None:  # made in the meantime
            assert await given.runtime.image_is_current()  # type: ignore[attr-defined]  # a Watched
            await given.stop()
        await until(lambda: pool.stats().ready == 2)
        await (await taken(pool, spec())).stop()


async def test_the_budget_is_kept_for_the_kinds_wanted_last() -> None:
    async with a_pool(memory_mb=4 * ASSUMED_MB) as (pool, seen):
        for number in range(3):
            assert await pool.take(spec(number), ()) is None
            await until(lambda number=number: pool.stats().ready == min(4, 2 + 2 * number))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        await until(lambda: seen.ledger.stopped.keys() == {("warm-0", 1), ("warm-1", 1)})
        await until(lambda: pool.stats().ready == 4)
        assert seen.most == 4
        assert await pool.take(spec(0), ()) is None
        await (await taken(pool, spec(2))).stop()


async def test_declared_memory_counts() -> None:
    async with a_pool(each=8, memory_mb=1000) as (pool, _):
        assert await pool.take(spec(resources={"memory_mb": 300}), ()) is None
        await until(lambda: pool.stats().ready == 3)
        assert await pool.take(spec(resources={"memory_mb": 1001}), ()) is None
        await asyncio.sleep(0)
        assert pool.stats().ready <= 3


async def test_what_has_died_is_not_given_away() -> None:
    async with a_pool() as (pool, seen):
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)
        (kind,) = pool._kinds.values()
        await kind.ready[0].sandbox.runtime.stop()
        alive = await taken(pool, spec())
        assert await alive.runtime.exec("true", seconds=1)
        assert ("warm-0", 1) in seen.ledger.stopped
        await alive.stop()


async def test_what_has_stood_for_too_long_is_not_given_away() -> None:
    async with a_pool() as (pool, seen):
        wanted = spec(lifetime_seconds=1000)
        assert await pool.take(wanted, ()) is None
        await until(lambda: pool.stats().ready == 2)
        seen.now = 101.0
        given = await pool.take(wanted, ())  # none, or one that was made while the old ones were stopped
        assert seen.ledger.stopped.keys() == {("warm-0", 1), ("warm-1", 1)}
        await until(lambda: pool.stats().ready == 2)
        seen.now = 200.0
        await (await taken(pool, wanted)).stop()
        if given is not None:
            await given.stop()


async def test_what_has_stood_for_too_long_makes_room_for_new_ones() -> None:
    """Sandboxes that are too old are replaced whenever the pool is filled. Here, a session requests another kind, whose
    lifetime is too short for warm sandboxes."""
    async with a_pool() as (pool, seen):
        assert await pool.take(spec(lifetime_seconds=1000), ()) is None
        await until(lambda: pool.stats().ready == 2)
        seen.now = 101.0
        short = spec(lifetime_seconds=CHECK_SECONDS / MAX_AGE_SHARE - 1)
        assert await pool.take(short, ()) is None
        await until(lambda: len(seen.ledger.started) == 4 and pool.stats().ready == 2)
        assert seen.ledger.stopped.keys() == {("warm-0", 1), ("warm-1", 1)}
        assert await pool.take(short, ()) is None


async def test_another_is_made_as_soon_as_the_budget_allows() -> None:
    async with a_pool(memory_mb=2 * ASSUMED_MB) as (pool, _):
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)
        first = await taken(pool, spec())
        await until(lambda: pool.stats().ready == 2)
        await first.stop()


async def test_a_failing_kind_is_told_once_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with a_pool() as (pool, seen):
        seen.fails = 1000
        assert await pool.take(spec(), ()) is None
        await until(lambda: not pool._kinds)
        assert seen.tries in (MAX_FAILURES, MAX_FAILURES + 1)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        seen.fails = 0
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)


async def test_a_kind_that_fails_for_a_while_is_made_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with a_pool() as (pool, seen):
        seen.fails = 3
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)
        assert len(caplog.records) == 1


async def test_a_hanging_preparation_is_ended_with_the_node() -> None:
    async with a_pool() as (pool, seen):
        assert await pool.take(spec(prepare=[{"run": "sleep 60"}]), ()) is None
        await seen.started.wait()


async def test_a_cancelled_take_keeps_nothing() -> None:
    async with a_pool() as (pool, _):
        assert await pool.take(spec(), ()) is None
        await until(lambda: pool.stats().ready == 2)
        (kind,) = pool._kinds.values()
        for standing in kind.ready:
            standing.sandbox.runtime.read = _never  # type: ignore[method-assign]  # a sandbox that does not reply
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(pool.take(spec(), ()))
            await until(lambda: pool.stats().ready == 1)
            taking.cancel()


async def _never(path: str, *, limit: int = 0, follow: bool = True) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("seed", "room"), [(0, 2), (1, 5), (2, 100), (3, 100)])
async def test_a_storm_of_takers(seed: int, room: int) -> None:
    """With 300 concurrent sessions, some of which fail or are cancelled, the pool gives each sandbox to one session
    only, and unused."""
    rng = random.Random(seed)
    budget = room * ASSUMED_MB

    async def session(pool: WarmPool, given: set[int], fate: str) -> None:
        await asyncio.sleep(rng.uniform(0, 0.5))
        wanted = spec(rng.randrange(4), prepare=[{"run": "false" if fate == "fails" else "true"}])
        sandbox = await pool.take(wanted, ())
        if sandbox is None:
            return
        try:
            assert id(sandbox.runtime) not in given
            given.add(id(sandbox.runtime))
            kept.append(sandbox)
            with pytest.raises(FileNotFoundError):
                await sandbox.runtime.read("used")
            await sandbox.runtime.write("used", b"")
            await asyncio.sleep(rng.uniform(0, 0.005))
        finally:
            await sandbox.stop()

    async def storm(pool: WarmPool, given: set[int]) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(300):
                fate = rng.choice(("well", "well", "well", "fails", "cancelled"))
                tasks.append((fate, group.create_task(session(pool, given, fate))))
            await asyncio.sleep(0.2)
            for fate, task in tasks:
                if fate == "cancelled":
                    await asyncio.sleep(0)
                    task.cancel()

    kept: list[Sandbox] = []
    async with a_pool(each=3, memory_mb=budget) as (pool, seen):
        given: set[int] = set()
        await storm(pool, given)
        while room == 100 and len(given) <= 10:  # the machine was too busy to make them in time
            await storm(pool, given)
        assert pool.stats().taken == len(given)
        assert pool._memory_mb <= budget
    assert seen.standing == 0
