"""Attaches a trainer's inference servers to a service as engines, and again after a restart of the service.

The module is independent of the trainer. Invariants: the engines are named after a prefix and numbered from 0; an
`AttachedEngines` changes the service's engines in at most one call at a time; and processes of the same training may
attach the same engines. It is an error if another training uses an engine with the prefix, or has replaced an engine of
this training: the sessions of each training would then use the engines of both trainings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from outrider.client.client import PATIENCE, AsyncClient, patiently
from outrider.errors import Conflict, NotFound, OutriderError
from outrider.schemas import EngineStatus
from outrider.trainers.shared_client import FIRST_PATIENCE

LOOK_SECONDS = 5.0
"""Minimum seconds between two checks of whether the service still has the engines."""


class AttachedEngines:
    """The engines that a trainer attaches to a service. An engine's name is `prefix`, a hyphen and a number."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._looking = asyncio.Lock()
        self._looked: float | None = None
        self._not_attached: OutriderError | None = None
        """The error of the newest look that failed."""

    async def attach(self, client: AsyncClient, engines: Sequence[Mapping[str, Any]], *, renamed: bool = False) -> bool:
        """Attach the engines that are not attached. Each engine has a `url`, a `model`, any other fields of
        `spec.EngineSpec` except a name, and always the same position in `engines`. A restarted service has lost the
        engines, so the call requests the service's list of engines, unless this was done in the last LOOK_SECONDS. The
        first call also replaces engines that an earlier training has left and that have no sessions. With `renamed`,
        engines of another model are replaced, too.

        Returns True if an engine was attached: it then has the policy version 0, unless its server labels its weights.
        Waits for a service that restarts. Raises the service's error, for example while a server still loads its model,
        and Conflict if another training has engines with this prefix. The first call raises this Conflict only if these
        engines have sessions; later calls raise it in any case. Also raises Conflict if the service has another engine
        for the policy, whose name does not begin with the prefix and whose address is not in `engines`.
        """
        if not engines:
            return False
        failed_before = self._not_attached
        async with self._looking:
            if self._not_attached is not None and self._not_attached is not failed_before:
                # another call failed while this call waited, and a new try would only wait again
                raise self._not_attached
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
        wanted = {f"{self._prefix}-{number}": _address(engine) for number, engine in enumerate(engines)}
        attached = {engine.name: engine for engine in await client.engines()}
        first, added = self._looked is None, False
        for name, found in attached.items():
            if not name.startswith(f"{self._prefix}-"):
                if found.serves is None and not found.draining and found.url not in wanted.values():
                    raise Conflict(
                        f"the service also has the engine {name} for the policy, and all sessions use all engines: the"
                        " training would get tokens of both",
                        hint=f"start the service without engines, or `outrider engines remove {name}`",
                    )
            elif found.url not in wanted.values():
                if not first or (found.ok and found.sessions + found.in_flight > 0):
                    raise _of_another(found)
                await _remove(client, name)
            elif first and name not in wanted:
                await _remove(client, name)
        for (name, url), engine in zip(wanted.items(), engines, strict=True):
            if (old := attached.get(name)) is not None and old.url in wanted.values():
                usable = old.ok or not first  # a failed engine of an earlier training may have another model
                if old.url == url and usable and not (renamed and old.model != engine["model"]):
                    continue
                await _remove(client, name)
            added = await _add(client, {**engine, "name": name, "url": url}) or added
        return added


def _address(engine: Mapping[str, Any]) -> str:
    address: str = engine["url"]
    return address.rstrip("/").removesuffix("/v1")


def _of_another(engine: EngineStatus) -> Conflict:
    return Conflict(
        f"another training has attached the engine {engine.name} at {engine.url} to this service, and all sessions of a"
        " service use all its engines",
        hint=f"use a service for each training; if the other has ended, `outrider engines remove {engine.name}`",
    )


async def _add(client: AsyncClient, engine: Mapping[str, Any]) -> bool:
    """Return True if this call has attached the engine, or False if another process of the training has. The name of an
    engine that is just being attached is already taken, but is not in the list yet."""
    clock = asyncio.get_running_loop().time
    end = clock() + PATIENCE
    while True:
        try:
            await client.add_engine(engine)
            return True
        except Conflict:
            for other in await client.engines():
                if other.name == engine["name"]:
                    if other.url != engine["url"]:
                        raise _of_another(other) from None
                    return False
            if clock() > end:
                raise
        await asyncio.sleep(0.2)


async def _remove(client: AsyncClient, name: str) -> None:
    with suppress(NotFound):  # another process of the trainer has just removed the engine
        await client.remove_engine(name)
