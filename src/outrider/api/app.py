"""The HTTP application: control routes behind access control, and the model gateway beside them.

It owns nothing: a factory builds it from an open service. Invariant: every control route except OPEN_PATHS is checked
by `AccessControl` first; the gateway checks its own keys.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import cache
from importlib.metadata import version
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError

from outrider.api.engines import engine_routes
from outrider.api.files import artifact_routes, image_routes
from outrider.api.gateway import Gateway
from outrider.api.groups import group_routes
from outrider.api.openapi import describe
from outrider.api.replies import bad_query, json_reply, outrider_error, unknown_route
from outrider.errors import EngineUnavailable, OutriderError, Unauthorized
from outrider.file_descriptors import EACH_MOST
from outrider.http_server import Application, Receive, Scope, Send
from outrider.service.service import Service

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})


class RootApp:
    """Passes model calls to the gateway, and everything else to the control application."""

    def __init__(self, control: Application, gateway: Gateway) -> None:
        self._control = control
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._gateway.serves(scope):
            await self._gateway(scope, receive, send)
        else:
            await self._control(scope, receive, send)


class AccessControl:
    """Refuses control calls without the service's token.

    A service without a token listens on this machine only. Then a web page open in a browser here could still send it
    requests, so calls are refused whose Host or Origin header names another machine: a page cannot forge these.
    """

    def __init__(self, app: Application, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or (error := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await json_reply(error.record(), status=error.http_status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is not None:
            given = headers.get(b"authorization", b"")
            if secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                return None
            return Unauthorized("this service requires its token", hint="send the header `Authorization: Bearer TOKEN`")
        for name in (b"host", b"origin"):
            place = headers.get(name, b"localhost").decode("latin-1")
            try:
                host = urlsplit(place if "//" in place else f"//{place}").hostname or ""
            except ValueError:
                host = ""
            if not is_local(host):
                return Unauthorized(
                    f"without a token this service answers its own machine only, not {name.decode()} {place!r}",
                    hint="use its address on 127.0.0.1, or serve with a token: --token or OUTRIDER_TOKEN",
                )
        return None


def is_local(host: str) -> bool:
    """Whether a host name or address can only refer to this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def control_app(service: Service) -> FastAPI:
    """The control API, without access control."""
    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        description="Agent rollouts as a service for reinforcement learning.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(group_routes(service))
    app.include_router(image_routes(service))
    app.include_router(artifact_routes(service))
    app.include_router(engine_routes(service))
    app.add_exception_handler(OutriderError, outrider_error)
    app.add_exception_handler(Exception, outrider_error)
    app.add_exception_handler(RequestValidationError, bad_query)
    app.add_exception_handler(404, unknown_route)
    app.add_exception_handler(405, unknown_route)

    @app.get("/healthz", include_in_schema=False)
    async def alive() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz", include_in_schema=False)
    async def ready() -> Response:
        if not any(engine.ok for engine in service.pool.status()):
            raise EngineUnavailable("no engine answers", hint="attach one: outrider engines add")
        return Response("ok\n", media_type="text/plain")

    description = cache(lambda: msgspec.json.encode(describe(app)))

    @app.get("/openapi.json", include_in_schema=False)
    async def described() -> Response:
        """The description, made on the first request and in a thread: that takes longer than the rest of a start."""
        return Response(await asyncio.to_thread(description), media_type="application/json")

    return app


def create_app(service: Service, *, calls: int = EACH_MOST) -> RootApp:
    """The whole application, for the service's own address. `calls`: maximum model calls of one session at once."""
    return RootApp(AccessControl(control_app(service), service.config.token), Gateway(service.node, calls=calls))
