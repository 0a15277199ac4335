"""Serves the web page for a finished run, on this machine only: the page's files, and the routes of the control API
that the page reads.

Invariant: no route changes anything. There is no token, so requests that name another machine are refused.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from outrider.api.access import check_local
from outrider.api.control_replies import error_reply, json_reply, long_reply, not_served
from outrider.api.files import DOWNLOAD, SAFE, UNKNOWN, image_type
from outrider.api.gateway_server import HttpServer, listener_at, running, url_of
from outrider.api.page import PATHS, page_routes
from outrider.errors import InvalidField, NotFound, OutriderError
from outrider.schemas import GroupList, GroupSummary, SessionList, SessionView
from outrider.service.finished_runs import GROUPS_AT_ONCE, FinishedRun
from outrider.store.artifacts import FOR_GRADERS, LOGGED
from outrider.wire.file_descriptors import raise_limit, shares
from outrider.wire.http_server import Receive, Scope, Send

T = TypeVar("T")

HOST = "127.0.0.1"
MOST_ROWS = 1000
MOST_GROUPS = 2000
"""Maximum number of groups that one request reads."""


@asynccontextmanager
async def serving_run(run: FinishedRun, port: int) -> AsyncIterator[str]:
    """Serve the page for a finished run during the block. Yields the page's URL. Raises ServiceError if the port is in
    use."""
    with listener_at(HOST, port) as listener:
        server = HttpServer(run_app(run), shares(raise_limit()).control)
        async with running(server, listener):
            yield url_of(listener, tls=False)


def run_app(run: FinishedRun) -> Callable[[Scope, Receive, Send], Any]:
    """Return the ASGI application that serves the page for a finished run."""
    routes = _Routes(run)
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/v1/groups", routes.groups),
            Route("/v1/groups/{group}", routes.group),
            Route("/v1/sessions", routes.sessions),
            Route("/v1/sessions/{session}", routes.session),
            Route("/v1/sessions/{session}/turns", routes.turns),
            Route("/v1/sessions/{session}/samples", routes.samples),
            Route("/v1/sessions/{session}/timeline", routes.timeline),
            Route("/v1/sessions/{session}/artifacts", routes.artifacts),
            Route("/v1/sessions/{session}/artifacts/{path:any_path}", routes.artifact),
            Route("/v1/images/{digest}", routes.image),
        ],
        exception_handlers={OutriderError: _refused, 404: _unknown, 405: _unknown, Exception: _refused},
    )

    async def local(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PATHS:
            try:
                check_local(dict(scope["headers"]))
            except OutriderError as error:
                await error_reply(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return local


async def _refused(request: Request, error: Exception) -> Response:
    return error_reply(error)


async def _unknown(request: Request, error: Exception) -> Response:
    return error_reply(not_served(request))


class _Routes:
    def __init__(self, run: FinishedRun) -> None:
        self._run = run

    async def groups(self, request: Request) -> Response:
        async def fitting(group: GroupSummary) -> list[GroupSummary]:
            return [group] if _fits_group(group, request) else []

        found, after = await self._page(request, fitting, limit=20)
        return json_reply(GroupList(groups=tuple(found), after=after))

    async def group(self, request: Request) -> Response:
        return json_reply(await self._run.group(request.path_params["group"]))

    async def sessions(self, request: Request) -> Response:
        async def fitting(group: GroupSummary) -> list[SessionView]:
            if not _has_labels(group.labels, request.query_params) or group.created < _number(request, "since", 0.0):
                return []
            return [each for each in (await self._run.group(group.id)).sessions if _fits_session(each, request)]

        found, after = await self._page(request, fitting, limit=100)
        return json_reply(SessionList(sessions=tuple(found), after=after))

    async def _page(
        self, request: Request, fitting: Callable[[GroupSummary], Awaitable[list[T]]], *, limit: int
    ) -> tuple[list[T], str | None]:
        """Return one page of a list, and `after` for the next page (None on the last page). `fitting` returns the
        entries of one group. The page starts after the group in the request's `after`. It ends with the group that
        reaches the request's `limit`."""
        most, after = _number(request, "limit", limit), request.query_params.get("after")
        found: list[T] = []
        for _ in range(0, MOST_GROUPS, GROUPS_AT_ONCE):
            some = await self._run.groups(after)
            for group in some:
                after = group.id
                found += await fitting(group)
                if len(found) >= most:
                    return found, after
            if len(some) < GROUPS_AT_ONCE:
                return found, None
        return found, after

    async def session(self, request: Request) -> Response:
        return json_reply(await self._run.session(request.path_params["session"]))

    async def turns(self, request: Request) -> Response:
        tokens = request.query_params.get("tokens") == "true"
        return long_reply([await self._run.turns(request.path_params["session"], tokens=tokens)])

    async def samples(self, request: Request) -> Response:
        return long_reply([await self._run.samples(request.path_params["session"])])

    async def timeline(self, request: Request) -> Response:
        attempt = int(_number(request, "attempt", 0)) or None
        return json_reply(await self._run.timeline(request.path_params["session"], attempt))

    async def artifacts(self, request: Request) -> Response:
        return json_reply(await self._run.artifacts(request.path_params["session"]))

    async def artifact(self, request: Request) -> Response:
        path = request.path_params["path"]
        name = path if path in (*FOR_GRADERS, *LOGGED) else f"/{path}"
        file = await self._run.artifact(request.path_params["session"], name)
        return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)

    async def image(self, request: Request) -> Response:
        found = await self._run.image(request.path_params["digest"])
        if not found.data:
            raise NotFound("this image was sent by its address: there are no bytes")
        return Response(found.data, media_type=image_type(found), headers=SAFE)


def _number(request: Request, name: str, default: float) -> float:
    """Return a query parameter as a number. If it is missing, return `default`. Raises InvalidField."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidField(f"{text!r} is not a number", field=name)
    return min(value, MOST_ROWS) if name == "limit" else value


def _has_labels(labels: Mapping[str, str], query: Any) -> bool:
    wanted = [each.partition("=") for each in query.getlist("label")]
    return all(labels.get(name) == value for name, _, value in wanted)


def _fits_reward(reward: float | None, request: Request) -> bool:
    low = _number(request, "min_reward", -math.inf)
    high = _number(request, "max_reward", math.inf)
    if reward is None:
        return low == -math.inf and high == math.inf
    return low <= reward <= high


def _fits_group(group: GroupSummary, request: Request) -> bool:
    query = request.query_params
    return (
        query.get("state") in (None, group.state.value)
        and _has_labels(group.labels, query)
        and group.created >= _number(request, "since", 0.0)
        and _fits_reward(group.mean_reward, request)
    )


def _fits_session(session: SessionView, request: Request) -> bool:
    query, result = request.query_params, session.result
    error = session.last_error if result is None else result.error or session.last_error
    verdict = None if result is None else result.verdict
    texts = [error.message if error else "", error.log_tail or "" if error else "", (result and result.answer) or ""]
    return (
        query.get("state") in (None, session.state.value)
        and query.get("stop_reason") in (None, result.stop_reason.value if result else "")
        and query.get("error") in (None, error.code if error else "")
        and (query.get("text") or "").lower() in "\n".join(texts).lower()
        and _fits_reward(verdict.reward if verdict else None, request)
    )
