"""An image of this node's store as the root of a sandbox."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outrider.errors import RequestError, RuntimeUnavailable
from outrider.rootfs.store import ImageStore


class StoredImage(msgspec.Struct, frozen=True):
    """The folder that holds its files, and the variables that it sets."""

    root: Path
    env: dict[str, str]


def stored_image(name: str) -> StoredImage:
    """Raises RuntimeUnavailable when the node has no image of that name. Blocks for as long as a look at some files."""
    store = ImageStore()
    try:
        image = store.image(name)
    except RequestError as error:
        raise RuntimeUnavailable(error.message, hint=error.hint) from error
    return StoredImage(store.root(image), image.env)
