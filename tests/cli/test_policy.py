"""`outrider policy` against a live service."""

from __future__ import annotations

from pathlib import Path

from cli.world import Cli
from support.service import running_service, say, scripted_engine


async def test_the_policy_is_shown_paused_and_updated(cli: Cli, tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [say("hello")])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url):
        shown = await cli("policy", "show", "--url", url, "--json")
        paused = await cli("policy", "pause", "--mode", "abort", "--url", url)
        status = await cli("status", "--url", url)
        resumed = await cli("policy", "resume", "3", "--url", url, "--json")
        updated = await cli("policy", "update", "4", "--weights", tmp_path, "--url", url)
        back = await cli("policy", "update", "2", "--url", url)
        far = await cli("policy", "update", str(2**31 - 1), "--url", url)
        undone = await cli("policy", "update", "4", "--weights", tmp_path, "--go-back", "--url", url)
        wrong = await cli("policy", "update", "5", "--weights", "nowhere", "--url", url)
    engines = [{"name": "scripted", "version": 0, "ok": True}]
    assert shown.document == {"version": 0, "paused": None, "engines": engines, "cancelled": []}
    assert "policy version 0, paused (abort)" in paused.out
    assert "policy version 0, paused (abort)" in status.out
    assert (resumed.document["version"], resumed.document["paused"]) == (3, None)
    assert "policy version 4" in updated.out
    assert engine.weights == str(tmp_path)
    assert (back.code, back.err.splitlines()[0]) == (
        2,
        "error: the policy is at version 4: it cannot go back to 2",
    )
    assert "policy version 2147483647" in far.out
    assert "policy version 4" in undone.out
    assert (wrong.code, wrong.err.splitlines()[0]) == (1, "error: engine 'scripted' finds no weights in nowhere")
