"""The control route for images that model calls have shown.

What an agent calls an image is not trusted: it is served so that no browser runs it.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Response

from outrider.api.openapi import answers
from outrider.errors import ErrorRecord
from outrider.service.service import Service

UNKNOWN = "application/octet-stream"
SAFE = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
_MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,64}", re.ASCII)


def image_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/images/{digest}", response_class=Response, responses=_answers())
    async def image(digest: str) -> Response:
        """The bytes of an image that a model call showed, by their SHA-256 (hex), as `images` of a sample name it."""
        found = await service.store.image(digest)
        named = _MEDIA_TYPE.fullmatch(found.media_type) is not None
        return Response(found.data, media_type=found.media_type if named else UNKNOWN, headers=SAFE)

    return routes


def _answers() -> dict[int | str, dict[str, Any]]:
    content = {"image/*": {"schema": {"type": "string", "format": "binary"}}}
    refused: dict[str, Any] = answers(ErrorRecord)["responses"]["default"]
    return {
        200: {"description": "The image, of the media type that it came with.", "content": content},
        "default": refused,
    }
