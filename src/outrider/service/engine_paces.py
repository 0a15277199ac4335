"""Stores the usual speed of each engine (its pace, see `engines/pool/waits.py`), so that it is known after a restart.

Without the stored pace, a service that starts while an engine is slow would take the slow speed for the usual one. It
would then blame agents for the engine's failure.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from outrider.concurrency.chores import Chores, Failures
from outrider.engines.pool.waits import RememberedPace
from outrider.store.store import Store

if TYPE_CHECKING:
    from outrider.engines.pool.pool import EnginePool

log = logging.getLogger("outrider.engine")

LOOK_SECONDS = 1.0
"""Seconds between two checks for paces that are new or have changed."""


async def remembered_paces(store: Store) -> dict[str, RememberedPace]:
    """Return the paces that earlier service processes have stored, by engine name."""
    found = dict[str, RememberedPace]()
    for engine, pace in (await store.engine_paces()).items():
        try:
            found[engine] = msgspec.json.decode(pace, type=RememberedPace)
        except msgspec.DecodeError:  # stored by another version of Outrider; the pace will be measured again
            log.warning("the remembered pace of engine %s cannot be read", engine)
    return found


@asynccontextmanager
async def remember_paces(
    store: Store, pools: Iterable[EnginePool], known: Mapping[str, RememberedPace], failures: Failures
) -> AsyncIterator[None]:
    """While the block runs, watch the paces of the pools' engines, and store each pace that is new or has changed.
    `known` are the paces that are already stored."""
    kept = dict(known)

    async def keep() -> None:
        paces = {name: pace for pool in pools for name, pace in pool.paces().items()}
        changed = {name: pace for name, pace in paces.items() if not _is_kept(pace, kept.get(name))}
        if changed:
            await store.keep_engine_paces({name: msgspec.json.encode(pace).decode() for name, pace in changed.items()})
            kept.update(changed)

    async with Chores(failures) as chores:
        chores.begin("remember paces", keep, every=LOOK_SECONDS)
        yield


def _is_kept(pace: RememberedPace, kept: RememberedPace | None) -> bool:
    return kept is not None and (pace.kind, pace.url) == (kept.kind, kept.url) and pace.pace.resembles(kept.pace)
