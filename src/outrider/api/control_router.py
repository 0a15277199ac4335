"""Declares routes of the control API. The decorator of a handler gives the method, path, role, reply and errors. The
handler's annotations give the parameters and the body.

Access control, the OpenAPI description, docs/api.md and the tests use these declarations. A declaration is made when
the route's module is imported, before there is a service. The application that includes the route provides the service.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.params import Depends as Dependency
from starlette.requests import HTTPConnection

from outrider.api.access import CREATED, caller_in, check_role
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import json_answer, refusals, request_body
from outrider.errors import OutriderError
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.spec import Role, Spec

S = TypeVar("S", bound=Spec)
Handler = Callable[..., Awaitable[Any]]
H = TypeVar("H", bound=Handler)


async def service_of(connection: HTTPConnection) -> Service:
    found: Service = connection.app.state.service
    return found


async def caller_of(connection: HTTPConnection) -> Principal:
    return caller_in(connection.scope)


async def created_in(connection: HTTPConnection) -> Callable[..., None]:
    note: Callable[..., None] = connection.scope[CREATED].update
    return note


Serving = Annotated[Service, Depends(service_of)]
Caller = Annotated[Principal, Depends(caller_of)]
Created = Annotated[Callable[..., None], Depends(created_in)]
"""A function that records the ids of created objects for the audit log. Handlers call it before they return:
`created(group_id=...)`."""


class _BodyReader:
    """Parses the body of a request as a spec. If there is no body, `empty` is parsed instead."""

    def __init__(self, kind: type[Spec], empty: bytes) -> None:
        self.kind = kind
        self._empty = empty

    async def __call__(self, request: Request, service: Serving, caller: Caller) -> Spec:
        return await service.parse(self.kind, await whole_body(request) or self._empty, caller)


def body(kind: type[Spec], *, empty: bytes = b"") -> Any:
    """Annotate the parameter of a handler that gets the request's body: `spec: Annotated[GroupSpec,
    body(GroupSpec)]`."""
    return Depends(_BodyReader(kind, empty))


class ControlRouter:
    """Collects routes whose paths begin with the version (`/v1`) and a prefix. Each route checks the caller's role. A
    handler returns a msgspec struct or a Response."""

    def __init__(self, prefix: str = "", *, version: str = "/v1") -> None:
        self.routes = APIRouter(prefix=version + prefix, dependencies=[Depends(check_role)])
        self.roles: dict[str, Role] = {}
        """The role that each route requires, by method and path."""
        self.replies: list[type[msgspec.Struct]] = []
        self.requests: list[type[Spec]] = []

    def get(self, path: str, role: Role, reply: type[msgspec.Struct] | None = None, **about: Any) -> Callable[[H], H]:
        return self._route("GET", path, role, reply, **about)

    def post(self, path: str, role: Role, reply: type[msgspec.Struct], **about: Any) -> Callable[[H], H]:
        return self._route("POST", path, role, reply, **about)

    def delete(self, path: str, role: Role, reply: type[msgspec.Struct], **about: Any) -> Callable[[H], H]:
        return self._route("DELETE", path, role, reply, **about)

    def websocket(self, path: str, role: Role) -> Callable[[H], H]:
        def register(handler: H) -> H:
            self.roles[f"WEBSOCKET {self.routes.prefix}{path}"] = role
            self.routes.add_api_websocket_route(path, _resolved(handler, handler))
            return handler

        return register

    def _route(
        self,
        method: str,
        path: str,
        role: Role,
        reply: type[msgspec.Struct] | None,
        *,
        errors: tuple[type[OutriderError], ...] = (),
        status: int = 200,
        also: Mapping[int | str, dict[str, Any]] = {},
        forms: Mapping[str, dict[str, Any]] = {},
        response_class: type[Response] = Response,
    ) -> Callable[[H], H]:
        """Return a decorator that adds a handler as a route.

        errors: errors that the OpenAPI description cannot derive from path, parameters and body.
        also: descriptions of other replies, by status.
        forms: descriptions of this reply in other media types.
        """

        def register(handler: H) -> H:
            self.roles[f"{method} {self.routes.prefix}{path}"] = role

            @functools.wraps(handler)
            async def respond(**arguments: Any) -> Response:
                result = await handler(**arguments)
                return result if isinstance(result, Response) else json_reply(result, status=status)

            answer, kind = {}, _body_of(handler)
            if reply is not None:
                answer[status] = json_answer(reply)
                answer[status]["content"] |= forms
                self.replies.append(reply)
            if kind is not None:
                self.requests.append(kind)
            self.routes.add_api_route(
                path,
                _resolved(respond, handler),
                methods=[method],
                status_code=status,
                response_class=response_class,
                response_model=None,
                responses=refusals(*errors) | answer | dict(also),
                openapi_extra=None if kind is None else request_body(kind),
            )
            return handler

        return register


def _resolved(function: Handler, handler: Handler) -> Handler:
    """Give `function` the signature of `handler`. The annotations of the handler are strings, and are evaluated
    here."""
    hints = typing.get_type_hints(handler, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(handler).parameters.items()
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions have attributes
    return function


def _body_of(handler: Handler) -> type[Spec] | None:
    for hint in typing.get_type_hints(handler, include_extras=True).values():
        for about in getattr(hint, "__metadata__", ()):
            if isinstance(about, Dependency) and isinstance(about.dependency, _BodyReader):
                return about.dependency.kind
    return None
