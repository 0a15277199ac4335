"""Pulls images that sessions need and this machine lacks, if the operator allows their references.

A session waits for its images before any resources are set aside for the session. Invariants: an image is pulled only
if its name begins with an allowed reference; in this process, at most one pull of the same image and at most MAX_PULLS
pulls run at once. If a session is cancelled, its pull continues for other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial

from outrider.concurrency.chores import Chores
from outrider.errors import OutriderError, RuntimeFailure, described
from outrider.plugins import resolve
from outrider.sandbox.rootfs.pull import pull
from outrider.sandbox.rootfs.store import ImageStore, begins_with, has_image
from outrider.sandbox.runtimes.base import RuntimeKind
from outrider.spec import RuntimeSpec

log = logging.getLogger("outrider.node")

MAX_PULLS = 4
"""Maximum number of pulls that run at once: more would share the same network and disk."""


def may_pull(spec: RuntimeSpec, kind: RuntimeKind, allowed: Sequence[str]) -> bool:
    """Return True if the image of a sandbox may be pulled: sandboxes of this kind use this machine's image store, and
    the image's name begins with one of the `allowed` references."""
    named = spec.image
    if named is None or os.path.isabs(named) or not getattr(kind, "uses_image_store", False):
        return False
    return any(begins_with(named, prefix) for prefix in allowed)


class ImagePulls:
    """The pulls of a node. `allowed` are the prefixes of the references that may be pulled. `chores` runs the pulls."""

    def __init__(self, allowed: Sequence[str], chores: Chores) -> None:
        self._allowed = tuple(allowed)
        self._chores = chores
        self._running: dict[str, asyncio.Task[RuntimeFailure | None]] = {}
        self._slots = asyncio.Semaphore(MAX_PULLS)

    async def want(self, spec: RuntimeSpec, *, field: str) -> None:
        """Wait until the image of a sandbox is on this machine, if the image may be pulled. Returns at once if the
        image is already there or may not be pulled. `field` is the task's field that holds the spec, as named in
        errors. Raises RuntimeFailure, with the message of the registry, if the pull fails."""
        if spec.image is None or not may_pull(spec, resolve("runtime", spec.sandbox_kind), self._allowed):
            return
        if await asyncio.to_thread(has_image, spec.image):
            return
        if (task := self._running.get(spec.image)) is None:
            task = self._chores.create_task(self._pull(spec.image), name="pull an image")
            self._running[spec.image] = task
            task.add_done_callback(partial(self._ended, spec.image))
        # A cancelled session does not cancel the pull, because other sessions may wait for it.
        await asyncio.wait({task})
        if (failure := task.result()) is not None:
            raise failure.replace(field=f"{field}.image")

    def cancel(self) -> None:
        """Cancel all pulls, at the end of the node."""
        for task in self._running.values():
            task.cancel()

    def _ended(self, reference: str, _: asyncio.Task[RuntimeFailure | None]) -> None:
        self._running.pop(reference, None)

    async def _pull(self, reference: str) -> RuntimeFailure | None:
        """Pull an image, which gets its reference as its name. Returns the failure, because an exception would be
        recorded as a failure of the node."""
        async with self._slots:
            log.info("pulling %s, which a session wants", reference)
            try:
                await pull(reference, reference, ImageStore())
            except (OutriderError, OSError) as error:
                hint = error.hint if isinstance(error, OutriderError) else None
                text = error.message if isinstance(error, OutriderError) else described(error)
                return RuntimeFailure(f"the image {reference} cannot be pulled: {text}", hint=hint)
        return None
