"""`status`, `show` and `cancel` against a live service."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cli.world import REPLIES, STALLED, Cli, write_task
from outrider.cli.show import print_session
from outrider.cli.tables import session_table
from outrider.cli.task_sources import load_group
from outrider.client.client import AsyncClient
from outrider.config import FrozenConfig
from outrider.lifecycle import StopReason
from outrider.spec import EngineSpec
from outrider.trajectory import HarnessExit, Verdict
from support.service import running_service, say, scripted_engine


async def test_status_of_the_service(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "-n", "2", "--url", url, "--json")
        seen = await cli("status", "--url", url)
        read = await cli("status", "--url", url, "--json")
    assert seen.code == 0
    assert "2 done" in seen.out
    assert f"{ran.document['id']}" in seen.out
    assert "scripted" in seen.out
    assert read.document["service"]["sessions"]["done"] == 2
    assert [group["id"] for group in read.document["groups"]] == [ran.document["id"]]


async def test_status_of_a_group(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url, "--json")
        group = ran.document
        seen = await cli("status", group["id"], "--url", url)
        read = await cli("status", group["id"], "--url", url, "--json")
        missing = await cli("status", "g-none", "--url", url)
    assert group["sessions"][0]["id"] in seen.out
    assert read.document == group
    assert (missing.code, missing.err.splitlines()[0]) == (2, "error: no group 'g-none'")


async def test_show_marks_what_was_sampled(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url, "--json")
        session = ran.document["sessions"][0]["id"]
        seen = await cli("show", session, "--url", url)
        read = await cli("show", session, "--url", url, "--json")
        kept = await cli("artifacts", session, "--url", url)
    sampled = [line.removeprefix("> ") for line in seen.out.splitlines() if line.startswith("> ")]
    assert "\n".join(sampled) == "\n".join(REPLIES)
    assert "  Write hi into out.txt.<|im_end|>" in seen.out.splitlines()
    assert "  [1 tool call]" in seen.out.splitlines()
    assert "── turn 1 · append to turn 0 ·" in seen.out
    assert "reward 1.00 · bytes 3.00" in seen.out
    assert "\x1b" not in seen.out
    assert kept.err == "no files were kept; a task names the files to keep in its field `artifacts`\n"
    assert [turn["sampled"] for turn in read.document["turns"]] == list(REPLIES)


async def test_show_names_the_frozen_model_at_its_turns(cli: Cli, tmp_path: Path) -> None:
    engine = EngineSpec(kind="scripted", options={"replies": [say("The score is high.")]})
    frozen = (FrozenConfig(name="judge", engines=(engine,)),)
    task = {
        "instruction": "do it",
        "harness": {"agent": "service.duet:Duet", "options": {"calls": ["policy", "judge", "judge", "policy"]}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "command", "run": "true"},
    }
    async with (
        running_service(tmp_path=tmp_path, replies=REPLIES, frozen=frozen) as (_, url),
        AsyncClient(url) as client,
    ):
        [done] = await client.wait([(await client.submit({"task": task})).id])
        seen = await cli("show", done.sessions[0].id, "--url", url)
        read = await cli("show", done.sessions[0].id, "--url", url, "--json")
    headings = [line.split(" · ")[:3] for line in seen.out.splitlines() if line.startswith("── ")]
    assert [heading[:2] for heading in headings[:3]] == [
        ["── turn 0", "root"],
        ["── judge turn 0", "frozen"],
        ["── judge turn 1", "frozen"],
    ]
    assert headings[2][2] == "append to judge turn 0"
    assert headings[3][:2] == ["── turn 1", "append to turn 0"]
    assert "judge (frozen): 2 turns · " in seen.out
    assert "completed · 2 turns · " in seen.out
    assert [turn["model"] for turn in read.document["turns"]] == [None, "judge", "judge", None]
    assert read.document["session"]["result"]["frozen"]["judge"]["turns"] == 2


async def test_show_tells_an_error_with_its_hint(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[{"reply": "", "fail": "rejected"}]) as (_, url):
        ran = await cli("run", write_task(tmp_path), "--url", url, "--json")
        seen = await cli("show", ran.document["sessions"][0]["id"], "--url", url)
    assert ran.code == 1
    assert "error (engine, engine_rejected): " in seen.out


async def test_what_a_sandbox_printed_does_not_steer_the_terminal(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url),
        AsyncClient(url) as client,
    ):
        group = await client.submit(load_group(write_task(tmp_path), n=1, priority=0))
        [done] = await client.wait([group.id])
        [first, second] = await client.turns(done.sessions[0].id)
    hostile = msgspec.structs.replace(second, context="a\x1b]0;owned\x07\n[bold]b[/bold]\r", cause="history_rewritten")
    [session] = done.sessions
    assert session.result is not None
    named = msgspec.structs.replace(
        session.result, ignored={"tools.web\x1b_search": 2}, failed_calls={"bad_request: n": 3}
    )
    file = io.StringIO()
    print_session(Console(file=file, width=200), msgspec.structs.replace(session, result=named), [first, hostile])
    text = file.getvalue()
    assert "  a\\x1b]0;owned\\x07\n  [bold]b[/bold]\\x0d\n" in text
    assert "fork: history_rewritten" in text
    assert "asked for without effect (turns): tools.web\\x1b_search (2)" in text
    assert "model calls answered with an error: bad_request: n (3)" in text


async def test_a_program_whose_calls_are_not_served_is_told_apart(cli: Cli, tmp_path: Path) -> None:
    """The error and the result name the calls."""
    task = tmp_path / "task.toml"
    task.write_text(
        'instruction = "Say hi."\nmax_attempts = 1\nevaluator = { run = "true" }\nruntime = { kind = "process" }\n'
        '[harness]\ncommand = ["sh", "-c", "curl -s -d {} $OPENAI_BASE_URL/completions"]\n'
    )
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", task, "--url", url, "--json")
        [session] = ran.document["sessions"]
        seen = await cli("show", session["id"], "--url", url)
    result = session["result"]
    assert result["failed_calls"] == {"not_found: POST /v1/completions": 1}
    assert result["error"]["message"].endswith("; calls answered with an error: not_found: POST /v1/completions (1)")
    assert "model calls answered with an error: not_found: POST /v1/completions (1)" in seen.out


async def test_tables_have_the_failed_model_calls_of_a_session_without_an_error(cli: Cli, tmp_path: Path) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    program = (
        "for n in 1 2; do curl -s -d {} $OPENAI_BASE_URL/completions; done; "
        f"curl -s -H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}' $OPENAI_BASE_URL/chat/completions"
    )
    task = tmp_path / "task.toml"
    task.write_text(
        'instruction = "Say hi."\nevaluator = { run = "true" }\nruntime = { kind = "process" }\n'
        f'[harness]\ncommand = ["sh", "-c", {json.dumps(program)}]\n'
    )
    async with running_service(tmp_path=tmp_path, replies=[say("hi")]) as (_, url):
        ran = await cli("run", task, "--url", url)
        [session] = (await cli("sessions", "--url", url, "--json")).document["sessions"]
        seen = [ran, await cli("status", session["group_id"], "--url", url), await cli("sessions", "--url", url)]
    assert (session["result"]["error"], ran.code) == (None, 0)
    for each in seen:
        assert "2 failed model calls" in each.out


async def test_a_crash_and_an_excess_are_told_apart_from_a_plain_zero(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url),
        AsyncClient(url) as client,
    ):
        group = await client.submit(load_group(write_task(tmp_path), n=1, priority=0))
        [done] = await client.wait([group.id])
    [session] = done.sessions
    assert session.result is not None
    crash: dict[str, Any] = {
        "stop_reason": StopReason.NONZERO_EXIT,
        "harness_exit": HarnessExit(code=3, log_tail="no such tool"),
    }
    reason = "agent_excess: the disk is full"
    excess: dict[str, Any] = {"stop_reason": StopReason.AGENT_EXCESS, "verdict": Verdict(reward=0.0, reason=reason)}
    for how, shown, told in ((crash, "exit code 3", "no such tool"), (excess, reason, reason)):
        ended = msgspec.structs.replace(session, result=msgspec.structs.replace(session.result, **how))
        file = io.StringIO()
        console = Console(file=file, width=200)
        console.print(session_table(msgspec.structs.replace(done, sessions=(ended,))))
        assert shown in file.getvalue()
        assert how["stop_reason"].value in file.getvalue()
        file.truncate(0)
        print_session(console, ended, [])
        assert told in file.getvalue()


async def test_cancel_ends_a_running_group(cli: Cli, tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [STALLED])
    async with (
        running_service(tmp_path=tmp_path, engine=engine) as (_, url),
        AsyncClient(url) as client,
    ):
        group = await client.submit(load_group(write_task(tmp_path), n=2, priority=0))
        await engine.stalled.wait()
        running = await cli("status", group.id, "--url", url)
        ran = await cli("cancel", group.id, "--url", url, "--json")
        [done] = await client.wait([group.id])
        seen = await cli("show", group.sessions[0].id, "--url", url)
        again = await cli("cancel", group.id, "--url", url)
    assert "running" in running.out
    assert (ran.code, ran.document["cancelled"]) == (0, True)
    assert {session.result.stop_reason for session in done.sessions if session.result} == {"cancelled"}
    assert "cancelled · " in seen.out
    assert again.out.startswith(f"group {group.id}: cancelled, done\n")
