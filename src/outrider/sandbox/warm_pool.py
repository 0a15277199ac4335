"""The warm pool: sandboxes of the most recently requested kinds, started and prepared before a session needs them.

Sandboxes of one kind have the same runtime spec, uploaded files and harness mounts. Invariants:

- A sandbox in the pool is unused. It leaves the pool in one of two ways: the pool gives it to one session, if it is
  alive and young, or the pool stops it.
- The memory of all sandboxes of the pool, including those being started or stopped, stays within the limit.
- If an external service such as Kubernetes has no room for a session's sandbox, the pool stops one of its warm
  sandboxes.
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

from outrider.concurrency.chores import Chores
from outrider.concurrency.events import wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import InvalidField, OutriderError, RequestError, RuntimeFailure
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.runtimes.base import TellsImage
from outrider.sandbox.runtimes.tool_server.uploads import entries
from outrider.sandbox.sandbox import Sandbox, Sandboxes
from outrider.schemas import WarmStats
from outrider.spec import RuntimeSpec, Upload

log = logging.getLogger("outrider.node")

ASSUMED_MB = 64
"""Memory in MB to assume if a task declares none. By measurement, an idle sandbox takes 2 to 4 MiB. The rest is for the
files of the prepare steps, because a sandbox keeps its files in memory."""

MAX_STARTING = 2
"""Maximum number of warm sandboxes that start at once. The number is small, because these starts slow down the starts
for waiting sessions."""

START_SECONDS = 3600.0
CHECK_SECONDS = 30.0
"""Seconds between two checks of the ready sandboxes."""

PROBE_SECONDS = 5.0
MAX_AGE_SHARE = 0.1
"""A warm sandbox may have used up at most this share of its lifetime when a session gets it, because only the rest is
left for the session."""

MAX_FAILURES = 6
"""After this many failed starts in a row, a kind is not started again until a session requests it."""

PAUSES = RetryPolicy(first=1.0, longest=300.0)
"""Seconds to wait after a failed start before the next start of the same kind."""

NO_ROOM_SECONDS = 60.0
"""If there was no room for a session's sandbox, no warm sandbox of the same runtime starts for this many seconds."""


class WarmLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a warm pool.

    `each`: maximum number of sandboxes of one kind.
    `memory_mb`: maximum memory of all sandboxes together. Each counts with the memory that its task declares, or with
        ASSUMED_MB.
    """

    each: int = 0
    memory_mb: int = 0


class WarmSandbox(msgspec.Struct, frozen=True):
    """A ready sandbox. `since` is when its start began, by the pool's clock."""

    sandbox: Sandbox
    since: float


class SandboxKind:
    """All ready sandboxes of one kind, the oldest first. `target` is the number of sandboxes to keep."""

    def __init__(self, spec: RuntimeSpec, mounts: tuple[Path, ...]) -> None:
        self.spec = spec
        self.mounts = mounts
        self.memory_mb = spec.resources.memory_mb or ASSUMED_MB
        self.max_age = MAX_AGE_SHARE * spec.lifetime_seconds
        self.target = 0
        self.starting = 0
        self.ready: deque[WarmSandbox] = deque()
        self.failures = 0
        """Number of failed starts since the last success."""
        self.retry_at = 0.0
        """The event loop's time before which no start is tried."""

    def most(self, each: int) -> int:
        """Return the highest target for this kind. The target is normally `each`. While starts of this kind fail, it is
        at most 1. After MAX_FAILURES failed starts in a row, it is 0. It is also 0 if a sandbox would be too old before
        its first check."""
        if self.max_age < CHECK_SECONDS:
            return 0
        if self.failures:
            return min(each, 1) if self.failures < MAX_FAILURES else 0
        return each


class WarmPool:
    """The warm sandboxes of a node. The block `async with WarmPool(...)` keeps the pool full, and stops all its
    sandboxes at the end."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        limits: WarmLimits,
        *,
        pauses: RetryPolicy = PAUSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes = sandboxes
        self._limits = limits
        self._pauses = pauses
        self._clock = clock
        self._kinds: OrderedDict[str, SandboxKind] = OrderedDict()
        """The kinds by `kind_key`, the most recently requested last."""
        self._memory_mb = 0
        """Memory of all sandboxes that are ready, starting or stopping."""
        self._numbers = count()
        self._work = asyncio.Event()
        self._without_room: set[str] = set()
        """Runtimes that had no room for a session's sandbox. One warm sandbox of each is stopped next."""
        self._taken = 0
        self._misses = 0

    async def __aenter__(self) -> Self:
        self._chores = await Chores(self._sandboxes.background.failures).__aenter__()
        self._end_subscription = self._sandboxes.host.no_room.subscribe(self._note_no_room)
        self._chores.begin("warm sandboxes", self._keep_full)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_subscription()
        self._chores.cancel()
        await self._chores.__aexit__(None, None, None)
        for sandbox_kind in self._kinds.values():
            sandbox_kind.target = 0
        await self._stop_surplus()

    def stats(self) -> WarmStats:
        ready = sum(len(kind.ready) for kind in self._kinds.values())
        return WarmStats(ready=ready, taken=self._taken, misses=self._misses)

    async def take(self, spec: RuntimeSpec, mounts: tuple[Path, ...]) -> Sandbox | None:
        """Return a ready sandbox, which the caller must stop. If there is none, return None, and start sandboxes of
        this kind for later sessions. Sandboxes with GPUs are never kept warm, because other sessions could not use the
        GPUs meanwhile."""
        if not self._limits.each or spec.resources.gpus:
            return None
        key = await asyncio.to_thread(kind_key, spec, mounts, self._sandboxes.paths)
        if key is None:
            return None
        kind = self._kinds.setdefault(key, SandboxKind(spec, mounts))
        self._kinds.move_to_end(key)
        while kind.ready:
            warm = kind.ready.popleft()
            good = False
            try:
                good = not self._too_old(warm, kind) and await usable(warm.sandbox)
            finally:  # the sandbox is stopped even if `take` is cancelled
                if not good:
                    await self._stop(warm, kind)
            if good:
                self._taken += 1
                self._free_memory(kind)
                return warm.sandbox
        self._misses += 1
        self._work.set()
        return None

    def _too_old(self, warm: WarmSandbox, kind: SandboxKind) -> bool:
        return self._clock() - warm.since > kind.max_age

    async def _stop(self, warm: WarmSandbox, kind: SandboxKind) -> None:
        try:
            await warm.sandbox.stop()
        except Exception:  # an error in a plugin must not end the node's sessions
            log.exception("a warm sandbox cannot be stopped")
        finally:
            self._free_memory(kind)

    def _free_memory(self, kind: SandboxKind) -> None:
        """Subtract the memory of a sandbox that has left the pool, so that another one can start."""
        self._memory_mb -= kind.memory_mb
        self._work.set()

    def _note_no_room(self, runtime: str) -> None:
        self._without_room.add(runtime)
        self._work.set()

    async def _make_room(self) -> None:
        """For each runtime without room for a session's sandbox, stop one warm sandbox: the oldest one of the kind
        whose last request is longest ago."""
        later = asyncio.get_running_loop().time() + NO_ROOM_SECONDS
        while self._without_room:
            runtime = self._without_room.pop()
            kinds = [kind for kind in self._kinds.values() if kind.spec.sandbox_kind == runtime]
            for kind in kinds:
                kind.retry_at = max(kind.retry_at, later)
            if (last := next((kind for kind in kinds if kind.ready), None)) is not None:
                await self._stop(last.ready.popleft(), last)

    async def _keep_full(self) -> None:
        """Start missing sandboxes, stop surplus ones, and then wait until there may be more to do."""
        self._work.clear()
        await self._make_room()
        left = self._limits.memory_mb
        for kind in reversed(self._kinds.values()):  # recently requested kinds get memory first
            kind.target = min(kind.most(self._limits.each), left // kind.memory_mb)
            left -= kind.target * kind.memory_mb
        await self._stop_surplus()
        self._start_missing()
        now = asyncio.get_running_loop().time()
        retries = [kind.retry_at - now for kind in self._kinds.values() if kind.retry_at > now]
        await wait_for_event(self._work, seconds=min([CHECK_SECONDS, *retries]))
        if not self._work.is_set():
            await self._stop_unusable()

    async def _stop_surplus(self) -> None:
        """Stop sandboxes that are too old or that exceed their kind's target. Forget a kind that has no sandboxes and
        whose target is 0."""
        for key, kind in list(self._kinds.items()):
            while len(kind.ready) > kind.target or (kind.ready and self._too_old(kind.ready[0], kind)):
                await self._stop(kind.ready.popleft(), kind)
            if not kind.target and not kind.starting and not kind.ready:
                del self._kinds[key]

    def _start_missing(self) -> None:
        now = asyncio.get_running_loop().time()
        starting = sum(kind.starting for kind in self._kinds.values())
        for kind in reversed(self._kinds.values()):
            missing = kind.target - len(kind.ready) - kind.starting if kind.retry_at <= now else 0
            for _ in range(min(missing, MAX_STARTING - starting)):
                if self._memory_mb + kind.memory_mb > self._limits.memory_mb:
                    return
                starting += 1
                kind.starting += 1
                self._memory_mb += kind.memory_mb
                self._chores.create_task(self._start(kind), name="start a warm sandbox")

    async def _start(self, kind: SandboxKind) -> None:
        since = self._clock()
        try:
            async with asyncio.timeout(START_SECONDS):
                sandbox = await self._sandboxes.make(
                    kind.spec, f"warm-{next(self._numbers)}", 1, mounts=kind.mounts, ahead=True
                )
                await sandbox.ready()
        # The runtime may be a plugin, which can raise any exception. A session that needs such a sandbox will report
        # the error.
        except Exception as error:
            self._free_memory(kind)
            kind.retry_at = asyncio.get_running_loop().time() + self._pauses.wait(kind.failures)
            kind.failures += 1
            if kind.failures == 1:
                text = error.message if isinstance(error, OutriderError) else repr(error)
                log.warning("a warm sandbox cannot be started, and is tried again after growing pauses: %s", text)
        except BaseException:
            self._free_memory(kind)
            raise
        else:
            kind.failures = 0
            kind.ready.append(WarmSandbox(sandbox, since))
        finally:
            kind.starting -= 1
            self._work.set()

    async def _stop_unusable(self) -> None:
        for kind in list(self._kinds.values()):
            for warm in list(kind.ready):
                # a session may take the sandbox during the check
                if not await usable(warm.sandbox) and warm in kind.ready:
                    kind.ready.remove(warm)
                    await self._stop(warm, kind)


async def usable(sandbox: Sandbox) -> bool:
    """Return whether the sandbox still works, and its image is still the one that a new sandbox would get."""
    runtime = sandbox.runtime
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if isinstance(runtime, TellsImage) and not await runtime.image_is_current():
                return False
            await runtime.read("/", limit=1)  # cheap, because it starts no process
    except IsADirectoryError:
        return True
    except Exception:  # the runtime may be a plugin, which can raise any exception
        return False
    return False


def kind_key(spec: RuntimeSpec, mounts: tuple[Path, ...], paths: HostPaths) -> str | None:
    """Return a digest of everything that goes into a sandbox. The digest changes when an uploaded file, a mount or an
    image changes. Returns None if a path is not readable or not allowed. Blocks."""
    digest = hashlib.sha256(spec.model_dump_json().encode())
    digest.update(repr(mounts).encode())
    try:
        for source in (*mounts, *(Path(mount.source) for mount in spec.mounts)):
            status = source.stat()  # not lstat: the digest must change if a link gets another target
            digest.update(f"{status.st_dev} {status.st_ino}\0".encode())
        for step in spec.prepare:
            if isinstance(step, Upload):
                for entry in entries(paths.upload(step.upload, field="upload")):
                    digest.update(
                        f"{entry.name}\0{entry.link}\0{_state(entry.path)}\0".encode("utf-8", "surrogateescape")
                    )
        if spec.network is not None and spec.network.replay is not None:
            digest.update(_state(paths.upload(spec.network.replay, field="replay")).encode())
        for root in filter(None, (spec.rootfs, spec.image)):
            if os.path.isabs(root):
                state = _state(Path(root).resolve(strict=True))
            else:
                try:
                    state = ImageStore().image(root).digest
                except RequestError:
                    # The image belongs to a container engine, so its state is unknown here. `usable` checks later that
                    # the image is still current.
                    state = ""
            digest.update(state.encode())
    except (RuntimeFailure, InvalidField, OSError):
        return None
    return digest.hexdigest()


def _state(path: Path) -> str:
    """Return a text that changes when the file changes. The file's content is not read."""
    status = path.lstat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
