"""Images in the store: the bytes of an image are stored once for all turns, and a refused turn leaves no image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import Conflict, NotFound
from outrider.messages import Image, Message, Role, Text, image_from_bytes, image_from_url
from outrider.store.database import Body, Connection, Row
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from outrider.trajectory import Turn

from .world import FAILURE, group_row, start, submit, turn

CAT, DOG = image_from_bytes("image/png", b"a cat" * 100), image_from_bytes("image/jpeg", b"a dog" * 100)
THERE = image_from_url("https://example.org/x.png")


def showing(index: int, *images: Image) -> Turn:
    told = Message(role=Role.USER, content="look", parts=(Text("look"), *images))
    return msgspec.structs.replace(turn(index), messages=(Message(role=Role.USER, content="hi"), told))


def bare(image: Image) -> Image:
    return msgspec.structs.replace(image, data=b"")


async def begun(store: Store, *sessions: str) -> None:
    await submit(store, group_row())
    for session_id in sessions:
        await start(store, session_id)


async def test_a_turn_keeps_digests_and_the_bytes_are_read_by_them(store: Store) -> None:
    await begun(store, "g.0")
    await store.add_turn("g.0", 1, showing(0, CAT, THERE))
    [kept] = await store.turns("g.0")
    assert kept == showing(0, bare(CAT), THERE)
    assert (bare(CAT).digest, bare(CAT).size) == (hashlib.sha256(CAT.data).hexdigest(), 500)
    assert await store.image(CAT.digest) == CAT
    assert await store.turns("g.0", images=True) == [showing(0, CAT, THERE)]


async def test_what_is_not_kept_is_not_found(store: Store) -> None:
    await begun(store, "g.0")
    await store.add_turn("g.0", 1, showing(0, THERE))
    for digest in (THERE.digest, CAT.digest, ""):
        with pytest.raises(NotFound, match="no image"):
            await store.image(digest)


async def test_an_image_is_stored_once_for_all_turns_and_sessions() -> None:
    database = SqliteDatabase(None)
    async with Store(database) as store:
        await begun(store, "g.0", "g.1")
        for session_id in ("g.0", "g.1"):
            await store.add_turn(session_id, 1, showing(0, CAT))
            await store.add_turn(session_id, 1, showing(1, CAT, DOG, CAT))
        found = await database.read(lambda tx: tx.fetch("SELECT digest, media_type, data FROM images"))
        turns = await database.read(lambda tx: tx.fetch("SELECT turn FROM turns"))
    assert sorted(found) == sorted((image.digest, image.media_type, image.data) for image in (CAT, DOG))
    assert len(turns) == 4
    assert not any(image.data in row[0] for row in turns for image in (CAT, DOG))


async def test_the_first_media_type_of_the_same_bytes_counts(store: Store) -> None:
    await begun(store, "g.0")
    other = msgspec.structs.replace(CAT, media_type="image/webp")
    await store.add_turn("g.0", 1, showing(0, CAT))
    await store.add_turn("g.0", 1, showing(1, other))
    assert (await store.image(CAT.digest)).media_type == "image/png"
    assert await store.turns("g.0", images=True) == [showing(0, CAT), showing(1, other)]


async def test_a_refused_turn_leaves_no_image(store: Store) -> None:
    await begun(store, "g.0")
    await store.add_turn("g.0", 1, showing(0))
    with pytest.raises(Conflict):
        await store.add_turn("g.0", 1, showing(0, CAT))
    await store.requeue("g.0", 1, FAILURE)
    await start(store, "g.0")
    with pytest.raises(Conflict):
        await store.add_turn("g.0", 1, showing(1, DOG))
    for image in (CAT, DOG):
        with pytest.raises(NotFound):
            await store.image(image.digest)


async def test_a_turn_without_images_is_one_statement() -> None:
    database = Counting(None)
    async with Store(database) as store:
        await begun(store, "g.0")
        database.statements.clear()
        await store.add_turn("g.0", 1, showing(0, THERE))
        await store.add_turn("g.0", 1, turn(1))
        assert len(database.statements) == 2
        await store.add_turn("g.0", 1, showing(2, CAT))
        assert len(database.statements) == 7
        await store.add_turn("g.0", 1, showing(3, CAT))
        assert len(database.statements) == 9


class Counting(SqliteDatabase):
    """An SQLite database that records the statements of its writes, except those of `execute_many`."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.statements: list[str] = []

    async def write(self, body: Body[Any], *, volatile: bool = False) -> Any:
        return await super().write(lambda tx: body(_Heard(tx, self.statements)), volatile=volatile)


class _Heard:
    def __init__(self, tx: Connection, statements: list[str]) -> None:
        self._tx = tx
        self._statements = statements
        self.execute_many = tx.execute_many

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        self._statements.append(sql)
        return await self._tx.execute(sql, values)

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        self._statements.append(sql)
        return await self._tx.fetch(sql, values)
