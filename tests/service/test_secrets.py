"""Secrets that a failing agent prints do not appear in anything that the service shows."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from outrider.client.client import AsyncClient
from outrider.lifecycle import StopReason
from support.service import running_service, say

PRINT = "echo key $OPENAI_API_KEY; echo $OPENAI_BASE_URL; echo mine $GITHUB_TOKEN $PREPARED; exit 3"


@pytest.mark.deep
async def test_what_a_failing_agent_prints_is_shown_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = {
        "instruction": "print",
        "harness": {
            "command": ["/bin/sh", "-c", PRINT],
            "env": {"GITHUB_TOKEN": "ghp_of_the_harness", "PREPARED": "plain words"},
        },
        "runtime": {
            "kind": "process",
            "env": {"SOME_SECRET": "of_the_runtime"},
            "prepare": [{"run": "echo $STEP_KEY of_the_runtime >&2", "env": {"STEP_KEY": "of_a_step"}}],
        },
        "evaluator": {"kind": "command", "run": "true"},
        "max_attempts": 2,
    }
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        submitted = await client.submit({"task": task})
        [done] = await client.wait([submitted.id])
        error = str(done.sessions[0].result.error)
        assert "key [redacted]" in error
        assert "/s/[redacted]" in error
        assert "mine [redacted] plain words" in error
        shown = str(done) + caplog.text
        async for event in client.events():
            shown += str(event)
            if event.kind == "group.done":
                break
    assert "session.retry" in shown
    for secret in ("outrider_s_", "ghp_of_the_harness"):
        assert secret not in shown


async def test_a_prepare_step_that_fails_is_shown_without_secrets(tmp_path: Path) -> None:
    task = {
        "instruction": "print",
        "harness": {"agent": "tools"},
        "runtime": {"kind": "process", "prepare": [{"run": "echo $A_KEY; exit 1", "env": {"A_KEY": "key_of_a_step"}}]},
        "evaluator": {"kind": "command", "run": "true"},
        "max_attempts": 1,
    }
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task})).id])
    assert "[redacted]" in str(done.sessions[0].result.error)
    assert "key_of_a_step" not in str(done)


async def test_what_is_secret_in_a_graders_sandbox_is_not_shown_either(tmp_path: Path) -> None:
    grader = {
        "kind": "process",
        "env": {"GRADER_TOKEN": "token_of_the_grader"},
        "prepare": [{"run": "echo $GRADER_TOKEN $A_KEY; exit 1", "env": {"A_KEY": "key_of_a_step"}}],
    }
    task = {
        "instruction": "print",
        "harness": {"agent": "tools"},
        "runtime": {"kind": "process"},
        "evaluator": {"run": "true", "carry": [], "runtime": grader},
        "max_attempts": 1,
    }
    async with running_service(tmp_path=tmp_path, replies=[say("done")]) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task})).id])
    assert "[redacted] [redacted]" in str(done.sessions[0].result.error)
    assert "token_of_the_grader" not in str(done)
    assert "key_of_a_step" not in str(done)


async def test_the_turns_of_a_running_session_do_not_show_its_key(tmp_path: Path) -> None:
    """With the key, a reader of the turns could make model calls."""
    script = """
    body() { printf '{"model": "m", "messages": [{"role": "user", "content": "my key is %s"}]}' "$OPENAI_API_KEY"; }
    python3 -c '
import os, sys, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", sys.stdin.buffer.read(), {
    "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
urllib.request.urlopen(request).read()' <<END
$(body)
END
    """
    task = {
        "instruction": "print",
        "harness": {"command": ["/bin/sh", "-c", script]},
        "runtime": {"kind": "process"},
        "evaluator": {"kind": "command", "run": "true"},
    }
    async with (
        running_service(tmp_path=tmp_path, replies=[say("I see")]) as (_, url),
        AsyncClient(url) as client,
    ):
        [done] = await client.wait([(await client.submit({"task": task})).id])
        assert done.sessions[0].result.stop_reason is StopReason.COMPLETED, done.sessions[0].result.error
        [turn] = await client.turns(done.sessions[0].id)
        assert "my key is [redacted]" in turn.context


async def test_the_status_shows_no_password_of_an_engine(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        [member] = service.pool.members.values()
        member.url = "http://me:pass@engine:8000"
        async with aiohttp.ClientSession(url) as http:
            for route in ("/v1/status", "/v1/engines"):
                async with http.get(route) as reply:
                    text = await reply.text()
                assert "http://[redacted]@engine:8000" in text
                assert "pass@" not in text
