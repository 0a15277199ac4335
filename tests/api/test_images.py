"""Images from the agent's request to the trainer's sample, in every dialect."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from api.test_gateway import KEY, a_gateway
from outrider.api.access import CALLER
from outrider.api.files import ROUTES
from outrider.client.client import AsyncClient
from outrider.errors import NotFound
from outrider.lab.fakes.engine_servers.app import serving
from outrider.messages import Image, image_from_bytes, image_from_url, images_in
from outrider.service.principals import LOCAL
from outrider.trajectory import SampleImage, TokenMode
from outrider.wire.http_server import Receive, Scope, Send
from support.pictures import ADDRESS, PATHS, PNG, bodies, picture_service, task
from support.service import running_service

DIGEST = hashlib.sha256(PNG).hexdigest()
ELSEWHERE = image_from_url(ADDRESS).digest


def shown(turn: int, message: int) -> SampleImage:
    return SampleImage(turn=turn, message=message, digest=DIGEST, media_type="image/png", size=len(PNG), url=None)


def linked(turn: int, message: int) -> SampleImage:
    return SampleImage(turn=turn, message=message, digest=ELSEWHERE, media_type="", size=0, url=ADDRESS)


def stored(data: Path) -> tuple[list[tuple[str, str, bytes]], list[bytes]]:
    """Return the rows of images and the packed turns in the database."""
    with closing(sqlite3.connect(data / "outrider.sqlite3")) as database:
        images = database.execute("SELECT digest, media_type, data FROM images").fetchall()
        return images, [row[0] for row in database.execute("SELECT turn FROM turns")]


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_image_reaches_the_sample_and_is_stored_once(tmp_path: Path, dialect: str) -> None:
    async with (
        picture_service(tmp_path, sessions=2) as (_, url, server),
        AsyncClient(url) as client,
    ):
        [done] = await client.wait([(await client.submit({"task": task(dialect), "n": 2})).id])
        assert [session.last_error for session in done.sessions] == [None, None]
        for session in done.sessions:
            [sample] = await client.samples(session.id)
            assert (sample.mode, sample.ids.tolist()) == (TokenMode.CAPTURE, [1, 2, 3, 7, 8, 4, 5, 9])
            assert sample.images == (shown(0, 0), shown(1, 2), linked(1, 2))
            assert sample.reward == 2.0
        assert await client.image(DIGEST) == image_from_bytes("image/png", PNG)
        with pytest.raises(NotFound, match="no image"):
            await client.image(ELSEWHERE)
    given = [part["image_url"]["url"][:23] for part in pictures(server.posts[-1][1])]
    assert given == ["data:image/png;base64,i", "data:image/png;base64,i", ADDRESS[:23]]
    images, turns = stored(tmp_path / "data")
    assert images == [(DIGEST, "image/png", PNG)]
    assert len(turns) == 4
    assert not any(PNG in turn for turn in turns)


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_image_in_a_tools_result_reaches_the_engine_and_the_sample(tmp_path: Path, dialect: str) -> None:
    async with picture_service(tmp_path) as (_, url, server), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task(dialect, result=True)})).id])
        assert done.sessions[0].last_error is None
        [sample] = await client.samples(done.sessions[0].id)
        assert sample.images == (shown(0, 2),)
        assert await client.image(DIGEST) == image_from_bytes("image/png", PNG)
    sent = server.posts[-1][1]["messages"][-1]
    assert sent["role"] == "tool"
    assert [part["type"] for part in sent["content"]] == ["image_url"]


def pictures(body: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [
        part for message in body["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    return [part for part in parts if part["type"] == "image_url"]


async def test_an_engine_without_ids_leaves_images_and_no_samples(tmp_path: Path) -> None:
    async with picture_service(tmp_path, captured=False) as (service, url, _), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task("chat")})).id])
        assert await client.samples(done.sessions[0].id) == ()
        assert (await client.image(DIGEST)).data == PNG
        whole = await service.store.turns(done.sessions[0].id, images=True)
        assert [image.data for turn in whole for image in images_in(turn.messages[-1])] == [PNG, PNG, b""]
    images, turns = stored(tmp_path / "data")
    assert (len(images), len(turns)) == (1, 2)


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_text_only_engine_refuses_an_image_in_the_dialects_shape(tmp_path: Path, dialect: str) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        async with http.post(f"/s/{KEY}{PATHS[dialect]}", json=bodies(dialect)[0]) as reply:
            body = await reply.json()
        assert reply.status == 400
        error = body["error"]
        assert "text only" in error["message"]
        expected = {
            "chat": ("type", "invalid_request_error"),
            "responses": ("type", "invalid_request_error"),
            "messages": ("type", "invalid_request_error"),
            "gemini": ("status", "INVALID_ARGUMENT"),
        }
        name, value = expected[dialect]
        assert error[name] == value
        assert (body.get("type") == "error") is (dialect == "messages")
        assert world.turns == []


async def test_images_are_not_counted_for_an_engine_that_makes_their_tokens_itself(tmp_path: Path) -> None:
    async with picture_service(tmp_path) as (_, url, _), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": {**task("counted"), "max_attempts": 1}})).id])
        result = done.sessions[0].result
        assert result is not None
        assert result.error is not None
        assert "not known before the call" in result.error.message


async def test_what_a_text_only_engine_refuses_is_not_stored(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": {**task("messages"), "max_attempts": 1}})).id])
        assert done.sessions[0].result is not None
        assert done.sessions[0].result.error is not None
        assert "400" in done.sessions[0].result.error.message
        with pytest.raises(NotFound):
            await client.image(DIGEST)
    assert stored(tmp_path / "data") == ([], [])


@pytest.mark.parametrize(
    ("media_type", "served"),
    [
        ("image/svg+xml", "image/svg+xml"),
        ("image/x\r\nSet-Cookie: a=b", "application/octet-stream"),
        ("image/png; charset=é", "application/octet-stream"),
    ],
)
async def test_an_image_is_served_so_that_no_browser_runs_it(media_type: str, served: str) -> None:
    app = FastAPI()
    app.include_router(ROUTES.routes)
    app.state.service = SimpleNamespace(store=OneImage(image_from_bytes(media_type, PNG)))
    app.state.roles = ROUTES.roles

    async def let_in(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALLER] = LOCAL
        await app(scope, receive, send)

    async with serving(let_in) as url, aiohttp.ClientSession(url) as http, http.get(f"/v1/images/{DIGEST}") as reply:
        assert (reply.status, reply.headers["Content-Type"], await reply.read()) == (200, served, PNG)
        assert "Set-Cookie" not in reply.headers
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in reply.headers["Content-Security-Policy"]


class OneImage:
    """A store that returns one image for every digest."""

    def __init__(self, image: Image) -> None:
        self._image = image

    async def image(self, digest: str, *, tenant: str | None) -> Image:
        return self._image


async def test_the_route_says_what_it_serves(tmp_path: Path) -> None:
    async with picture_service(tmp_path) as (_, url, _), aiohttp.ClientSession(url) as http:
        async with http.get("/openapi.json") as reply:
            route = (await reply.json())["paths"]["/v1/images/{digest}"]["get"]
        assert list(route["responses"]["200"]["content"]) == ["image/*"]
        async with http.get(f"/v1/images/{DIGEST}") as reply:
            assert (reply.status, (await reply.json())["code"]) == (404, "not_found")
