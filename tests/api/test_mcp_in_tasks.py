"""A task with an MCP server and a skill through the API: refusals, the run, its timeline, and its secrets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.errors import InvalidField
from outrider.lab.certify import note_server
from outrider.service.timeline_view import mcp_calls
from support.service import call, running_service, say

from .test_timeline import timeline_with

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SECRET = "s3cr3t-of-the-server"
SKILL = "---\nname: notes\ndescription: How to leave notes.\n---\nLeave one.\n"
SERVER: dict[str, Any] = {
    "name": "notes",
    "transport": "stdio",
    "command": "python3",
    "args": ["server.py", "note.txt"],
    "env": {"NOTES_TOKEN": SECRET},
}


def task(**harness: Any) -> dict[str, Any]:
    server = Path(note_server.__file__).read_text("utf-8").replace("START_SECONDS = 3", "START_SECONDS = 0")
    prepare = [{"write": server, "to": "server.py"}, {"write": SKILL, "to": "skills/notes/SKILL.md"}]
    return {
        "instruction": "Leave a note.",
        "harness": {"agent": "tools", "mcp_servers": [SERVER], "skills": ["skills"], **harness},
        "runtime": {"kind": "process", "prepare": prepare},
        "evaluator": {"run": '[ "$(cat note.txt)" = hello ] || exit 1'},
        "max_attempts": 1,
    }


def databases(folder: Path) -> list[bytes]:
    found = [path.read_bytes() for path in folder.rglob("*.sqlite3*")]
    assert found
    return found


async def test_the_agent_calls_the_tool_and_the_timeline_names_it(tmp_path: Path) -> None:
    replies = [call("hello", tool="mcp__notes__leave_note", argument="text"), say("done")]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task()})).id])
        [session] = done.sessions
        assert session.result is not None
        assert session.result.error is None
        assert session.result.verdict is not None
        assert session.result.verdict.reward == 1.0
        view = await timeline_with(client, session.id, "stage", "eval")
        turns = await client.turns(session.id)
    assert "notes: How to leave notes." in turns[0].context
    [first, _] = [span for span in view.spans if span.kind == "call"]
    assert first.data["mcp_calls"] == [{"server": "notes", "tool": "leave_note"}]
    assert SECRET not in str(view)
    assert not any(SECRET.encode() in data for data in await asyncio.to_thread(databases, tmp_path))


async def test_a_server_that_fails_is_an_error_of_the_harness_without_its_secrets(tmp_path: Path) -> None:
    broken = {**SERVER, "args": ["-c", "import os, sys; sys.exit(os.environ['NOTES_TOKEN'])"]}
    async with running_service(tmp_path=tmp_path, replies=[say("never")]) as (_, url), AsyncClient(url) as client:
        group = await client.submit({"task": task(mcp_servers=[broken])})
        [done] = await client.wait([group.id])
    result = done.sessions[0].result
    assert result is not None
    assert result.verdict is None
    assert result.error is not None
    assert (result.error.boundary, "did not start" in result.error.message) == ("harness", True)
    assert "[redacted]" in (result.error.log_tail or "")
    assert SECRET not in str(result)


@pytest.mark.parametrize(
    ("harness", "field"),
    [
        (
            {"agent": None, "preset": "shell", "options": {"script": "true"}, "skills": []},
            "task.harness.mcp_servers",
        ),
        ({"mcp_servers": [SERVER, SERVER]}, "task.harness.mcp_servers"),
        ({"mcp_servers": [{**SERVER, "transport": "pipe"}]}, "task.harness.mcp_servers.0.transport"),
        (
            {"mcp_servers": [{"name": "a", "transport": "sse", "url": "http://10.0.0.1/"}]},
            "task.harness.mcp_servers.0.transport",
        ),
    ],
)
async def test_refusals_name_the_field(tmp_path: Path, harness: dict[str, Any], field: str) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("never")]) as (_, url), AsyncClient(url) as client:
        with pytest.raises(InvalidField) as caught:
            await client.submit({"task": task(**harness)})
    assert caught.value.field == field


def test_calls_are_found_by_the_names_of_servers() -> None:
    names = {"a": "a_{tool}", "a_b": "a_b_{tool}", "web-1": "mcp__web-1__{tool}"}
    called = ["a_x", "a_b_read_it", "bash", "mcp__web_1__get", "mcp__other__get", "a_"]
    assert mcp_calls(called, names) == [
        {"server": "a", "tool": "x"},
        {"server": "a_b", "tool": "read_it"},
        {"server": "web-1", "tool": "get"},
        {"server": "a", "tool": ""},
    ]
    assert mcp_calls(called, {}) == []
