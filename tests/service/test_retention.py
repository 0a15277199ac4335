"""Old groups are removed with all their stored data. Groups that are still needed are kept."""

from __future__ import annotations

import asyncio
import sys
from math import inf
from pathlib import Path

import pytest

from outrider.config import RetentionConfig
from outrider.errors import InvalidField, ServiceError
from outrider.messages import image_from_bytes
from outrider.schemas import ArtifactList
from outrider.service.retention import MB, Retention
from outrider.spec import GcSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.images import insert_images
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store

from .conftest import MakeWorld
from .test_delivery import finished_group, receiving

TESTS = Path(__file__).parent.parent
EVERYTHING = GcSpec(days=0)


class Past(Store):
    """A store in which every group has finished at `now`, a time in seconds since the epoch."""

    def __init__(self, path: Path | None = None) -> None:
        self.now = 1000.0
        super().__init__(SqliteDatabase(path), clock=lambda: self.now)


async def finish(store: Store, artifacts: ArtifactStore, *names: str) -> None:
    """Store finished groups of one session, each with an artifact."""
    for name in names:
        await finished_group(store, name, "http://c/")
        await store.delivered(name)
        keep(artifacts, f"{name}.0")


def keep(artifacts: ArtifactStore, session_id: str) -> None:
    artifacts.put(session_id, 1, b"some bytes")
    artifacts.index(ArtifactList(session_id=session_id, attempt=1, artifacts=(), left_out=()))


def retention(store: Store, artifacts: ArtifactStore, **bounds: float) -> Retention:
    return Retention(store, artifacts, RetentionConfig.model_validate(bounds))


async def ids(store: Store) -> list[str]:
    return [group.id for group in await store.results(after=0, limit=1000)]


async def test_what_is_old_is_removed_with_its_artifacts(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        await finish(store, artifacts, "a", "b")
        store.now = 9e12
        await finish(store, artifacts, "young")
        collector = retention(store, artifacts)
        planned = await collector.collect(GcSpec(days=30, dry_run=True))
        assert (planned.groups, planned.sessions, planned.dry_run) == (2, 2, True)
        assert await ids(store) == ["a", "b", "young"]
        done = await collector.collect(GcSpec(days=30))
        assert (done.groups, done.sessions, done.bytes) == (planned.groups, planned.sessions, planned.bytes)
        assert done.stored_bytes == planned.stored_bytes - done.bytes
        assert await ids(store) == ["young"]
        assert artifacts.sessions() == ["young.0"]
        assert (await collector.collect(GcSpec(days=30))).groups == 0


async def test_the_oldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        for number in range(4):
            await finish(store, artifacts, f"g{number}")
        each = await store.removals.size() / 4
        collector = retention(store, artifacts)
        # A group takes less than a MiB here, so the stored total is raised until two of the four groups must go.
        await store._db.write(lambda tx: tx.execute("UPDATE totals SET bytes = bytes + ?", (int(3 * MB - 2.5 * each),)))
        planned = await collector.collect(GcSpec(size_mb=3, dry_run=True))
        done = await collector.collect(GcSpec(size_mb=3))
        assert planned.groups == done.groups == 2
        assert await ids(store) == ["g2", "g3"]


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        ({"a": "1", "b": "2", "c": "3", "d": "4"}, ["c", "d"]),
        ({"a": "1", "b": "1", "c": "2", "d": "3"}, ["c", "d"]),  # like a regrading of a: to remove `a` frees nothing
        ({"a": "1", "b": "2", "c": "1", "d": "3"}, ["c", "d"]),
        ({"a": "12", "b": "3", "c": "4", "d": "4"}, ["b", "c", "d"]),
        ({"a": "", "b": "12", "c": "23", "d": "4"}, ["c", "d"]),
    ],
)
@pytest.mark.parametrize("at_once", [1, 100])
async def test_images_that_go_with_a_group_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: dict[str, str], left: list[str], at_once: int
) -> None:
    """Each digit is an image of three MiB."""
    for name in ("SESSIONS_AT_ONCE", "COUNTED_AT_ONCE"):
        monkeypatch.setattr("outrider.service.retention." + name, at_once)
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        for name, digits in shown.items():
            await finish(store, artifacts, name)
            images = [image_from_bytes("image/png", digit.encode() * 3 * MB) for digit in digits]
            await store._db.write(lambda tx, name=name, images=images: insert_images(tx, f"{name}.0", images))  # type: ignore[misc]
        collector = retention(store, artifacts)
        room = len(set("".join(shown[name] for name in left))) * 3 + 1
        planned = await collector.collect(GcSpec(size_mb=room, dry_run=True))
        assert await ids(store) == list(shown)
        done = await collector.collect(GcSpec(size_mb=room))
        assert await ids(store) == left
        assert (planned.groups, planned.bytes) == (done.groups, done.bytes)
        assert done.bytes < MB  # without images


async def test_what_is_wanted_is_kept_and_counted(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        await finish(store, artifacts, "a", "b", "c")
        await finished_group(store, "pushed", "http://c/")
        await store.consumers.enter("trainer", at=1)
        collector = retention(store, artifacts)
        kept = await collector.collect(EVERYTHING)
        assert (kept.groups, kept.unacknowledged, kept.undelivered) == (1, 3, 1)
        assert await ids(store) == ["b", "c", "pushed"]
        forced = await collector.collect(GcSpec(days=0, force=True))
        assert (forced.groups, forced.unacknowledged, forced.undelivered) == (2, 0, 1)
        assert await ids(store) == ["pushed"]


async def test_no_bound_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        with pytest.raises(InvalidField, match="no bound") as caught:
            await retention(store, artifacts).collect(GcSpec())
        assert "retention.days" in str(caught.value.hint)
        await finish(store, artifacts, "a")
        assert (await retention(store, artifacts, days=1).collect(GcSpec())).groups == 1


async def test_the_settings_are_kept_to_by_the_service_itself(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        await finish(store, artifacts, "a", "b")
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(retention(store, artifacts, days=1).run())
            while await ids(store) or artifacts.sessions():
                await store.counts()
            running.cancel()


async def test_artifacts_that_nobody_owns_are_removed_at_the_start(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path)
    async with Past() as store:
        await finish(store, artifacts, "a")
        keep(artifacts, "lost.0")
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(retention(store, artifacts).run())
            while artifacts.sessions() != ["a.0"]:
                await store.counts()
            running.cancel()


@pytest.mark.parametrize("own", [0, 1])
async def test_another_database_costs_no_artifacts(tmp_path: Path, caplog: pytest.LogCaptureFixture, own: int) -> None:
    """The service is started with the data folder but without its setting `store`, so its database is new. At its next
    start, this database may have sessions of its own."""
    artifacts = ArtifactStore(tmp_path / "artifacts")
    for name in "abc":
        keep(artifacts, f"{name}.0")
    async with Past() as store, asyncio.timeout(60):
        await finish(store, artifacts, *["new"][:own])
        before = artifacts.sessions()
        await retention(store, artifacts).run()
        assert artifacts.sessions() == before
    assert "is it the database of this data folder" in caplog.text


async def test_artifacts_that_cannot_be_removed_keep_their_session(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    async with Past() as store:
        await finished_group(store, "a", "http://c/")
        await store.delivered("a")
        (tmp_path / "artifacts").mkdir()
        (tmp_path / "artifacts" / "a.0").write_text("no folder")
        with pytest.raises(ServiceError, match="cannot remove artifacts"):
            await retention(store, artifacts).collect(EVERYTHING)
        assert await store.removals.hidden_sessions() == ["a.0"]
        (tmp_path / "artifacts" / "a.0").unlink()
        await retention(store, artifacts).collect(EVERYTHING)
        assert artifacts.sessions() == []


@pytest.mark.deep
async def test_pages_that_are_read_meanwhile_are_whole_or_lack_a_group(world: MakeWorld) -> None:
    """A reader never gets a group without its rows, nor an empty page while groups are left."""
    async with world() as w, asyncio.timeout(60):
        submitted = [await w.submit("ask", n=2) for _ in range(30)]
        for view in submitted:
            await w.done(view.id)

        async def collect() -> None:
            for view in submitted[:-1]:
                await w.service.store.removals.hide([view.id], force=False)
                while await w.service.store.removals.erase(1):
                    pass

        async def read() -> None:
            while not removing.done():
                page = await w.service.results(after=0, wait=0, limit=7, samples=True)
                assert page.groups
                for group in page.groups:
                    assert len(group.samples or ()) == 2

        async with asyncio.TaskGroup() as tasks:
            removing = tasks.create_task(collect())
            tasks.create_task(read())
            tasks.create_task(read())
        page = await w.service.results(after=0, wait=0, limit=7, samples=True)
        assert [group.id for group in page.groups] == [submitted[-1].id]


async def test_a_group_that_is_being_delivered_is_kept(world: MakeWorld) -> None:
    async with receiving() as receiver, world() as w, asyncio.timeout(20):
        receiver.answering.clear()
        submitted = await w.submit("ask", callback_url=receiver.url)
        await w.done(submitted.id)
        while not receiver.keys:
            await w.service.status()
        assert (await w.service.retention.collect(GcSpec(days=0, force=True))).undelivered == 1
        receiver.answering.set()
        while not (await w.service.retention.collect(EVERYTHING)).groups:
            await w.service.status()
        assert receiver.keys == [submitted.id]


@pytest.mark.deep
async def test_kill_9_leaves_nothing_half_removed(tmp_path: Path) -> None:
    path, folder = tmp_path / "outrider.db", tmp_path / "artifacts"
    async with sqlite_store(path) as store:
        await asyncio.gather(
            *(finish(store, ArtifactStore(folder), *(f"g{row}-{each}" for each in range(10))) for row in range(8))
        )
        everything = set(await ids(store))
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.collect", path, folder), cwd=TESTS, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        process.kill()
        await process.wait()
        async with sqlite_store(path) as store:
            artifacts = set(ArtifactStore(folder).sessions())
            left = set(await ids(store))
            hidden = set(await store.removals.hidden_sessions())
            # Every group is whole, hidden or gone. A group that is gone has no artifacts.
            for group_id in left:
                assert (await store.session(f"{group_id}.0")).result
            assert {f"{group_id}.0" for group_id in left} <= artifacts
            assert artifacts <= {f"{group_id}.0" for group_id in left} | hidden
            assert left < everything
            everything = left
    async with sqlite_store(path) as store:
        collector = retention(store, ArtifactStore(folder))
        while (await collector.collect(EVERYTHING)).more:
            pass
        await collector._resume()
        assert (await store.removals.size(), await store.removals.hidden_sessions()) == (0, [])
        assert ArtifactStore(folder).sessions() == []
        assert await store.removals.candidates(force=True, after=(-inf, 0), limit=1) == []
        assert await store.last_cursor() == 80
