"""A pool that follows another process's: it has the same engines and the same policy, and generates on them itself.

What the leading pool says comes as `PoolState`s; it has vetted the engines, and alone tells them to pause, to load
weights and to go on. It knows nothing of how the processes are connected. Invariants: while the leader is paused no
generation begins here; an engine that the leader does not use serves nobody here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from outrider.engines.base import RemembersVersions
from outrider.engines.pool.followed_policy import FollowedPolicy
from outrider.engines.pool.pool import AnyEngine, EnginePool
from outrider.engines.pool.sharing import EngineState, PoolState
from outrider.errors import NotFound, OutriderError
from outrider.spec import EngineSpec

log = logging.getLogger("outrider.engine")


class PoolFollower:
    """Keeps a pool like the leader's, within `async with PoolFollower(...)`.

    `forwarded` makes an engine of one that only the leader's process has. Say what the leader says with `follow`.
    """

    def __init__(self, pool: EnginePool, forwarded: Callable[[EngineState], AnyEngine]) -> None:
        assert isinstance(pool.policy, FollowedPolicy)
        self.pool = pool
        self._policy = pool.policy
        self._forwarded = forwarded
        self._state: PoolState | None = None
        self._followed: dict[str, EngineState] = {}
        """By name, each engine as it was followed last."""
        self._work = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._worker = self._tasks.create_task(self._keep_up(), name="pool follower")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._worker is not None
        self._worker.cancel()
        await self._tasks.__aexit__(None, None, None)

    def follow(self, state: PoolState) -> None:
        """Take over what the leader says now. A pause holds at once; the rest follows in the background."""
        self._state = state
        if state.paused is not None:
            self._policy.follow(state)
        self._work.set()

    async def _keep_up(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            state = self._state
            assert state is not None
            for engine in state.engines:
                try:
                    await self._follow_engine(engine)
                except OutriderError as error:  # what the leader can use may be out of this process's reach
                    log.error("engine %s cannot be used here: %s", engine.name, error)
            for name in self._followed.keys() - {engine.name for engine in state.engines}:
                self._leave_engine(name)
            # The leader opens its gate when the engines have the new version: ours opens when we know it, too.
            if state is self._state and state.paused is None:
                self._policy.follow(state)

    async def _follow_engine(self, engine: EngineState) -> None:
        known = self._followed.get(engine.name)
        if known is not None and (known.kind, known.spec) != (engine.kind, engine.spec):
            self._leave_engine(engine.name)
            known = None
        if known is None:
            spec = None if engine.spec is None else EngineSpec.model_validate_json(engine.spec)
            await self.pool.adopt(engine, spec or self._forwarded(engine))
        self._followed[engine.name] = engine
        # What is remembered here may be newer than what the leader remembers, unless the leader was told something.
        if engine.versions is not None and (known is None or known.versions != engine.versions):
            own: object = self.pool.engine(engine.name)
            if isinstance(own, RemembersVersions):
                own.versions = engine.versions
        self.pool.obey(engine)

    def _leave_engine(self, name: str) -> None:
        del self._followed[name]

        async def leave() -> None:
            with suppress(NotFound):
                await self.pool.remove(name)
            self._work.set()  # the leader may have another engine of that name by now

        self._tasks.create_task(leave(), name=f"removal of {name}")
