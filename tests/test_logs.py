"""Log lines: the session to which they belong, their JSON, and no secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.logs import JsonLogFormatter, LogFormatter, LoggedSession, logged_for
from outrider.schemas import ArtifactList
from outrider.sessions.artifacts import ArtifactCollector
from support.service import running_service

LINES = "-----BEGIN KEY-----\nzq1zq1zq1\nzq2zq2zq2\n-----END KEY-----"
ATTEMPT = LoggedSession(group="g-1", session="s-1-0", attempt=2, secrets=("hunter2-hunter2", LINES))
KEY = "outrider_s_" + "k" * 40


def record(message: str, *arguments: object, caught: Any = None) -> logging.LogRecord:
    return logging.LogRecord("outrider.session", logging.WARNING, "", 0, message, arguments, caught)


def failure(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_line_of_text_names_its_session_once() -> None:
    formatter = LogFormatter()
    assert "attempt" not in formatter.format(record("hello"))
    with logged_for(ATTEMPT):
        assert formatter.format(record("hello")).endswith("outrider.session: hello [s-1-0, attempt 2]")
        assert formatter.format(record("s-1-0 failed")).endswith("outrider.session: s-1-0 failed")
        first, *rest = formatter.format(record("it failed", caught=failure("hunter2-hunter2"))).split("\n")
        assert first.endswith("it failed [s-1-0, attempt 2]")
        assert rest[-1] == "    ValueError: [redacted]"
        assert formatter.format(record("it has %s", LINES)).endswith("it has [redacted] [s-1-0, attempt 2]")
    assert "attempt" not in formatter.format(record("hello"))


def test_a_line_of_json_has_its_fields() -> None:
    formatter = JsonLogFormatter("the-operators-token", process="local-0")
    with logged_for(ATTEMPT):
        said = record(
            "%s the-operators-token %s \x1b[2K\ud800", "hunter2-hunter2", KEY, caught=failure("hunter2-hunter2")
        )
        text = formatter.format(said)
    assert "\n" not in text
    line = json.loads(text)
    traceback = line.pop("traceback")
    assert traceback.endswith("ValueError: [redacted]")
    assert line == {
        "at": said.created,
        "time": line["time"],
        "level": "warning",
        "logger": "outrider.session",
        "message": "[redacted] [redacted] [redacted] \\x1b[2K\\ud800",
        "process": "local-0",
        "group": "g-1",
        "session": "s-1-0",
        "attempt": 2,
    }
    assert line["time"].endswith("Z")
    assert json.loads(JsonLogFormatter().format(record("x"))).keys() == {"at", "time", "level", "logger", "message"}


async def test_tasks_and_threads_of_a_session_log_for_it() -> None:
    formatter, found = LogFormatter(), []

    async def work() -> None:
        found.append(formatter.format(record("a task")))
        found.append(await asyncio.to_thread(formatter.format, record("a thread")))

    with logged_for(ATTEMPT):
        task = asyncio.create_task(work())
    await task
    assert all(line.endswith("[s-1-0, attempt 2]") for line in found)


class Capture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLogFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


async def test_a_failing_session_is_logged_with_its_ids_and_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: ArtifactCollector, *_: object) -> ArtifactList:
        raise KeyError("a bug, with t0p-s3cr3t-value")

    monkeypatch.setattr(ArtifactCollector, "collect", fails)
    capture = Capture()
    logger = logging.getLogger("outrider")
    logger.addHandler(capture)
    try:
        task = {
            "instruction": "x",
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory", "env": {"DEPLOY_TOKEN": "t0p-s3cr3t-value"}},
            "evaluator": {"kind": "command", "run": "true"},
            "max_attempts": 1,
        }
        async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
            group = await client.submit({"task": task})
            [done] = await client.wait([group.id])
    finally:
        logger.removeHandler(capture)
    (line,) = (line for line in capture.lines if "KeyError" in line.get("traceback", ""))
    session = done.sessions[0]
    assert (line["group"], line["session"], line["attempt"]) == (group.id, session.id, 1)
    assert "t0p-s3cr3t-value" not in json.dumps(capture.lines)
    assert "[redacted]" in line["traceback"]
