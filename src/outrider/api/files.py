"""Control routes for files that agents made: artifacts kept from sandboxes, and images in model calls.

Invariant: the content is untrusted, and is served so that no browser runs it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.convertors import Convertor, register_url_convertor

from outrider.api.access import sees
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, binary_answers
from outrider.schemas import ArtifactList
from outrider.service.service import Service
from outrider.store.artifacts import KEPT

UNKNOWN = "application/octet-stream"
SAFE = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
"""Headers that forbid a browser to run scripts in a file, or to guess another type for it."""
_IMAGE_TYPE = re.compile(r"image/[\w.+-]{1,64}", re.ASCII)
MAX_ATTEMPT = 1 << 31
DOWNLOAD = SAFE | {"Content-Disposition": "attachment"}

Attempt = Annotated[
    int | None,
    Query(ge=1, le=MAX_ATTEMPT, description="the attempt; default: the newest whose run has ended"),
]


class AnyPath(Convertor[str]):
    """The rest of a path, with every character that a file name may have. Starlette's own convertor would stop at a
    line break, and the route would look for a file of another name."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def artifact_routes(service: Service) -> APIRouter:
    register_url_convertor("any_path", AnyPath())
    routes = APIRouter(prefix="/v1/sessions/{session_id}")

    @routes.get("/artifacts", **answers(ArtifactList))
    async def artifacts(request: Request, session_id: str, attempt: Attempt = None) -> Response:
        """List the artifacts of a session, and the requested files that were left out."""
        session = await service.reader.session(session_id, tenant=sees(request))
        return json_reply(await asyncio.to_thread(service.artifacts.listed, session.id, attempt))

    @routes.get(
        "/artifacts/{path:any_path}", response_class=FileResponse, responses=binary_answers("The file.", UNKNOWN)
    )
    async def artifact(request: Request, session_id: str, path: str, attempt: Attempt = None) -> Response:
        """Get the bytes of an artifact, by its path in the sandbox without the first slash."""
        session = await service.reader.session(session_id, tenant=sees(request))
        name = path if path in KEPT else f"/{path}"
        file = await asyncio.to_thread(service.artifacts.file, session.id, name, attempt)
        return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)

    return routes


def image_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get(
        "/images/{digest}",
        response_class=Response,
        responses=binary_answers("The image, with the media type that it was sent with.", "image/*"),
    )
    async def image(request: Request, digest: str) -> Response:
        """Get the bytes of an image in a model call, by their SHA-256 (hex): the `digest` in a sample's `images`."""
        found = await service.store.image(digest, tenant=sees(request))
        is_image = _IMAGE_TYPE.fullmatch(found.media_type) is not None  # the agent chose the type
        return Response(found.data, media_type=found.media_type if is_image else UNKNOWN, headers=SAFE)

    return routes
