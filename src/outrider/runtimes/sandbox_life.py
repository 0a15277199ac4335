"""A sandbox's life, the same for every runtime with a tool server: started once, stopped whatever happens.

It knows no isolation. Invariant: what `_start` has made is undone when `stop` returns, or a `start` that raised; where
they ran at the same time, when both are over.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from abc import abstractmethod
from contextlib import AsyncExitStack
from typing import ClassVar, Self

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.runtimes.base import SandboxContext
from outrider.runtimes.kernel.cgroups import Group
from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.sandbox import ServedRuntime
from outrider.spec import RuntimeSpec

log = logging.getLogger("outrider.runtime")


class HeldRuntime(ServedRuntime):
    """A runtime adds `_start`, and where paths are. `killable`: whether programs inside can send the tool server a
    signal."""

    killable: ClassVar[bool] = False

    def __init__(self, spec: RuntimeSpec, context: SandboxContext) -> None:
        self._spec = spec
        self._context = context
        self._held = AsyncExitStack()
        self._tools: ToolClient | None = None
        self._begun = False
        self._ended = False
        self._stopping = asyncio.Lock()
        self._group: Group | None = None
        self._end = 0.0

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls(spec, context)

    @property
    def tools(self) -> ToolClient:
        if self._tools is None:
            raise RuntimeFailure("the sandbox does not run")
        return self._tools

    async def start(self) -> None:
        if self._begun:
            raise RuntimeFailure("a sandbox starts once")
        self._begun = True
        self._end = asyncio.get_running_loop().time() + self._spec.lifetime_seconds
        try:
            tools = await self._start()
            if self._ended:
                raise RuntimeFailure("the sandbox was stopped while it started")
        except BaseException as error:  # also a cancel: what was begun is undone
            await self.stop()
            if isinstance(error, OSError):
                raise RuntimeFailure(f"the sandbox cannot be started: {error}") from error
            raise
        self._tools = tools

    @abstractmethod
    async def _start(self) -> ToolClient:
        """Make the sandbox and tell its server what it is to be. How each part is undone goes to `_held` as soon as the
        part is there, and not before: a `stop` in between would have taken it."""

    async def broken_inside(self) -> bool:
        """See `Witness`."""
        tools = self._tools
        match tools.loss if tools is not None else None:
            case "wrong":
                return True
            case "gone":
                in_time = asyncio.get_running_loop().time() < self._end
                return in_time and await self._host_stands() and await self._died_inside()
            case "stuck":
                return self._server_stopped()
            case _:
                return False

    def starved(self) -> bool:
        return self._group is not None and self._group.starved()

    async def _host_stands(self) -> bool:
        """Whether what the sandbox needs outside of it is as it was."""
        return True

    async def _died_inside(self) -> bool:
        """Whether the tool server, which is dead, was ended by what runs beside it. As the first process of a sandbox
        it takes no signal from there: then it has said what it died of, or the sandbox's memory ran out."""
        assert self._tools is not None
        if self._group is not None and self._group.kills() > 0:
            return True
        return not self.starved() and (self.killable or self._tools.complaint() != "")

    def _server_stopped(self) -> bool:
        """Whether the tool server does not answer because it was sent a signal to stop."""
        return False

    async def stop(self) -> None:
        self._begun = self._ended = True
        await shielded(self._stop)

    async def _stop(self) -> None:
        async with self._stopping:
            self._tools = None
            try:
                await self._held.aclose()
            except Exception as error:  # whatever it is: `stop` never raises, and the other parts are undone
                bug = not isinstance(error, (RuntimeFailure, OSError))
                log.error("%s is not stopped in full: %s", self._context.directory.name, error, exc_info=bug)


class RootedRuntime(HeldRuntime):
    """A sandbox with a root of its own: its paths are what they seem."""

    def place(self, path: str) -> str:
        return posixpath.join(self._spec.workdir, path)

    def member(self, path: str) -> str:
        return posixpath.normpath(self.place(path)).lstrip("/")
