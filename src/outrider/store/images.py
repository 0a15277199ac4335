"""The bytes of images: taken out of the turns that show them, and kept once for each digest.

It opens no transaction. Invariant: a turn that was split and stored with its images is restored as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from outrider.errors import NotFound
from outrider.messages import Image, Message, images_in
from outrider.store.database import Connection
from outrider.trajectory import Turn


class Split(msgspec.Struct, frozen=True):
    """A turn whose images have no bytes, and those images with them, each once."""

    turn: Turn
    images: tuple[Image, ...] = ()


def split(turn: Turn) -> Split:
    if not any(message.parts for message in turn.messages):
        return Split(turn)
    images = {image.digest: image for message in turn.messages for image in images_in(message) if image.data}
    bare = _changed(turn, lambda image: msgspec.structs.replace(image, data=b""))
    return Split(bare, tuple(images.values()))


def insert_images(tx: Connection, images: Iterable[Image]) -> None:
    """Those that are not there yet."""
    for image in images:
        # Asked for first, so that an image that comes with every turn is not sent to the database with each.
        if not tx.fetch("SELECT 1 FROM images WHERE digest = ?", (image.digest,)):
            tx.execute(
                "INSERT INTO images (digest, media_type, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (image.digest, image.media_type, image.data),
            )


def find_image(tx: Connection, digest: str) -> Image:
    found = tx.fetch("SELECT media_type, data FROM images WHERE digest = ?", (digest,))
    if not found:
        raise NotFound(
            f"no image {digest!r}",
            hint="images are kept once the turn that shows them is; those sent by address are not",
        )
    media_type, data = found[0]
    return Image(media_type, digest, bytes(data), size=len(data))


def restore(tx: Connection, turns: Sequence[Turn]) -> list[Turn]:
    """Turns with the bytes of their images. Raises NotFound for one that is not stored."""
    images = (image for turn in turns for message in turn.messages for image in images_in(message))
    data = {digest: find_image(tx, digest).data for digest in {image.digest for image in images if image.url is None}}

    def filled(image: Image) -> Image:
        return msgspec.structs.replace(image, data=data.get(image.digest, b""))

    return [_changed(turn, filled) for turn in turns]


def _changed(turn: Turn, change: Callable[[Image], Image]) -> Turn:
    """The turn with each of its images changed."""

    def changed(message: Message) -> Message:
        parts = (change(part) if isinstance(part, Image) else part for part in message.parts)
        return msgspec.structs.replace(message, parts=tuple(parts)) if message.parts else message

    return msgspec.structs.replace(turn, messages=tuple(map(changed, turn.messages)))
