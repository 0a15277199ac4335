"""Attaches a trainer's inference servers to a service as engines, and again after a restart of the service.

The module is independent of the trainer. Invariants: the engines are named after a prefix and numbered from 0; at most
one call of an object at a time changes the service's engines; objects in several processes may attach the same engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from outrider.client.client import PATIENCE, AsyncClient, patiently
from outrider.errors import Conflict, NotFound
from outrider.trainers.shared_client import FIRST_PATIENCE

LOOK_SECONDS = 5.0
"""Minimum seconds between two looks whether the service still has the engines."""


class AttachedEngines:
    """The engines of a service that are named `prefix` and a number."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self._looked: float | None = None

    async def attach(self, client: AsyncClient, engines: Sequence[Mapping[str, Any]], *, renamed: bool = False) -> bool:
        """Attach the engines that are not attached. Each has a `url`, a `model`, and any other fields of
        `spec.EngineSpec` but its name, and always the same place in `engines`. A service that was restarted has lost
        the engines, so it is asked for them at most every LOOK_SECONDS. The first call also replaces the engines that
        an earlier training has left. With `renamed`, engines of another model are replaced, too.
        Returns True if an engine was attached: it then has the policy version 0, unless its server labels its weights.

        Raises the service's error, for example while a server still loads its model.
        """
        async with self._looking:
            now = asyncio.get_running_loop().time()
            recent = self._looked is not None and now - self._looked < LOOK_SECONDS
            if not engines or (recent and not renamed):
                return False
            added = False
            wanted = {f"{self._prefix}-{number}": engine for number, engine in enumerate(engines)}
            # A service that has answered before may be restarting.
            patience = FIRST_PATIENCE if self._looked is None else PATIENCE
            attached = {engine.name: engine for engine in await patiently(client.engines, patience)}
            for name in attached.keys() - wanted.keys() if self._looked is None else ():
                if name.startswith(f"{self._prefix}-"):
                    await _removed(client, name)
            for name, engine in wanted.items():
                url = engine["url"].rstrip("/").removesuffix("/v1")
                if (found := attached.get(name)) is not None:
                    usable = found.ok or self._looked is not None  # an earlier training's may be of another model
                    if found.url == url and usable and not (renamed and found.model != engine["model"]):
                        continue
                    await _removed(client, name)
                with suppress(Conflict):  # another process of the trainer has just attached the engine
                    await client.add_engine({**engine, "name": name, "url": url})
                    added = True
            self._looked = now
            return added


async def _removed(client: AsyncClient, name: str) -> None:
    with suppress(NotFound):  # another process of the trainer has just removed the engine
        await client.remove_engine(name)
