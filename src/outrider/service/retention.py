"""Removes finished groups with all their stored data: rows, images and artifacts.

A group is removed when it is too old, or when it is the oldest and the total size is too large. `store/removals.py`
protects groups that a consumer or a callback still needs.

Invariants: a group disappears from all API replies, except the stream of events, before any of its data is deleted; if
the service is killed during a deletion, the next service completes the deletion.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import TypeVar

from outrider.concurrency.chores import Chores, Failures
from outrider.config import RetentionConfig
from outrider.errors import InvalidField, NotFound, ServiceError
from outrider.schemas import GcReport
from outrider.spec import GcSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.removals import Candidate
from outrider.store.store import Store

log = logging.getLogger("outrider.retention")

T = TypeVar("T")

CHECK_SECONDS = 60.0
"""Seconds between two searches for groups to remove."""
STEP_ROWS = 100
"""Maximum number of rows deleted in one transaction, so that other writers of the store wait only a few
milliseconds."""
SESSIONS_AT_ONCE = 128
"""About this many sessions are hidden (removed from API replies) in one transaction. The number may be higher, because
the sessions of a group are hidden together."""
COUNTED_AT_ONCE = 10_000
REQUEST_SECONDS = 20.0
"""A request to remove groups is answered after about this many seconds, even if there is more to remove."""
DAY = 86400.0
MB = 1 << 20


class Retention:
    """Removes old groups. Start `run` in a task group."""

    def __init__(
        self,
        store: Store,
        artifacts: ArtifactStore,
        settings: RetentionConfig,
        *,
        failures: Failures | None = None,
        on_hidden: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        """`on_hidden` is called with the ids of groups as soon as the API does not show them any more."""
        self._on_hidden = on_hidden
        self._store = store
        self._failures = failures or Failures()
        self._artifacts = artifacts
        self._settings = settings
        self._turn = asyncio.Lock()
        """Held while groups are removed, so that only one caller removes groups at a time."""

    async def run(self) -> None:
        """Complete the deletions of an earlier service process. Then enforce the limits in the settings until
        cancelled."""
        bounds = GcSpec(days=self._settings.days, size_mb=self._settings.size_mb)

        async def keep() -> None:
            report = await self.collect(bounds)
            if report.groups:
                log.info("removed %d groups: %d bytes", report.groups, report.bytes)
            if not report.more:
                await asyncio.sleep(CHECK_SECONDS)

        async with Chores(self._failures) as chores:
            await chores.until_done("retention", self._resume)
            if bounds.days is not None or bounds.size_mb is not None:
                await chores.begin("retention", keep)

    async def collect(self, spec: GcSpec) -> GcReport:
        """Remove the groups that exceed the age or total size in `spec`, oldest first, for about REQUEST_SECONDS. A dry
        run only counts them.

        If `spec` has no limits, those in the settings apply. Raises InvalidField if the settings have no limits
        either."""
        if spec.days is None and spec.size_mb is None:
            spec = spec.model_copy(update={"days": self._settings.days, "size_mb": self._settings.size_mb})
        if spec.days is None and spec.size_mb is None:
            raise InvalidField(
                "there is no bound to keep to",
                field="days",
                hint="give `days` or `size_mb`, or set retention.days or retention.size_mb for the service",
            )
        removals = self._store.removals
        async with self._turn:
            deadline = time.monotonic() + REQUEST_SECONDS
            before = -inf if spec.days is None else time.time() - spec.days * DAY
            groups = sessions = size = freed = 0
            place, more = (-inf, 0), False
            # A group's size does not count its images, which other groups may use, too.
            uses: dict[str, int] | None = {} if spec.size_mb is not None and await removals.has_images() else None
            while not more:
                # A dry run removes nothing, so the stored size still includes the groups that were counted before. The
                # bytes that their removal would free are subtracted here.
                stored = 0 if spec.size_mb is None else await removals.size() - (freed if spec.dry_run else 0)
                limit = COUNTED_AT_ONCE if spec.dry_run else SESSIONS_AT_ONCE
                found = await removals.candidates(force=spec.force, after=place, limit=limit)
                batch, frees = await self._batch(found, before, stored - (spec.size_mb or 0) * MB, limit, uses)
                if not batch:
                    break
                place = batch[-1].sort_key
                if not spec.dry_run:
                    hidden = set(await removals.hide([one.id for one in batch], force=spec.force))
                    self._on_hidden(hidden)
                    batch = [one for one in batch if one.id in hidden]
                    await self._erase()
                    more = time.monotonic() > deadline
                groups += len(batch)
                sessions += sum(one.sessions for one in batch)
                size += sum(one.bytes for one in batch)
                freed += frees
            if groups and not spec.dry_run:
                while await removals.shrink():
                    pass
            held = await removals.held(before=inf if spec.days is None else before, force=spec.force)
            return GcReport(
                groups=groups,
                sessions=sessions,
                bytes=size,
                unacknowledged=held.unacknowledged,
                undelivered=held.undelivered,
                stored_bytes=await removals.size(),
                more=more,
                dry_run=spec.dry_run,
            )

    async def _batch(
        self, candidates: list[Candidate], before: float, excess: float, sessions: int, uses: dict[str, int] | None
    ) -> tuple[list[Candidate], int]:
        """Return the groups to remove next, from the beginning of `candidates`, and the number of bytes that their
        removal frees. A group is removed if it finished before the time `before`, or if the groups ahead of it free
        less than `excess` bytes. The batch ends at about `sessions` sessions. Images are counted only with `uses` (see
        `Removals.image_bytes`)."""
        batch: list[Candidate] = []
        freed = 0
        for candidate in candidates:
            if (candidate.finished >= before and excess <= freed) or sessions <= 0:
                break
            batch.append(candidate)
            sessions -= candidate.sessions
            freed += candidate.bytes
            if uses is not None:
                freed += await self._store.removals.image_bytes(candidate.id, uses)
        return batch, freed

    async def _resume(self) -> None:
        async with self._turn:
            await self._erase()
            # Also remove the artifacts of unknown sessions. A database that was restored from a backup lacks the
            # sessions that are younger than the backup, but their artifacts are still on the disk. If most sessions are
            # unknown, this is probably the wrong database, for example because a setting was left out. Such a database
            # knows the few sessions that it has run itself.
            kept = await _on_disk(self._artifacts.sessions)
            unknown: list[str] = []
            for start in range(0, len(kept), SESSIONS_AT_ONCE):
                unknown += await self._store.removals.unknown(kept[start : start + SESSIONS_AT_ONCE])
            if len(unknown) > len(kept) / 2:
                log.warning(
                    "the database does not know %d of the %d sessions in the folder `artifacts`, which are kept: is it"
                    " the database of this data folder? If it is, remove what you do not need from the folder",
                    len(unknown),
                    len(kept),
                )
                return
            await _on_disk(partial(self._artifacts.remove, unknown))

    async def _erase(self) -> None:
        """Delete all data of hidden groups. The files are deleted before the rows, because the files can be found only
        by the rows of the sessions."""
        await _on_disk(partial(self._artifacts.remove, await self._store.removals.hidden_sessions()))
        more = True
        while more:
            begun = time.monotonic()
            more = await self._store.removals.erase(STEP_ROWS)
            await asyncio.sleep(time.monotonic() - begun)  # leaves half of the time to other writers of the store


async def _on_disk(work: Callable[[], T]) -> T:
    """Read or remove artifacts in a thread. Raises ServiceError for a disk error. The caller may try again."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise ServiceError(
            f"cannot remove artifacts: {error}", hint="the service's user must be able to write to the data folder"
        ) from error


def removed_run(session_id: str) -> NotFound:
    """Return the error for the regrading of a session whose files and transcript were removed."""
    return NotFound(
        f"the agent's run in session {session_id} was removed with its group",
        hint="submit the task again, and keep groups for longer: `retention` in the settings, `outrider gc`",
    )
