"""Who may call the control API. The gateway checks its own keys.

Invariant: every control route except OPEN_PATHS is checked here first.
"""

from __future__ import annotations

import secrets
from ipaddress import ip_address
from urllib.parse import urlsplit

from outrider.api.replies import json_reply
from outrider.errors import InvalidField, Unauthorized
from outrider.http_server import Application, Receive, Scope, Send

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})


class AccessControl:
    """Refuses control calls without the service's token.

    A service without a token listens on this machine only. Then a web page open in a browser here could still send it
    requests, so calls are refused whose Host or Origin header names another machine: a page cannot forge these.
    """

    def __init__(self, app: Application, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] not in ("http", "websocket")
            or scope["path"] in OPEN_PATHS
            or (error := self._refusal(scope)) is None
        ):
            await self._app(scope, receive, send)
        else:
            # Starlette answers a WebSocket's request before it is accepted as it answers any other.
            await json_reply(error.record(), status=error.http_status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is not None:
            given = headers.get(b"authorization", b"")
            if secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                return None
            return Unauthorized(
                "this service requires its token" if not given else "this is not the token of this service",
                hint="set OUTRIDER_TOKEN for Outrider's commands, clients and bridges; others send the header"
                " `Authorization: Bearer TOKEN`",
            )
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


def check_address(host: str, token: str | None) -> None:
    """Raises InvalidField for an address that other machines can reach, if there is no token."""
    if not is_local(host) and not token:
        raise InvalidField(
            f"{host} can be reached from other machines, and no token is set",
            field="token",
            hint="set one with --token or OUTRIDER_TOKEN, or serve on 127.0.0.1",
        )
