"""Creates the OpenAPI description of the control API. The schemas of requests come from pydantic, those of replies from
msgspec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider.errors import (
    ErrorRecord,
    Forbidden,
    InvalidField,
    NotFound,
    OutriderError,
    RequestError,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from outrider.schemas import EventView
from outrider.trajectory import JsonSample

REF = "#/components/schemas/{name}"


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}


_ERROR: dict[str, Any] = {"description": "What went wrong, and where.", "content": _json(ErrorRecord.__name__)}
ALWAYS = (Unauthorized, Forbidden, ServiceError)
"""Errors that every route may return."""
WITH_A_BODY = (RequestError, TooLarge, InvalidField)


QUEUE_FULL: dict[int | str, dict[str, Any]] = {
    429: {
        "description": "The queue is full, or the token has too many sessions. Submit the same request again later.",
        "headers": {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}},
        "content": _json(ErrorRecord.__name__),
    }
}
"""Reply to a submission that is refused because the queue is full, or because the token has too many sessions."""


def json_answer(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON reply."""
    return {"description": shape.__doc__ or "", "content": _json(shape.__name__)}


def file_answer(description: str, media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a reply that is a file."""
    return {
        200: {"description": description, "content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}
    }


def refusals(*errors: type[OutriderError]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error replies, by HTTP status."""
    return {error.http_status: _ERROR for error in errors}


def request_body(shape: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _json(shape.__name__)}}


def describe(
    app: FastAPI, replies: Iterable[type[msgspec.Struct]], requests: Iterable[type[BaseModel]]
) -> dict[str, Any]:
    """Return the OpenAPI document of the control API. `replies` and `requests` are the types of all bodies."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= msgspec.json.schema_components((*replies, EventView, ErrorRecord, JsonSample), ref_template=REF)[1]
    schemas["Sample"] = schemas.pop("JsonSample")  # JSON replies contain samples in this form
    schemas |= models_json_schema(
        [(shape, "validation") for shape in requests], ref_template="#/components/schemas/{model}"
    )[1]["$defs"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            errors = [*ALWAYS, *(WITH_A_BODY if "requestBody" in operation else ())]
            errors += [InvalidField] if operation.get("parameters") else []
            errors += [NotFound] if "{" in path else []
            operation["responses"] |= {str(error.http_status): _ERROR for error in errors}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's error bodies; `bad_query` sends other replies
        schemas.pop(unused, None)
    return document
