"""Serves the routes of other systems, with access control, and with errors in their format.

The routes of a system are at `/NAME/...`. The first system in the settings has its routes at the root, too. An error is
`{"detail": text}` with the HTTP status of its class. Invariant: a handler runs only if the caller has the role that the
route requires.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson
from fastapi import WebSocket
from fastapi.routing import APIWebSocketRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.access import caller_in, check
from outrider.api.control_replies import error_headers, long_reply
from outrider.errors import OutriderError, error_text, record_of
from outrider.redaction import redacted
from outrider.service.principals import Principal
from outrider.spec import Role

if TYPE_CHECKING:
    from outrider.service.service import Service

log = logging.getLogger("outrider.compat")

Handler = Callable[[Request, Principal], Awaitable[Any]]
"""Handles a request. It returns a Response, or a value that is sent as JSON with status 200."""


class CompatRoute(NamedTuple):
    """A route of another system. `path` is in Starlette's notation and begins with a slash. `statuses` maps HTTP
    statuses of Outrider's errors to those that the system's clients expect."""

    method: str
    path: str
    role: Role
    handler: Handler
    statuses: Mapping[int, int] = MappingProxyType({})


def compat_routes(service: Service, names: Sequence[str]) -> Iterator[Route]:
    """Yield the routes of the named systems. Routes below `/NAME` come first, because a route at the root may begin
    with a parameter that matches any name."""
    at_root: list[Route] = []
    for number, name in enumerate(names):
        module = import_module(f"outrider.api.compat.{name}")
        for route in module.routes(service):
            yield _route(route, f"/{name}")
            if number == 0:
                at_root.append(_route(route, ""))
    yield from at_root


def _route(route: CompatRoute, prefix: str) -> Route:
    path = f"{prefix}{route.path}"
    return Route(path, _endpoint(route, f"{route.method} {path}"), methods=[route.method])


def compat_paths(routes: Sequence[Route], names: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that returns True if a path belongs to one of the named systems. With this function, errors
    that are raised outside of handlers also get the format of these systems. `routes` are the routes from
    `compat_routes`."""
    below = tuple(f"/{name}/" for name in names)

    def belongs(path: str) -> bool:
        return path.startswith(below) or any(route.path_regex.match(path) for route in routes)

    return belongs


class CompatSocket(NamedTuple):
    """A WebSocket route of another system. `serve` accepts the connection, and returns when it ends."""

    path: str
    role: Role
    serve: Callable[[Service, WebSocket], Awaitable[None]]


def compat_sockets(service: Service, names: Sequence[str]) -> list[tuple[APIWebSocketRoute, Role]]:
    """Return the WebSocket routes of the named systems, with the roles that they require. The module of a system lists
    its routes in SOCKETS."""
    found: list[tuple[APIWebSocketRoute, Role]] = []
    for number, name in enumerate(names):
        sockets: Sequence[CompatSocket] = getattr(import_module(f"outrider.api.compat.{name}"), "SOCKETS", ())
        for socket in sockets:
            for prefix in (f"/{name}", "") if number == 0 else (f"/{name}",):
                found.append((APIWebSocketRoute(f"{prefix}{socket.path}", _socket(service, socket)), socket.role))
    return found


def _socket(service: Service, socket: CompatSocket) -> Callable[[WebSocket], Awaitable[None]]:
    async def serve(websocket: WebSocket) -> None:
        await socket.serve(service, websocket)

    # FastAPI reads the annotation. `from __future__` has made the annotation a string, so replace it by the class.
    serve.__annotations__["websocket"] = WebSocket
    return serve


def _endpoint(route: CompatRoute, called: str) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            caller = caller_in(request.scope)
            check(called, route.role, caller)
            reply = await route.handler(request, caller)
        except OutriderError as error:
            return detail(error, status=route.statuses.get(error.http_status))
        except Exception as error:  # this is a bug, but the reply must still have the system's format
            log.exception("%s failed", called)
            return detail(error)
        return reply if isinstance(reply, Response) else compat_reply(reply)

    return respond


def compat_reply(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def large_reply(service: Service, value: Callable[[], Any]) -> Response:
    """Reply with a value that may be large. It is computed and encoded in a thread for long work."""
    return long_reply([await service.reader.offload(lambda: encoded(value()))])


def encoded(value: Any) -> bytes:
    """Encode a value as JSON. Numpy arrays become JSON arrays."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # an integer of more than 64 bits, in a tool's schema or a call's arguments
        return msgspec.json.encode(value, enc_hook=lambda array: array.tolist())


def detail(error: BaseException, *, status: int | None = None) -> Response:
    """Return the reply to an error. `status` replaces the HTTP status of the error's class. The headers do not
    change."""
    record = record_of(error)
    text = redacted(f"{record.field}: {error_text(record)}" if record.field is not None else error_text(record))
    own = error.http_status if isinstance(error, OutriderError) else 500
    reply = compat_reply({"detail": text}, status=own if status is None else status)
    reply.headers.update(error_headers(error, own))
    return reply
