"""Control routes for artifacts, the files that tasks keep of their sandboxes.

Their content is not trusted. Invariant: it is served as a download of unknown type, so that no browser runs it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse
from starlette.convertors import Convertor, register_url_convertor

from outrider.api.images import SAFE, UNKNOWN
from outrider.api.openapi import answers, binary_answers
from outrider.api.replies import json_reply
from outrider.schemas import ArtifactList
from outrider.service.service import Service

MAX_ATTEMPT = 1 << 31
DOWNLOAD = SAFE | {"Content-Disposition": "attachment"}

Attempt = Annotated[
    int | None,
    Query(ge=1, le=MAX_ATTEMPT, description="the attempt; default: the newest whose run has ended"),
]


class AnyPath(Convertor[str]):
    """The rest of a path, with every character that a file name may have. Starlette's own convertor stops at a line
    break, and would look for a file of another name."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def artifact_routes(service: Service) -> APIRouter:
    register_url_convertor("any_path", AnyPath())
    routes = APIRouter(prefix="/v1/sessions/{session_id}")

    @routes.get("/artifacts", **answers(ArtifactList))
    async def artifacts(session_id: str, attempt: Attempt = None) -> Response:
        """The artifacts of the session, and what of the files that its task wants kept was left out."""
        session = await service.reader.session(session_id)
        return json_reply(await asyncio.to_thread(service.artifacts.listed, session.id, attempt))

    @routes.get(
        "/artifacts/{path:any_path}", response_class=FileResponse, responses=binary_answers("The file.", UNKNOWN)
    )
    async def artifact(session_id: str, path: str, attempt: Attempt = None) -> Response:
        """The bytes of an artifact, by its path in the sandbox without the first slash."""
        session = await service.reader.session(session_id)
        file = await asyncio.to_thread(service.artifacts.file, session.id, f"/{path}", attempt)
        return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)

    return routes
