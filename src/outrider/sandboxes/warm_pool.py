"""Sandboxes that are started and prepared before a session wants them, of the kinds that were wanted last.

A kind is a runtime spec, what its steps upload, and the harness's mounts. It knows no session. Invariant: a sandbox
that stands here has been touched by nobody; it is given away once, alive and young, or stopped here; and all that
stand or are being made are within the budget of memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from outrider.concurrency.backoff import Backoff
from outrider.errors import OutriderError, RequestError, RuntimeFailure
from outrider.rootfs.store import ImageStore
from outrider.runtimes.base import Aging
from outrider.runtimes.tool_server.uploads import entries
from outrider.sandboxes.sandbox import Sandbox, Sandboxes
from outrider.schemas import WarmStats
from outrider.spec import RuntimeSpec, Upload

log = logging.getLogger("outrider.node")

ASSUMED_MB = 64
"""Of a sandbox whose task declares none. Idle ones take 2 to 4 MiB, as measured; the rest is for what their prepare
steps have written, which lives in memory."""
AT_ONCE = 2
"""Made at once: sessions that wait for theirs come first."""
MAKE_SECONDS = 3600.0
LOOK_SECONDS = 30.0
PROBE_SECONDS = 5.0
SHARE = 0.1
"""Of its lifetime, that a sandbox may have stood here when it is given away: the rest is its session's."""
TRIES = 6
"""In a row that fail, before a kind is given up until it is wanted again."""
PAUSES = Backoff(first=1.0, longest=300.0)
"""Between tries to make one of a kind that cannot be made."""


class WarmLimits(msgspec.Struct, frozen=True, kw_only=True):
    """So many sandboxes of a kind, as long as all of them are declared, or assumed, to take no more than so much."""

    each: int = 0
    memory_mb: int = 0


class Standing(msgspec.Struct, frozen=True):
    """A sandbox that can be given away, and when its lifetime began."""

    sandbox: Sandbox
    born: float


class Shelf:
    """The sandboxes of one kind, the oldest first. `wanted` is how many there should be, `longest` how many seconds one
    of them may stand."""

    def __init__(self, spec: RuntimeSpec, mounts: tuple[Path, ...]) -> None:
        self.spec = spec
        self.mounts = mounts
        self.cost = spec.resources.memory_mb or ASSUMED_MB
        self.longest = SHARE * spec.lifetime_seconds
        self.wanted = 0
        self.making = 0
        self.ready: deque[Standing] = deque()
        self.failures = 0
        self.not_before = 0.0

    def worth(self, each: int) -> int:
        """How many it is worth to make: of what fails, one at a time, and after some tries none; and none that would be
        too old when they are looked at for the first time."""
        if self.longest < LOOK_SECONDS:
            return 0
        if self.failures:
            return min(each, 1) if self.failures < TRIES else 0
        return each


class Warm:
    """`async with Warm(...) as warm`: it keeps itself full; leaving it stops all that is left."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        limits: WarmLimits,
        *,
        pauses: Backoff = PAUSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes = sandboxes
        self._limits = limits
        self._pauses = pauses
        self._clock = clock
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        """The kind that was wanted last is the last."""
        self._memory_mb = 0
        self._numbers = count()
        self._work = asyncio.Event()
        self._taken = 0
        self._misses = 0

    async def __aenter__(self) -> Self:
        self._keeper = self._sandboxes.background.create_task(self._keep(), name="keep sandboxes warm")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        for shelf in self._shelves.values():
            shelf.wanted = 0
        await self._trim()

    def stats(self) -> WarmStats:
        ready = sum(len(shelf.ready) for shelf in self._shelves.values())
        return WarmStats(ready=ready, taken=self._taken, misses=self._misses)

    async def take(self, spec: RuntimeSpec, mounts: tuple[Path, ...]) -> Sandbox | None:
        """A ready one, the caller's to stop from now on. None when there is none; there will be some for the next."""
        if not self._limits.each:
            return None
        key = await asyncio.to_thread(kind_of, spec, mounts, self._sandboxes.files)
        if key is None:
            return None
        shelf = self._shelves.setdefault(key, Shelf(spec, mounts))
        self._shelves.move_to_end(key)
        while shelf.ready:
            standing = shelf.ready.popleft()
            if await self._good(standing, shelf):
                self._taken += 1
                self._give_back(shelf)
                return standing.sandbox
        self._misses += 1
        self._work.set()
        return None

    async def _good(self, standing: Standing, shelf: Shelf) -> bool:
        """Whether one that was taken off its shelf can be given away; else it is stopped."""
        good = False
        try:
            good = not self._old(standing, shelf) and await usable(standing.sandbox)
        finally:
            if not good:
                await self._stop(standing, shelf)
        return good

    def _old(self, standing: Standing, shelf: Shelf) -> bool:
        return self._clock() - standing.born > shelf.longest

    async def _stop(self, standing: Standing, shelf: Shelf) -> None:
        try:
            await standing.sandbox.stop()
        except Exception:  # a bug of a plugin must not cost the node its sessions
            log.exception("a sandbox that was made ahead cannot be stopped")
        finally:
            self._give_back(shelf)

    def _give_back(self, shelf: Shelf) -> None:
        """One of this shelf takes none of the budget any more; only then another can be made in its stead."""
        self._memory_mb -= shelf.cost
        self._work.set()

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as makers:
            while True:
                self._work.clear()
                self._plan()
                await self._trim()
                self._fill(makers)
                if not await self._rung():
                    await self._look()

    def _plan(self) -> None:
        """Share the budget out, to the kinds that were wanted last before others."""
        left = self._limits.memory_mb
        for shelf in reversed(self._shelves.values()):
            shelf.wanted = min(shelf.worth(self._limits.each), left // shelf.cost)
            left -= shelf.wanted * shelf.cost

    async def _trim(self) -> None:
        """Stop what nobody wants any more or should be given, and forget kinds of which none is to be kept."""
        for key, shelf in list(self._shelves.items()):
            while len(shelf.ready) > shelf.wanted or (shelf.ready and self._old(shelf.ready[0], shelf)):
                await self._stop(shelf.ready.popleft(), shelf)
            if not shelf.wanted and not shelf.making and not shelf.ready:
                del self._shelves[key]

    def _fill(self, makers: asyncio.TaskGroup) -> None:
        now = asyncio.get_running_loop().time()
        making = sum(shelf.making for shelf in self._shelves.values())
        for shelf in reversed(self._shelves.values()):
            lacks = shelf.wanted - len(shelf.ready) - shelf.making if shelf.not_before <= now else 0
            for _ in range(min(lacks, AT_ONCE - making)):
                if self._memory_mb + shelf.cost > self._limits.memory_mb:
                    return
                making += 1
                shelf.making += 1
                self._memory_mb += shelf.cost
                makers.create_task(self._make(shelf), name="make a warm sandbox")

    async def _make(self, shelf: Shelf) -> None:
        try:
            async with asyncio.timeout(MAKE_SECONDS):
                standing = await self._made(shelf)
        except Exception as error:  # of a plugin, perhaps: it is the next session's to meet it
            self._give_back(shelf)
            self._failed(shelf, error)
        except BaseException:  # also a cancel: what was begun is undone
            self._give_back(shelf)
            raise
        else:
            shelf.failures = 0
            shelf.ready.append(standing)
        finally:
            shelf.making -= 1
            self._work.set()

    async def _made(self, shelf: Shelf) -> Standing:
        born = self._clock()
        sandbox = self._sandboxes.make(shelf.spec, f"warm-{next(self._numbers)}", 1, mounts=shelf.mounts)
        await sandbox.ready()
        return Standing(sandbox, born)

    def _failed(self, shelf: Shelf, error: Exception) -> None:
        pause = self._pauses.wait(shelf.failures)
        shelf.not_before = asyncio.get_running_loop().time() + pause
        shelf.failures += 1
        if shelf.failures == 1:
            text = error.message if isinstance(error, OutriderError) else repr(error)
            log.warning("a sandbox cannot be made ahead, and is tried again, more and more rarely: %s", text)

    async def _rung(self) -> bool:
        """Whether there is something new to do, before it is time to look after what stands or to try again."""
        now = asyncio.get_running_loop().time()
        later = [shelf.not_before - now for shelf in self._shelves.values() if shelf.not_before > now]
        try:
            async with asyncio.timeout(min([LOOK_SECONDS, *later])):
                await self._work.wait()
        except TimeoutError:
            return False
        return True

    async def _look(self) -> None:
        """Stop those that nobody can use any more; who wants one meanwhile may have it."""
        for shelf in list(self._shelves.values()):
            for standing in list(shelf.ready):
                if not await usable(standing.sandbox) and standing in shelf.ready:
                    shelf.ready.remove(standing)
                    await self._stop(standing, shelf)


async def usable(sandbox: Sandbox) -> bool:
    """Whether a session may have it: it does what it is told, by the cheapest of all calls, which starts no process;
    and its image is still what a new one would get."""
    runtime = sandbox.runtime
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if isinstance(runtime, Aging) and not await runtime.current():
                return False
            await runtime.read("/", limit=1)
    except IsADirectoryError:
        return True
    except Exception:  # of whatever kind, also of a plugin's own: it is not what was asked for
        return False
    return False


def kind_of(spec: RuntimeSpec, mounts: tuple[Path, ...], files: Path) -> str | None:
    """Tells kinds apart, also before and after a change of what a sandbox is made from. None for what cannot be read.
    Blocks."""
    kind = hashlib.sha256(spec.model_dump_json().encode())
    kind.update(repr(mounts).encode())
    try:
        for source in (*mounts, *(Path(mount.source) for mount in spec.mounts)):
            status = source.stat()  # of what is shown: a link may lead elsewhere tomorrow
            kind.update(f"{status.st_dev} {status.st_ino}\0".encode())
        for step in spec.prepare:
            if isinstance(step, Upload):
                for entry in entries(files / step.upload):
                    kind.update(
                        f"{entry.name}\0{entry.link}\0{_state(entry.path)}\0".encode("utf-8", "surrogateescape")
                    )
        for root in filter(None, (spec.rootfs, spec.image)):
            kind.update((_state(Path(root).resolve(strict=True)) if os.path.isabs(root) else _digest(root)).encode())
    except (RuntimeFailure, OSError):
        return None
    return kind.hexdigest()


def _state(path: Path) -> str:
    status = path.lstat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _digest(image: str) -> str:
    """Of an image by that name, "" for one that only its runtime knows, which is then Aging."""
    try:
        return ImageStore().image(image).digest
    except RequestError:
        return ""
