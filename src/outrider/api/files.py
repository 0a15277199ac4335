"""Control routes for files from agents: artifacts of sandboxes, and images in model calls.

Invariant: the files are not trusted. They are served with headers that keep browsers from running them.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import FileResponse
from starlette.convertors import PathConvertor, register_url_convertor

from outrider.api.control_router import Caller, ControlRouter, Serving
from outrider.api.openapi import file_answer
from outrider.messages import Image
from outrider.schemas import ArtifactList
from outrider.store.artifacts import FOR_GRADERS, LOGGED

UNKNOWN = "application/octet-stream"
SAFE = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
"""Headers that tell browsers not to run scripts in a file, and not to guess its media type."""
_IMAGE_TYPE = re.compile(r"image/[\w.+-]{1,64}", re.ASCII)
MAX_ATTEMPT = 1 << 31
DOWNLOAD = SAFE | {"Content-Disposition": "attachment"}

Attempt = Annotated[
    int | None,
    Query(ge=1, le=MAX_ATTEMPT, description="the attempt; default: the newest whose run has ended"),
]


class AnyPath(PathConvertor):
    """Path parameter that matches the rest of a path. A file name may contain line breaks, which Starlette's own
    convertor does not match. With that convertor, the route would not be found or, if the line break is at the end of
    the name, a shorter name would be looked up."""

    regex = "(?s:.*)"


register_url_convertor("any_path", AnyPath())  # used by the routes below; registering it twice does no harm
ROUTES = ControlRouter()


@ROUTES.get("/sessions/{session_id}/artifacts", "read", ArtifactList)
async def artifacts(service: Serving, caller: Caller, session_id: str, attempt: Attempt = None) -> ArtifactList:
    """List the artifacts of a session, and the requested files that were not kept."""
    session = await service.reader.session(session_id, tenant=caller.sees)
    return await asyncio.to_thread(service.artifacts.listed, session.id, attempt)


@ROUTES.get(
    "/sessions/{session_id}/artifacts/{path:any_path}",
    "read",
    also=file_answer("The file.", UNKNOWN),
    response_class=FileResponse,
)
async def artifact(
    service: Serving, caller: Caller, session_id: str, path: str, attempt: Attempt = None
) -> FileResponse:
    """Get the bytes of an artifact, by its path in the sandbox without the leading slash."""
    session = await service.reader.session(session_id, tenant=caller.sees)
    name = path if path in (*FOR_GRADERS, *LOGGED) else f"/{path}"
    file = await asyncio.to_thread(service.artifacts.file, session.id, name, attempt)
    return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)


@ROUTES.get(
    "/images/{digest}",
    "read",
    also=file_answer("The image, with the media type that it was sent with.", "image/*"),
)
async def image(service: Serving, caller: Caller, digest: str) -> Response:
    """Get the bytes of an image in a model call, by their SHA-256 (hex): the `digest` in a sample's `images`."""
    found = await service.store.image(digest, tenant=caller.sees)
    return Response(found.data, media_type=image_type(found), headers=SAFE)


def image_type(found: Image) -> str:
    """Return the media type to serve an image with. The agent has chosen the media type that is stored with the image.
    So the stored type is used only if it is the media type of an image."""
    return found.media_type if _IMAGE_TYPE.fullmatch(found.media_type) else UNKNOWN
