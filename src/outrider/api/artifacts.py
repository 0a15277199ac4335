"""Control routes for the files that agents left.

What they hold is not trusted: it is served as bytes, so that no browser runs it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse
from starlette.convertors import Convertor, register_url_convertor

from outrider.api.images import SAFE, UNKNOWN
from outrider.api.openapi import answers
from outrider.api.replies import json_reply
from outrider.errors import ErrorRecord
from outrider.schemas import ArtifactList
from outrider.service.service import Service

MAX_ATTEMPT = 1 << 31
DOWNLOAD = SAFE | {"Content-Disposition": "attachment"}

Attempt = Annotated[
    int | None,
    Query(ge=1, le=MAX_ATTEMPT, description="of this attempt; default: the newest that has ended its run"),
]


class Anything(Convertor[str]):
    """The rest of a path, with all that a file's name may have. Starlette's own ends at a line break, and what it finds
    is then another name."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def artifact_routes(service: Service) -> APIRouter:
    register_url_convertor("anything", Anything())
    routes = APIRouter(prefix="/v1/sessions/{session_id}")

    @routes.get("/artifacts", **answers(ArtifactList))
    async def artifacts(session_id: str, attempt: Attempt = None) -> Response:
        """What the session's agent left of what its task wants kept, and what of that was left out."""
        session = await service.reader.session(session_id)
        return json_reply(await asyncio.to_thread(service.artifacts.listed, session.id, attempt))

    @routes.get("/artifacts/{path:anything}", response_class=FileResponse, responses=_answers())
    async def artifact(session_id: str, path: str, attempt: Attempt = None) -> Response:
        """The bytes of one of them, by its path in the sandbox, without the first slash."""
        session = await service.reader.session(session_id)
        file = await asyncio.to_thread(service.artifacts.file, session.id, f"/{path}", attempt)
        return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)

    return routes


def _answers() -> dict[int | str, dict[str, Any]]:
    content = {UNKNOWN: {"schema": {"type": "string", "format": "binary"}}}
    refused: dict[str, Any] = answers(ErrorRecord)["responses"]["default"]
    return {200: {"description": "The file.", "content": content}, "default": refused}
