"""Which errors `patiently` retries, and what is logged meanwhile."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from outrider.client.client import AsyncClient, RetryLimits, patiently
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import Boundary, Busy, ErrorRecord, NotFound, OutriderError, ServiceError, ServiceUnusable
from outrider.lifecycle import GroupState
from support.answering import answering

Answer = Callable[[], web.Response]


async def tries(answer: Answer) -> tuple[int, OutriderError]:
    """Return how often a call is tried in 0.5 s, and its error."""
    count = 0

    async def counted(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return answer()

    async with answering(counted) as url, AsyncClient(url) as client:
        with pytest.raises(OutriderError) as caught:
            await patiently(client.status, patience=0.5)
    return count, caught.value


def record(status: int, code: str, *, retryable: bool) -> web.Response:
    body = ErrorRecord(boundary=Boundary.SERVICE, code=code, message="no", hint="why", retryable=retryable)
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="<h1>Authorization Required</h1>", status=401),
        lambda: web.Response(text="404 page not found", status=404),
        lambda: web.Response(text="Request Entity Too Large", status=413),
        lambda: web.json_response({"detail": "Not Found"}, status=404),
        lambda: web.Response(status=302, headers={"Location": "https://login.example.org/"}),
        lambda: web.Response(text="<html>Jupyter</html>"),
        lambda: web.json_response({"unknown": 1}),
        lambda: record(410, "code_of_another_version", retryable=False),
    ],
    ids=["401", "404", "413", "other program", "redirect", "html", "json", "newer"],
)
async def test_what_another_try_cannot_change_is_not_retried(answer: Answer) -> None:
    count, error = await tries(answer)
    assert (count, type(error)) == (1, ServiceUnusable)
    assert error.hint


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="Bad Gateway", status=502),
        lambda: web.Response(text="Service Unavailable", status=503),
        lambda: web.Response(text="slow down", status=429),
        lambda: web.Response(text="Internal Server Error", status=500),
        lambda: record(500, "internal_error", retryable=True),
        lambda: record(503, "store_unavailable", retryable=True),
        lambda: record(409, "code_of_another_version", retryable=True),
    ],
    ids=["502", "503", "429", "500", "bug", "store", "newer"],
)
async def test_what_may_pass_is_retried(answer: Answer) -> None:
    count, error = await tries(answer)
    assert count > 1
    assert error.retryable


async def test_the_services_own_refusals_are_not_retried() -> None:
    count, error = await tries(lambda: record(404, "not_found", retryable=False))
    assert (count, type(error)) == (1, NotFound)


async def test_a_client_that_is_not_open_is_not_retried() -> None:
    client = AsyncClient("http://127.0.0.1:1")
    with pytest.raises(ServiceUnusable, match="not open"):
        await asyncio.wait_for(patiently(client.status), 5)


async def test_long_retries_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    limits = RetryLimits(waits=RetryPolicy(first=0.02, longest=0.02), report_after=0.05, report_every=0.0)
    errors: list[ServiceError] = [ServiceError("a bug")] * 12 + [Busy("the queue is full", retry_after=0.1)] * 2

    async def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    with caplog.at_level(logging.WARNING):
        assert await patiently(call, limits=limits) == "done"
    lines = [line.message for line in caplog.records]
    assert any(re.match(r"retrying for \d+ s now, and for up to \d+ s more: a bug", line) for line in lines)
    assert any("the queue is full" in line for line in lines)
    assert re.fullmatch(r"the service replies again, after \d+ s", lines[-1])


async def test_a_wait_without_end_for_a_full_queue_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    replies: list[Busy | str] = [Busy("the queue is full", retry_after=0.01)] * 3 + ["done"]

    async def call() -> str:
        match replies.pop(0):
            case Busy() as busy:
                raise busy
            case str(reply):
                return reply

    with caplog.at_level(logging.INFO):
        assert await patiently(call, math.inf, unreachable=False, limits=RetryLimits(report_after=0.0)) == "done"
    assert {line.levelname for line in caplog.records} == {"INFO"}


async def test_short_retries_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ServiceError("away")] * 2

    async def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    with caplog.at_level(logging.WARNING):
        assert await patiently(call) == "done"
    assert not caplog.records


async def test_many_calls_that_are_retried_make_one_report(caplog: pytest.LogCaptureFixture) -> None:
    limits = RetryLimits(report_after=0.0)

    async def call() -> str:
        raise ServiceError("away")

    with caplog.at_level(logging.WARNING):
        outcomes = await asyncio.gather(
            *(patiently(call, 0.3, limits=limits) for _ in range(50)), return_exceptions=True
        )
    assert {str(outcome) for outcome in outcomes} == {"away"}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("watched", [False, True])
async def test_the_wait_for_groups_outlasts_a_restart_of_the_service(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [False, True, True, False, False]
    client = AsyncClient("http://127.0.0.1:1")

    async def group(group_id: str, *, wait: float = 0.0) -> SimpleNamespace:
        if away and away.pop(0):
            raise ServiceError("the service cannot be reached")
        return SimpleNamespace(id=group_id, state=GroupState.ACTIVE if away else GroupState.DONE)

    monkeypatch.setattr(client, "group", group)
    found = await client.wait(["g-1"], (lambda groups: None) if watched else None)
    assert [(view.id, view.state) for view in found] == [("g-1", GroupState.DONE)]


async def test_a_wait_for_a_service_that_is_not_there_fails_at_once() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(ServiceError):
            await asyncio.wait_for(client.wait(["g-1"]), 5)


GROUP = {"task": {}, "n": 1}
KEYED = {**GROUP, "idempotency_key": "k"}
REPEATED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("group", "session", "turns", "timeline", "samples", "chat_rows"), ("s-1",)),
    **dict.fromkeys(("artifacts", "cancel_session", "query"), ("s-1",)),
    **dict.fromkeys(("group_page", "results", "consumers", "dead_callbacks", "sessions", "status"), ()),
    **dict.fromkeys(
        ("engines", "nodes", "tokens", "policy", "pauses", "pause_queue", "metrics", "diagnosis", "rates"), ()
    ),
    **dict.fromkeys(("cancel", "drain_node", "resume_node", "drain_engine", "image"), ("x",)),
    "artifact": ("s-1", "a"),
    "ack": ("c", 1),
    "diff": ("a=b", "c=d"),
    "reply_body": ("/v1/thing",),
    "complete_session": ("s-1", {}),
    "submit": (KEYED,),
    "regrade": ("g-1", {"idempotency_key": "k"}),
    "open_session": ({"idempotency_key": "k"},),
}
"""The client's calls that are repeated, with arguments."""
ONCE: dict[str, tuple[Any, ...]] = {
    "submit": (GROUP,),
    "regrade": ("g-1",),
    "open_session": (),
    "reset_session": ("s-1",),
    "redeliver": (),
    "gc": (),
    "pull_image": ("r", "n"),
    "add_engine": ({},),
    "create_token": ("t", "read"),
    **dict.fromkeys(("cancel_sessions", "retry_sessions"), ({},)),
    "resume_queue": (),
    "pause_policy": (),
    "resume_policy": (),
    "update_policy": (1,),
    **dict.fromkeys(("remove_consumer", "discard_callback", "remove_engine", "revoke_token"), ("x",)),
}
"""The client's calls that are sent once, with arguments."""
MADE_OF_OTHERS = {"groups", "wait", "follow", "events", "external_session"}


def test_every_method_of_the_client_is_repeated_or_not() -> None:
    public = {name for name, value in vars(AsyncClient).items() if callable(value) and not name.startswith("_")}
    assert public == REPEATED.keys() | ONCE.keys() | MADE_OF_OTHERS


@asynccontextmanager
async def failing_after_contact(**options: Any) -> AsyncIterator[tuple[AsyncClient, Counter[str]]]:
    """Yield a client that has had one reply and since then gets only errors, and the number of requests since then by
    method and path."""
    asked: Counter[str] = Counter()
    reached = False

    async def answer(request: web.Request) -> web.Response:
        nonlocal reached
        if not reached:
            reached = True
            return web.json_response({"version": 1, "paused": None, "engines": []})
        asked[f"{request.method} {request.path}"] += 1
        return web.Response(text="Bad Gateway", status=502)

    async with answering(answer) as url, AsyncClient(url, **options) as client:
        assert await client.policy() is not None
        yield client, asked


def begin(client: AsyncClient, calls: dict[str, tuple[Any, ...]], patience: float) -> list[asyncio.Task[Any]]:
    own = {"patience": patience}  # for the calls that take it as an argument
    return [
        asyncio.create_task(
            getattr(client, name)(*args, **(own if name in ("submit", "regrade", "open_session") else {}))
        )
        for name, args in calls.items()
    ]


async def test_safe_calls_are_repeated() -> None:
    async with failing_after_contact(patience=60.0) as (client, asked):
        tasks = begin(client, REPEATED, 60.0)
        async with asyncio.timeout(50):  # a shorter timeout is too short on some machines
            while len(asked) < len(REPEATED) or min(asked.values()) < 2:  # noqa: ASYNC110  # no event for it
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("calls", "repeated"), [(REPEATED, True), (ONCE, False)])
async def test_a_call_ends_in_an_error_once_its_patience_is_over(
    calls: dict[str, tuple[Any, ...]], repeated: bool
) -> None:
    async with failing_after_contact(patience=0.3) as (client, asked):
        results = await asyncio.gather(*begin(client, calls, 0.3), return_exceptions=True)
    assert {type(result) for result in results} <= {ServiceError, ServiceUnusable}
    assert repeated or set(asked.values()) == {1}
    assert len(asked) == len(calls)


async def test_a_rewind_is_sent_once() -> None:
    async with failing_after_contact(patience=0.3) as (client, asked):
        with pytest.raises(ServiceError):
            await client.ack("c", 1, rewind=True)
    assert asked == {"POST /v1/consumers/c/ack": 1}


async def test_with_a_patience_of_0_nothing_is_repeated() -> None:
    async with failing_after_contact(patience=0) as (client, asked):
        with pytest.raises(ServiceError):
            await client.status()
    assert asked == {"GET /v1/status": 1}


async def test_a_service_that_was_never_reached_is_reported_at_once() -> None:
    count = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(text="Bad Gateway", status=502)

    async with answering(answer) as url, AsyncClient(url) as client:
        for call in (client.status(), client.submit(KEYED)):
            with pytest.raises(ServiceError):
                await call
    assert count == 2
