"""Serves the web page for a finished run, on this machine only: the page's files, and the routes of the control API
that the page reads.

Invariant: no route changes anything. There is no token, so requests that name another machine are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse

from outrider.api.access import check_local
from outrider.api.control_replies import bad_query, error_reply, json_reply, long_reply, not_served, outrider_error
from outrider.api.files import DOWNLOAD, SAFE, UNKNOWN, image_type
from outrider.api.gateway_server import HttpServer, listener_at, running, url_of
from outrider.api.page import PATHS, page_routes
from outrider.api.session_filter import Wanted
from outrider.errors import NotFound, OutriderError
from outrider.lifecycle import GroupState, SessionState
from outrider.schemas import GroupList, GroupSummary, SessionList, SessionView
from outrider.service.finished_runs import GROUPS_AT_ONCE, FinishedRun
from outrider.service.runs import check_filter
from outrider.spec import MAX_CURSOR
from outrider.store.artifacts import FOR_GRADERS, LOGGED
from outrider.store.run_index.lists import SessionFilter
from outrider.store.run_index.rows_of_runs import searched_text
from outrider.wire.file_descriptors import raise_limit, shares
from outrider.wire.http_server import Receive, Scope, Send

T = TypeVar("T")

HOST = "127.0.0.1"
MOST_GROUPS = 2000
"""Maximum number of groups that one request reads."""

Limit = Annotated[int, Query(ge=1, le=1000)]


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
    app = FastAPI(
        routes=list(page_routes()),
        openapi_url=None,
        exception_handlers={
            OutriderError: outrider_error,
            RequestValidationError: bad_query,
            404: _unknown,
            405: _unknown,
            Exception: outrider_error,
        },
    )
    for path, handler in (
        ("/groups", routes.groups),
        ("/groups/{group}", routes.group),
        ("/sessions", routes.sessions),
        ("/sessions/{session}", routes.session),
        ("/sessions/{session}/turns", routes.turns),
        ("/sessions/{session}/samples", routes.samples),
        ("/sessions/{session}/timeline", routes.timeline),
        ("/sessions/{session}/artifacts", routes.artifacts),
        ("/sessions/{session}/artifacts/{path:any_path}", routes.artifact),
        ("/images/{digest}", routes.image),
    ):
        app.add_api_route(f"/v1{path}", handler, response_model=None)

    async def local(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PATHS:
            try:
                check_local(dict(scope["headers"]))
            except OutriderError as error:
                await error_reply(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return local


async def _unknown(request: Request, error: Exception) -> Response:
    return error_reply(not_served(request))


class _Routes:
    def __init__(self, run: FinishedRun) -> None:
        self._run = run

    async def groups(self, wanted: Wanted, after: str | None = None, limit: Limit = 20) -> Response:
        check_filter(wanted, GroupState)
        of_session = SessionFilter(stop_reason=wanted.stop_reason, error=wanted.error, text=wanted.text)

        async def fitting(group: GroupSummary) -> list[GroupSummary]:
            if not _fits_state_and_reward(group.state, group.mean_reward, wanted):
                return []
            if not of_session.empty:
                sessions = (await self._run.group(group.id)).sessions
                return [group] if any(_fits_session(each, of_session) for each in sessions) else []
            return [group]

        found, after = await self._page(wanted, fitting, after=after, limit=limit)
        return json_reply(GroupList(groups=tuple(found), after=after))

    async def group(self, group: str) -> Response:
        return json_reply(await self._run.group(group))

    async def sessions(self, wanted: Wanted, after: str | None = None, limit: Limit = 100) -> Response:
        check_filter(wanted, SessionState)

        async def fitting(group: GroupSummary) -> list[SessionView]:
            return [each for each in (await self._run.group(group.id)).sessions if _fits_session(each, wanted)]

        found, after = await self._page(wanted, fitting, after=after, limit=limit)
        return json_reply(SessionList(sessions=tuple(found), after=after))

    async def _page(
        self,
        wanted: SessionFilter,
        fitting: Callable[[GroupSummary], Awaitable[list[T]]],
        *,
        after: str | None,
        limit: int,
    ) -> tuple[list[T], str | None]:
        """Return one page of a list, and `after` for the next page (None on the last page). The page starts after the
        group `after`, and ends with the group whose entries fill it to `limit` entries or more. `fitting` returns the
        entries of a group. It is called only for groups that match the filter's fields about groups."""
        self._run.check_filter(wanted)
        found: list[T] = []
        for _ in range(0, MOST_GROUPS, GROUPS_AT_ONCE):
            some = await self._run.groups(after, harness=wanted.harness)
            for group in some:
                after = group.id
                if _fits_group(group, wanted):
                    found += await fitting(group)
                if len(found) >= limit:
                    return found, after
            if len(some) < GROUPS_AT_ONCE:
                return found, None
        return found, after

    async def session(self, session: str) -> Response:
        return json_reply(await self._run.session(session))

    async def turns(self, session: str, tokens: bool = False) -> Response:
        return long_reply([await self._run.turns(session, tokens=tokens)])

    async def samples(self, session: str) -> Response:
        return long_reply([await self._run.samples(session)])

    async def timeline(
        self, session: str, attempt: Annotated[int | None, Query(ge=1, le=MAX_CURSOR)] = None
    ) -> Response:
        return json_reply(await self._run.timeline(session, attempt))

    async def artifacts(self, session: str) -> Response:
        return json_reply(await self._run.artifacts(session))

    async def artifact(self, session: str, path: str) -> Response:
        name = path if path in (*FOR_GRADERS, *LOGGED) else f"/{path}"
        file = await self._run.artifact(session, name)
        return FileResponse(file, media_type=UNKNOWN, headers=DOWNLOAD)

    async def image(self, digest: str) -> Response:
        found = await self._run.image(digest)
        if not found.data:
            raise NotFound("this image was sent by its address: there are no bytes")
        return Response(found.data, media_type=image_type(found), headers=SAFE)


def _fits_group(group: GroupSummary, wanted: SessionFilter) -> bool:
    """Return True if the group matches the filter's fields about groups."""
    return (
        (not wanted.groups or group.id in wanted.groups)
        and all(group.labels.get(name) == value for name, value in wanted.labels.items())
        and (wanted.since is None or group.created >= wanted.since)
        and (wanted.until is None or group.created < wanted.until)
    )


def _fits_session(session: SessionView, wanted: SessionFilter) -> bool:
    """Return True if the session matches the filter's fields about sessions."""
    result = session.result
    error, verdict = (result.error, result.verdict) if result else (None, None)
    return (
        _fits_state_and_reward(session.state, verdict.reward if verdict else None, wanted)
        and (wanted.stop_reason is None or (result is not None and result.stop_reason == wanted.stop_reason))
        and (wanted.error is None or (error is not None and error.code == wanted.error))
        and (wanted.text is None or (result is not None and wanted.text.lower() in searched_text(result)))
    )


def _fits_state_and_reward(state: SessionState | GroupState, reward: float | None, wanted: SessionFilter) -> bool:
    if wanted.states and state.value not in wanted.states:
        return False
    low, high = wanted.min_reward, wanted.max_reward
    if reward is None:
        return low is None and high is None
    return (low is None or reward >= low) and (high is None or reward <= high)
