"""The files that sessions keep, over HTTP and with the client."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from outrider.client.client import AsyncClient
from outrider.errors import InvalidField, NotFound
from support.service import call, running_service, say

NAME = "a b%2F?#ü.txt"
TASK = {
    "instruction": "Leave something.",
    "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
    "runtime": {"kind": "memory", "prepare": [{"write": "<script>1</script>", "to": f"out/{NAME}"}]},
    "evaluator": {"run": "true"},
    "artifacts": ["out/*", "none"],
}


async def test_listed_and_served_as_bytes(tmp_path: Path) -> None:
    replies = (call("echo hi > out/log"), say("done"))
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as client:
        [group] = await client.wait([(await client.submit({"task": TASK})).id])
        session = group.sessions[0].id
        listed = await client.artifacts(session)
        assert [(file.path, file.size) for file in listed.artifacts] == [
            (f"/work/out/{NAME}", 18),
            ("/work/out/log", 3),
        ]
        assert [left.path for left in listed.left_out] == ["none"]
        assert await client.artifact(session, "/work/out/log") == b"hi\n"
        assert await client.artifact(session, f"/work/out/{NAME}", attempt=1) == b"<script>1</script>"
        async with aiohttp.ClientSession() as http:
            place = f"{url}/v1/sessions/{session}/artifacts"
            async with http.get(f"{place}/work/out/{quote(NAME)}") as reply:
                assert reply.status == 200
                assert reply.content_type == "application/octet-stream"
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert reply.headers["Content-Disposition"] == "attachment"
                assert "sandbox" in reply.headers["Content-Security-Policy"]
            for path in ("/work/out/../out/log", "/../../../outrider.sqlite3", "/%2e%2e/index.json", "/", "//"):
                async with http.get(f"{place}{path}") as reply:
                    assert reply.status in (200, 404)
                    assert (
                        reply.status == 404 or listed.session_id in await reply.text() or await reply.read() == b"hi\n"
                    )


async def test_what_is_not_there(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        plain = {**TASK, "artifacts": []}
        [group] = await client.wait([(await client.submit({"task": plain})).id])
        session = group.sessions[0].id
        listed = await client.artifacts(session)
        assert (listed.attempt, listed.artifacts, listed.left_out) == (None, (), ())
        with pytest.raises(NotFound, match="has kept no"):
            await client.artifact(session, "/work/out")
        for unknown in ("s-none", "..", "%2e%2e"):
            with pytest.raises(NotFound):
                await client.artifacts(unknown)
        with pytest.raises(InvalidField):
            await client.artifacts(session, attempt=0)


ODD = (
    "line\nbreak",
    "ends with one\n",
    "ends with one",
    "\nbegins with one",
    "carriage\rreturn",
    "tab\t",
    "\\",
    "%0a",
    "%",
    "?",
    "#",
    "&a=b",
    ";p",
    "+ +",
    "...",
    "..a",
    ".hidden",
    "~",
    "\x01\x7f",
    "\ufffd",
    "\u202e",
    "é",
    "e\u0301",
    "'\"",
)


async def test_what_is_listed_is_served_whatever_it_is_called(tmp_path: Path) -> None:
    prepare = [{"write": f"<{name}>", "to": f"out/{name}"} for name in ODD]
    task = {**TASK, "runtime": {"kind": "memory", "prepare": prepare}, "artifacts": ["out/*", "out/.*"]}
    replies = [say("done")]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as client:
        [group] = await client.wait([(await client.submit({"task": task})).id])
        session = group.sessions[0].id
        listed = await client.artifacts(session)
        assert {file.path for file in listed.artifacts} == {f"/work/out/{name}" for name in ODD}
        for name in ODD:
            assert await client.artifact(session, f"/work/out/{name}") == f"<{name}>".encode(), repr(name)
        with pytest.raises(NotFound):
            await client.artifact(session, "/work/out/...\n")
