"""Attaches a trainer's inference servers to a service as engines, and again after a restart of the service.

The module is independent of the trainer. Invariants: the engines are named after a prefix and numbered from 0; at most
one call of an object at a time changes the service's engines; objects in several processes may attach the same engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from outrider.client.client import PATIENCE, AsyncClient, patiently
from outrider.errors import Conflict, NotFound, OutriderError
from outrider.trainers.shared_client import FIRST_PATIENCE

LOOK_SECONDS = 5.0
"""Minimum seconds between two looks whether the service still has the engines."""


class AttachedEngines:
    """The engines of a service that are named `prefix` and a number."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self._looked: float | None = None
        self._not_attached: OutriderError | None = None
        """The error of the newest look that failed."""

    async def attach(self, client: AsyncClient, engines: Sequence[Mapping[str, Any]], *, renamed: bool = False) -> bool:
        """Attach the engines that are not attached. Each has a `url`, a `model`, and any other fields of
        `spec.EngineSpec` but its name, and always the same place in `engines`. A service that was restarted has lost
        the engines, so it is asked for them at most every LOOK_SECONDS. The first call also replaces the engines that
        an earlier training has left. With `renamed`, engines of another model are replaced, too.

        Returns True if an engine was attached: it then has the policy version 0, unless its server labels its weights.
        Waits for a service that restarts. Raises the service's error, for example while a server still loads its model.
        """
        if not engines:
            return False
        failed_before = self._not_attached
        async with self._looking:
            if self._not_attached is not None and self._not_attached is not failed_before:
                raise self._not_attached  # otherwise each waiting rollout would wait for a reply in turn
            clock = asyncio.get_running_loop().time
            if self._looked is not None and clock() - self._looked < LOOK_SECONDS and not renamed:
                return False
            patience = FIRST_PATIENCE if self._looked is None else PATIENCE
            try:
                added = await patiently(partial(self._attach_missing, client, engines, renamed), patience)
            except OutriderError as error:
                self._not_attached = error
                raise
            self._looked = clock()
            return added

    async def _attach_missing(self, client: AsyncClient, engines: Sequence[Mapping[str, Any]], renamed: bool) -> bool:
        wanted = {f"{self._prefix}-{number}": engine for number, engine in enumerate(engines)}
        attached = {engine.name: engine for engine in await client.engines()}
        added = False
        for name in attached.keys() - wanted.keys() if self._looked is None else ():
            if name.startswith(f"{self._prefix}-"):
                await _remove(client, name)
        for name, engine in wanted.items():
            url = engine["url"].rstrip("/").removesuffix("/v1")
            if (found := attached.get(name)) is not None:
                usable = found.ok or self._looked is not None  # an earlier training's may be of another model
                if found.url == url and usable and not (renamed and found.model != engine["model"]):
                    continue
                await _remove(client, name)
            with suppress(Conflict):  # another process of the trainer has just attached the engine
                await client.add_engine({**engine, "name": name, "url": url})
                added = True
        return added


async def _remove(client: AsyncClient, name: str) -> None:
    with suppress(NotFound):  # another process of the trainer has just removed the engine
        await client.remove_engine(name)
