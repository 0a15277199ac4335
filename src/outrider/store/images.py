"""Stores the bytes of images outside the turns, once for each digest.

An agent sends the same screenshot again with every call. A copy of the screenshot in each turn would waste disk space.
The functions run in the caller's transaction. Invariant: `restore` undoes `split`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from outrider.errors import NotFound
from outrider.messages import Image, images_in, with_images
from outrider.store.database import Connection
from outrider.trajectory import Turn


class Split(msgspec.Struct, frozen=True):
    """A turn whose images have no bytes, and the images with their bytes. Equal images occur once."""

    turn: Turn
    images: tuple[Image, ...] = ()


def split(turn: Turn) -> Split:
    if not any(message.parts for message in turn.messages):
        return Split(turn)
    images = {image.digest: image for message in turn.messages for image in images_in(message) if image.data}
    bare = _changed(turn, lambda image: msgspec.structs.replace(image, data=b""))
    return Split(bare, tuple(images.values()))


async def insert_images(tx: Connection, session_id: str, images: Iterable[Image]) -> None:
    """Record that the session uses the images, and store the images that are new."""
    for image in images:
        # Usually the session already uses the image, because an agent sends the same screenshot with every call. In
        # this case, no other query is needed.
        use = (session_id, image.digest)
        if await tx.fetch("SELECT 1 FROM image_uses WHERE session_id = ? AND digest = ?", use):
            continue
        # This query avoids sending the bytes of a known image to the database again.
        if not await tx.fetch("SELECT 1 FROM images WHERE digest = ?", (image.digest,)):
            await tx.execute(
                "INSERT INTO images (digest, media_type, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (image.digest, image.media_type, image.data),
            )
        await tx.execute(
            """INSERT INTO image_uses (session_id, digest, tenant) SELECT sessions.id, ?, tenant
               FROM sessions JOIN groups ON groups.id = sessions.group_id WHERE sessions.id = ?""",
            (image.digest, session_id),
        )


async def forget_images(tx: Connection, session_id: str) -> None:
    """Delete the session's rows in `image_uses`, and the images that no other session uses."""
    digests = await tx.fetch("SELECT digest FROM image_uses WHERE session_id = ?", (session_id,))
    await tx.execute("DELETE FROM image_uses WHERE session_id = ?", (session_id,))
    sql = """DELETE FROM images WHERE digest = ?
        AND NOT EXISTS (SELECT 1 FROM image_uses WHERE image_uses.digest = images.digest)"""
    await tx.execute_many(sql, digests)


async def find_image(tx: Connection, digest: str, tenant: str | None = None) -> Image:
    """Return the image with this digest, if a session of the tenant uses it. If `tenant` is None, return any image.
    Raises NotFound."""
    sql = "SELECT media_type, data FROM images WHERE digest = ?"
    if tenant is not None:
        sql += " AND EXISTS (SELECT 1 FROM image_uses WHERE image_uses.digest = images.digest AND tenant = ?)"
    found = await tx.fetch(sql, (digest,) if tenant is None else (digest, tenant))
    if not found:
        raise NotFound(
            f"no image {digest!r}",
            hint="an image is stored with the turn that shows it; an image sent as a URL is not stored",
        )
    media_type, data = found[0]
    return Image(media_type, digest, bytes(data), size=len(data))


async def restore(tx: Connection, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the bytes of their images. Raises NotFound if an image is not stored."""
    images = (image for turn in turns for message in turn.messages for image in images_in(message))
    shown = {image.digest for image in images if image.url is None}
    data = {digest: (await find_image(tx, digest)).data for digest in shown}

    def filled(image: Image) -> Image:
        return msgspec.structs.replace(image, data=data.get(image.digest, b""))

    return [_changed(turn, filled) for turn in turns]


def _changed(turn: Turn, change: Callable[[Image], Image]) -> Turn:
    """Return a copy of the turn in which each image is replaced by `change(image)`."""
    return msgspec.structs.replace(turn, messages=tuple(with_images(message, change) for message in turn.messages))
