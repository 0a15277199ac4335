"""The sandboxes of a node: each made with a private folder of its own, prepared as its spec says, stopped to the end.

It knows no session. Invariant: a sandbox that was made is stopped once and its folder removed, by whoever has it,
whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.plugins import resolve
from outrider.runtimes.base import Runtime, SandboxContext
from outrider.runtimes.node_host import Host
from outrider.sandboxes.node_folder import remove_tree
from outrider.sandboxes.prepare import prepare
from outrider.spec import RuntimeSpec


class Sandbox:
    """One sandbox, for one session. Whoever has it stops it, unless `ready` raised."""

    def __init__(self, runtime: Runtime, spec: RuntimeSpec, context: SandboxContext, node: Sandboxes) -> None:
        self.runtime = runtime
        self._spec = spec
        self._context = context
        self._node = node
        self._ready = False
        self._stopped = False

    async def ready(self) -> None:
        """Start and prepare the sandbox, unless that is done. Raises RuntimeFailure.

        If this raises or is cancelled, the sandbox has been stopped. A sandbox that starts from a layer is not prepared
        again: the one that the layer comes from was.
        """
        if self._ready:
            return
        try:
            await self.runtime.start()
            if self._context.layer is None:
                await prepare(self.runtime, self._spec.prepare, files=self._node.files)
        except BaseException:  # also a cancellation
            await self.stop()
            raise
        self._ready = True

    async def stop(self) -> None:
        """Stop it and remove its folder, also if cancelled meanwhile. Idempotent."""
        if not self._stopped:
            self._stopped = True
            await shielded(self._stop)

    async def _stop(self) -> None:
        try:
            await self.runtime.stop()
        finally:
            await asyncio.to_thread(remove_tree, self._context.directory)


class Sandboxes(msgspec.Struct, frozen=True, kw_only=True):
    """Makes them. `owner` has the tasks of those that are made ahead, `files` is where uploads come from; `gateway_url`
    is asked when a sandbox is made, for only then the gateway is served."""

    host: Host
    owner: asyncio.TaskGroup
    files: Path
    gateway_url: Callable[[], str]
    gateway_socket: Path

    def make(
        self, spec: RuntimeSpec, name: str, attempt: int, *, mounts: tuple[Path, ...] = (), layer: Path | None = None
    ) -> Sandbox:
        """A new one, not started. `name` and `attempt` are its own among all of this node. Raises InvalidField when
        its runtime is not there any more."""
        kind: type[Runtime] = resolve("runtime", spec.kind)
        directory = self.host.folder / f"{name}-{attempt}"
        directory.mkdir(mode=0o700)
        context = SandboxContext(
            session_id=name,
            attempt=attempt,
            directory=directory,
            host=self.host,
            gateway_url=self.gateway_url(),
            gateway_socket=self.gateway_socket,
            mounts=mounts,
            layer=layer,
        )
        try:
            return Sandbox(kind.create(spec, context), spec, context, self)
        except BaseException:  # also a cancel: what was begun is undone
            directory.rmdir()
            raise
