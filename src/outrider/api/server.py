"""The HTTP application of a service, and its two servers. One server serves everything at a TCP address. The other
serves only the model gateway (`gateway_server.py`), on a Unix socket and on a port of this machine.

Invariant: a sandbox is given only the socket and the port of the gateway. So a program that can reach only this socket
and this port cannot call the control API.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIWebSocketRoute
from starlette.routing import Route

from outrider.api import (
    delivery,
    diagnosis,
    engines,
    files,
    groups,
    metrics,
    nodes,
    policy,
    relay,
    runs,
    sessions,
    status,
    tokens,
)
from outrider.api.access import OPEN_PATHS, AccessControl, check_address
from outrider.api.compat.routes import compat_paths, compat_routes, compat_sockets, detail
from outrider.api.control_replies import bad_query, error_reply, not_served, outrider_error
from outrider.api.gateway import Gateway
from outrider.api.gateway_server import HttpServer, listener_at, running, serving_gateway, url_of
from outrider.api.mcp import PATH, McpEndpoint
from outrider.api.openapi import describe
from outrider.api.page import page_routes
from outrider.config import TlsConfig
from outrider.engines.relay.messages import MAX_TO_SERVICE
from outrider.environment import installed_version
from outrider.errors import EngineUnavailable, InvalidField, OutriderError, ServiceStopping
from outrider.service.readiness import StoreReadiness
from outrider.service.service import Service
from outrider.sessions.external import ExternalSessions
from outrider.sessions.models import SessionModels
from outrider.sessions.node import LocalNode
from outrider.spec import Role
from outrider.wire.file_descriptors import raise_limit, shares
from outrider.wire.http_server import TIMEOUTS, Receive, Scope, Send, noting_refusals
from outrider.wire.tls import presenting

PARTS = (groups, sessions, runs, files, diagnosis, delivery, engines, nodes, policy, relay, tokens, status, metrics)
ROUTERS = (*(part.ROUTES for part in PARTS), metrics.METRICS)
ROLES: dict[str, Role] = {called: role for router in ROUTERS for called, role in router.roles.items()}
"""The role that each control route requires, by method and path. Only admins, and tokens of the tenant that an object
belongs to, may get the object. tests/api/test_tenants.py checks this for each route."""
WEBSOCKETS = tuple(
    route for router in ROUTERS for route in router.routes.routes if isinstance(route, APIWebSocketRoute)
)

OUTSIDE = TIMEOUTS._replace(unread=60)
"""Timeouts for clients outside of sandboxes. For sandboxes, the timeout `unread` is longer, because a sandbox may be
suspended for a long time."""


@asynccontextmanager
async def serving(service: Service, node: LocalNode | None) -> AsyncIterator[str]:
    """Serve a service, run its sessions, and serve the model gateway of `node` if given. Yields the base URL, such as
    http://127.0.0.1:8700.

    Raises InvalidField if a public address lacks a token or TLS, or if the certificate cannot be used. Raises
    ServiceError if the address is in use.
    """
    config = service.config
    check_address(config, has_token=await service.tokens.required())
    tls = _tls(config.tls)
    with listener_at(config.host, config.port) as outside:
        url = url_of(outside, tls=tls is not None)
        share = shares(raise_limit())
        sessions = _AllSessions(node, service.external)
        gateway = Gateway(sessions, calls=share.session, failures=service.call_failures)
        others = compat_sockets(service, config.compat)
        app = control_app(service)
        app.router.routes += [route for route, _ in others]

        def refusal(scope: Scope, error: OutriderError) -> Response:
            foreign = scope["type"] == "http" and app.state.compat(scope["path"])
            return detail(error) if foreign else error_reply(error)

        control = AccessControl(
            app,
            service.tokens,
            service.audit,
            calls=share.token,
            websockets=(*WEBSOCKETS, *(route for route, _ in others)),
            roles=ROLES | {f"WEBSOCKET {route.path}": role for route, role in others},
            refusal=refusal,
            open_paths=app.state.open_paths,
        )

        app.router.routes.append(Route(PATH, McpEndpoint(control)))

        async def root(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and gateway.serves(scope):
                await gateway(scope, receive, send)
            else:
                await control(scope, receive, send)

        server = HttpServer(root, share.control, timeouts=OUTSIDE, websockets=MAX_TO_SERVICE, tls=tls)
        async with AsyncExitStack() as stack:
            if node is not None:
                await stack.enter_async_context(serving_gateway(node))
            stack.enter_context(noting_refusals(service.failures))
            await stack.enter_async_context(running(server, outside))
            await stack.enter_async_context(service.running(url))
            yield url


class _AllSessions:
    """The sessions whose model calls this process serves: those of `node`, if any, and those whose agents run outside
    Outrider. Other processes that run sessions have gateways of their own."""

    def __init__(self, node: LocalNode | None, external: ExternalSessions) -> None:
        self._node = node
        self._external = external

    def models(self, key: str) -> SessionModels | None:
        own = None if self._node is None else self._node.models(key)
        return own or self._external.models(key)

    async def refusal(self, key: str) -> OutriderError:
        return await self._external.refusal(key)


def control_app(service: Service) -> FastAPI:
    """Return the application of the control API. Access control is not included."""
    app = FastAPI(
        title="Outrider",
        version=installed_version("outrider"),
        description="Agent rollouts as a service for reinforcement learning.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service, app.state.roles = service, ROLES
    for router in ROUTERS:
        # `include_router` would create all routes anew for each application, which takes 50 ms.
        app.router.routes += router.routes.routes
    foreign = list(compat_routes(service, service.config.compat))
    app.state.open_paths = OPEN_PATHS - {route.path for route in foreign}
    app.router.routes += page_routes(app.state.open_paths)
    app.router.routes += foreign
    app.state.compat = compat_paths(foreign, service.config.compat)
    app.add_exception_handler(OutriderError, outrider_error)
    app.add_exception_handler(Exception, outrider_error)
    app.add_exception_handler(RequestValidationError, bad_query)

    async def unknown(request: Request, error: Exception) -> Response:
        reply = detail if app.state.compat(request.url.path) else error_reply
        return reply(not_served(request))

    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)

    @app.get("/healthz", include_in_schema=False)
    async def alive() -> Response:
        return Response("ok\n", media_type="text/plain")

    store = StoreReadiness(service.store)

    @app.get("/readyz", include_in_schema=False)
    async def ready() -> Response:
        if not any(engine.ok for engine in service.pool.status()):
            raise EngineUnavailable("no engine answers", hint="attach one: outrider engines add")
        if service.scheduler.stopping:
            raise ServiceStopping("the service starts no more sessions", hint="the next service on the same data will")
        await store.check()
        return Response("ok\n", media_type="text/plain")

    description: list[bytes] = []
    describing = asyncio.Lock()

    @app.get("/openapi.json", include_in_schema=False)
    async def described() -> Response:
        """Return the OpenAPI description. It is created in a thread at the first request. Creating it at the start
        would more than double the time that the start takes."""
        # Create it only once, even for concurrent requests: anybody may send them, without a token.
        async with describing:
            if not description:
                description.append(await asyncio.to_thread(_description, app))
        return Response(description[0], media_type="application/json")

    return app


def _description(app: FastAPI) -> bytes:
    replies = [reply for router in ROUTERS for reply in router.replies]
    requests = [request for router in ROUTERS for request in router.requests]
    return msgspec.json.encode(describe(app, replies, requests))


def _tls(settings: TlsConfig) -> ssl.SSLContext | None:
    if settings.certificate is not None:
        return presenting(settings.certificate, settings.key)
    if settings.key is not None:
        raise InvalidField("a key without a certificate", field="tls.key", hint="give --tls-certificate, too")
    return None
