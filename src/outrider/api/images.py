"""The control route for images in model calls.

What an agent sends as an image is not trusted. Invariant: it is served so that no browser runs it.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Response

from outrider.api.openapi import binary_answers
from outrider.service.service import Service

ANSWER = "The image, with the media type that it was sent with."
UNKNOWN = "application/octet-stream"
SAFE = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
"""Headers that forbid a browser to run scripts in a file, or to guess another type for it."""
_IMAGE_TYPE = re.compile(r"image/[\w.+-]{1,64}", re.ASCII)


def image_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/images/{digest}", response_class=Response, responses=binary_answers(ANSWER, "image/*"))
    async def image(digest: str) -> Response:
        """The bytes of an image in a model call, by their SHA-256 (hex): the `digest` in a sample's `images`."""
        found = await service.store.image(digest)
        is_image = _IMAGE_TYPE.fullmatch(found.media_type) is not None  # the type, too, is what the agent said
        return Response(found.data, media_type=found.media_type if is_image else UNKNOWN, headers=SAFE)

    return routes
