"""Adds a trainer's inference servers to a service as engines, and adds them again after the service has restarted.
Invariants:

- The engines of a training run have the names `PREFIX-0`, `PREFIX-1`, and so on.
- An `AttachedEngines` makes one change to the service's engines at a time.
- Several processes of one training run may attach the same engines.
- A second training run on the same service gets an error. Otherwise its sessions would also use the first run's
  engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from outrider.client.client import PATIENCE, AsyncClient, patiently
from outrider.errors import Conflict, NotFound, OutriderError
from outrider.schemas import EngineStatus
from outrider.trainers.shared_client import FIRST_PATIENCE


class AttachLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the waits for the service, in seconds.

    - `look_seconds`: the minimum time between two checks that the service still has the engines.
    - `first_patience`: how long the first check is repeated.
    """

    look_seconds: float = 5.0
    first_patience: float = FIRST_PATIENCE


LIMITS = AttachLimits()


class AttachedEngines:
    """Attaches the inference servers of a training run to a service as engines. An engine's name is `prefix` and a
    number, such as `nemo-rl-0`."""

    def __init__(self, prefix: str, *, limits: AttachLimits = LIMITS) -> None:
        self._prefix = prefix
        self._limits = limits
        self._looking = asyncio.Lock()
        self._looked: float | None = None
        self._not_attached: OutriderError | None = None
        """The error of the newest call of `attach` that failed."""

    async def attach(self, client: AsyncClient, engines: Sequence[Mapping[str, Any]], *, renamed: bool = False) -> bool:
        """Attach each engine that the service does not have, for example because the service has restarted. Unless
        `renamed` is True, the service is asked for its engines at most once in `look_seconds`.

        Each item of `engines` has `url`, `model` and any other fields of `spec.EngineSpec` except the name. The name is
        made from the item's position, so an item must have the same position in every call. The first call also removes
        engines of an earlier training run, if these engines failed or have no sessions. With `renamed`, an engine is
        replaced if its model now has another name.

        Returns True if this call attached an engine. A new engine has policy version 0, unless its server reports a
        version. Waits while the service restarts. Raises the error that the service returns, for example while an
        inference server still loads its model. Raises Conflict if another training run still has engines with this
        prefix, or if the service has other engines for the policy, at addresses that are not in `engines`.
        """
        if not engines:
            return False
        failed_before = self._not_attached
        async with self._looking:
            if self._not_attached is not None and self._not_attached is not failed_before:
                # Another call failed while this call waited for the lock. Raise the error of the other call, because a
                # new attempt would only wait for the service again.
                raise self._not_attached
            clock = asyncio.get_running_loop().time
            if self._looked is not None and clock() - self._looked < self._limits.look_seconds and not renamed:
                return False
            patience = self._limits.first_patience if self._looked is None else PATIENCE
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
                # on the first call, a failed engine may belong to an earlier training run and have another model
                usable = old.ok or not first
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
    """Add an engine to the service. Returns False if another process of the training run has already added the engine.
    While the other process is still adding the engine, the engine's name is taken, but the service does not list the
    engine yet. So this function tries again."""
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
