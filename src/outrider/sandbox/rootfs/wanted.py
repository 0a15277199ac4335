"""Pulls images that sessions need and this machine does not have, if the operator allows the pull.

A session first waits for its images, and only then for resources such as memory. Invariants: only images whose names
start with an allowed prefix are pulled; this process runs at most MAX_PULLS pulls at once, and never two of the same
image; the pull of a cancelled session continues, because other sessions may wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from outrider.concurrency.chores import Chores
from outrider.errors import OutriderError, RuntimeFailure, described
from outrider.plugins import resolve
from outrider.sandbox.rootfs.pull import pull
from outrider.sandbox.rootfs.store import ImageStore, begins_with, has_image
from outrider.sandbox.runtimes.base import RuntimeKind
from outrider.spec import RuntimeSpec

log = logging.getLogger("outrider.node")

MAX_PULLS = 4
"""Maximum number of pulls that run at once, because they share one network and one disk."""


def may_pull(spec: RuntimeSpec, kind: RuntimeKind, allowed: Sequence[str]) -> bool:
    """Return whether a sandbox's image may be pulled. The sandbox must use this machine's image store, and the image's
    name must start with one of the `allowed` prefixes."""
    named = spec.image
    if named is None or os.path.isabs(named) or not getattr(kind, "uses_image_store", False):
        return False
    return any(begins_with(named, prefix) for prefix in allowed)


class ImagePulls:
    """The image pulls of a node. An image may be pulled only if its name starts with one of the prefixes `allowed`.
    `chores` runs the pulls in the background. `folder` is the folder of the node."""

    def __init__(self, allowed: Sequence[str], chores: Chores, folder: Path) -> None:
        self._allowed = tuple(allowed)
        self._chores = chores
        self._folder = folder
        self._running: dict[str, asyncio.Task[RuntimeFailure | None]] = {}
        self._slots = asyncio.Semaphore(MAX_PULLS)

    async def want(self, spec: RuntimeSpec, *, field: str) -> None:
        """Wait until a sandbox's image is on this machine. Returns at once if the image is already there or may not be
        pulled. `field` is the task's field with this spec, for error messages. Raises RuntimeFailure if the pull
        fails."""
        if spec.image is None or not may_pull(spec, resolve("runtime", spec.sandbox_kind), self._allowed):
            return
        if await asyncio.to_thread(has_image, spec.image):
            return
        if (task := self._running.get(spec.image)) is None:
            task = self._chores.create_task(self._pull(spec.image), name="pull an image")
            self._running[spec.image] = task
            task.add_done_callback(partial(self._ended, spec.image))
        # `asyncio.wait`, unlike `await task`, does not cancel the pull when this session is cancelled. Other sessions
        # may wait for the pull.
        await asyncio.wait({task})
        if (failure := task.result()) is not None:
            raise failure.replace(field=f"{field}.image")

    def cancel(self) -> None:
        """Cancel all pulls, because the node stops."""
        for task in self._running.values():
            task.cancel()

    def _ended(self, reference: str, _: asyncio.Task[RuntimeFailure | None]) -> None:
        self._running.pop(reference, None)

    async def _pull(self, reference: str) -> RuntimeFailure | None:
        """Pull an image, and use its reference as its name. A failure is returned and not raised, because an exception
        here would count as a failure of the node."""
        async with self._slots:
            log.info("pulling %s, which a session wants", reference)
            try:
                await pull(reference, reference, ImageStore(), node=self._folder)
            except Exception as error:  # after any error, the session must not start without its image
                if not isinstance(error, OutriderError | OSError):
                    log.exception("the pull of %s failed", reference)
                hint = error.hint if isinstance(error, OutriderError) else None
                text = error.message if isinstance(error, OutriderError) else described(error)
                return RuntimeFailure(f"the image {reference} cannot be pulled: {text}", hint=hint)
        return None
