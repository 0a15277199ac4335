"""Controls access to the control API: which role each route requires, and at which addresses the service may listen.
The model gateway checks its own keys.

Invariant: every control route except OPEN_PATHS refuses a caller without the required role. If a call may change data,
or is a GET that has created something, its audit log entry is written before the reply is sent. Calls without a valid
token are refused and not logged.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from fastapi.routing import APIWebSocketRoute
from starlette.requests import HTTPConnection
from starlette.responses import Response

from outrider.api.control_bodies import ROOM, BodyRoom
from outrider.api.control_replies import error_reply
from outrider.api.page import PATHS
from outrider.config import Config, is_local
from outrider.errors import Busy, Forbidden, InvalidField, NotFound, OutriderError, Unauthorized
from outrider.service.audit import AuditEntry, AuditLog
from outrider.service.principals import LOCAL, Principal
from outrider.service.tokens import RevokedMeanwhile, TokenRegistry
from outrider.spec import Role
from outrider.wire.http_server import Application, Message, Receive, Scope, Send, claim

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"}) | PATHS
UNAUDITED = frozenset({"/mcp"})
"""Paths whose calls get no entry in the audit log. These calls change data only through other calls of the control API,
and those calls get entries."""

CALLER = "outrider.caller"
CREATED = "outrider.created"


class AccessControl:
    """ASGI middleware for control calls. If the service has tokens, it refuses calls without a valid one. It logs calls
    that may change data.

    If the service has no tokens, it listens only on this machine. A web page in a browser on this machine could still
    send requests to the service. So a call whose Host or Origin header names another machine is refused. A page cannot
    forge these headers.

    open_paths: paths that anybody may call.
    calls: maximum number of concurrent calls with one token. Admins have no limit. The connections of an admin with a
        token are never closed to make room for others.
    roles: the role that each route requires, by method and path.
    refusal: creates the reply to an error that is raised here.
    """

    def __init__(
        self,
        app: Application,
        tokens: TokenRegistry,
        audit: AuditLog,
        *,
        calls: int,
        websockets: Sequence[APIWebSocketRoute],
        roles: Mapping[str, Role],
        refusal: Callable[[Scope, OutriderError], Response],
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._websockets = websockets
        self._roles = roles
        self._refusal = refusal
        self._calls = calls
        self._under_way: Counter[str] = Counter()
        """Number of calls under way, by token name."""
        self._bodies = BodyRoom()
        self._tokens = tokens
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            caller = await self._tokens.caller(_token(headers))
            if caller is LOCAL:
                check_local(headers)
        except OutriderError as error:
            # Refused calls are not logged: a refused call changes nothing, and any program could fill the audit log
            # with such calls. A WebSocket request that is not accepted yet gets an ordinary HTTP reply.
            await self._refusal(scope, error)(scope, receive, send)
            return
        admin = caller.may("admin")
        claim(scope, f"token {caller.name}", keep=admin and caller is not LOCAL)
        scope[CALLER], scope[CREATED] = caller, {}
        reply = _Reply(scope, send, self._audit)
        self._under_way[caller.name] += 1
        try:
            with self._tokens.call(caller), self._bodies.of(caller.name) as scope[ROOM]:
                if self._under_way[caller.name] > self._calls and not admin:
                    raise Busy(
                        f"{self._calls} calls with token {caller.name!r} are under way: one more is not accepted yet",
                        hint="call again later, or ask for several things in one call: results, not single groups",
                    )
                if scope["type"] == "websocket":
                    self._check_websocket(scope["path"], caller)
                await self._app(scope, receive, reply)
        except RevokedMeanwhile as error:
            await reply.cut_off(receive, str(error))
        except OutriderError as error:  # raised by access control: the application replies to its own errors
            await self._refusal(scope, error)(scope, receive, reply)
        finally:
            self._under_way[caller.name] -= 1
            if not self._under_way[caller.name]:
                del self._under_way[caller.name]

    def _check_websocket(self, path: str, caller: Principal) -> None:
        """Raise Forbidden if the caller may not use the WebSocket route at `path`. Raise NotFound if there is no such
        route. The check runs before routing, because Starlette would turn these errors into a 403 without text."""
        for route in self._websockets:
            if route.path_regex.fullmatch(path):
                called = f"WEBSOCKET {route.path}"
                check(called, self._roles[called], caller)
                return
        raise NotFound(f"there is no WebSocket at {path}")


class _Reply:
    """Sends a reply. If the call may change data, or has created something, its audit log entry is written first."""

    def __init__(self, scope: Scope, send: Send, audit: AuditLog) -> None:
        self._scope = scope
        self._send = send
        self._audit = audit
        self._begun = False

    async def __call__(self, message: Message) -> None:
        if not self._begun:
            self._begun = True
            changes = self._scope.get("method") not in ("GET", "HEAD", "OPTIONS") or self._scope[CREATED]
            if changes and self._scope["path"] not in UNAUDITED:
                await self._audit.add(_entry(self._scope, message.get("status", 101)))
        await self._send(message)

    async def cut_off(self, receive: Receive, reason: str) -> None:
        """End the reply early, because the caller's token was revoked or has expired, as `reason` says."""
        if not self._begun:
            refusal = Unauthorized(reason, hint="ask the operator for another one")
            await error_reply(refusal)(self._scope, receive, self)
        elif self._scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _entry(scope: Scope, status: int) -> AuditEntry:
    caller, client = caller_in(scope), scope.get("client")
    return AuditEntry(
        at=time.time(),
        who=caller.name,
        role=caller.role,
        place=client[0] if client else None,
        call=_called(scope),
        ids=scope.get("path_params", {}) | scope[CREATED],
        status=status,
    )


def _called(scope: Scope) -> str:
    """Return the key of the called route in `roles`. For an unknown route, return the method and the requested path."""
    route = scope.get("route")
    return f"{scope.get('method', 'WEBSOCKET')} {scope['path'] if route is None else route.path}"


def caller_in(scope: Scope) -> Principal:
    found: Principal = scope[CALLER]
    return found


async def check_role(connection: HTTPConnection) -> None:
    """Raise Forbidden if the caller's role is too low for the called route."""
    called = _called(connection.scope)
    check(called, connection.app.state.roles[called], caller_in(connection.scope))


def check(called: str, needed: Role, caller: Principal) -> None:
    if not caller.may(needed):
        raise Forbidden(
            f"{called} needs a token with the role {needed!r}; {caller.name!r} has {caller.role!r}",
            hint=f"the operator makes one: outrider token create --role {needed}",
        )


def _token(headers: dict[bytes, bytes]) -> bytes | None:
    """Return the token in the Authorization header, or None without this header. The token is the bearer token, or the
    password of HTTP Basic authentication, which clients send for a URL like http://USER:TOKEN@HOST. For any other
    scheme, return the whole header."""
    given = headers.get(b"authorization")
    if given is None:
        return None
    scheme, _, value = given.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        with suppress(binascii.Error):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return given


def check_local(headers: dict[bytes, bytes]) -> None:
    """Raise Unauthorized if the Host or Origin header of a request without a token names another machine."""
    for name in (b"host", b"origin"):
        place = headers.get(name, b"localhost").decode("latin-1")
        try:
            host = urlsplit(place if "//" in place else f"//{place}").hostname or ""
        except ValueError:
            host = ""
        if not is_local(host):
            raise Unauthorized(
                f"without a token this service answers its own machine only, not {name.decode()} {place!r}",
                hint="use its address on 127.0.0.1, or serve with a token: --token or OUTRIDER_TOKEN",
            )


def check_address(config: Config, *, has_token: bool) -> None:
    """Raise InvalidField if other machines can reach the service, but the service has no token, or has neither TLS nor
    the setting `insecure`."""
    if not config.public:
        return
    if not has_token:
        raise InvalidField(
            f"{config.host} can be reached from other machines, and no token is set",
            field="token",
            hint="set one with --token or OUTRIDER_TOKEN, make one with `outrider token create`, or serve on 127.0.0.1",
        )
    if config.tls.certificate is None and not config.tls.insecure:
        raise InvalidField(
            f"{config.host} can be reached from other machines, and tokens would cross the network unencrypted",
            field="tls.certificate",
            hint="give a certificate: --tls-certificate FILE --tls-key FILE. If a proxy in front has one, or nobody"
            " else is on the network: --insecure",
        )
