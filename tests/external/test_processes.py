"""Agents that run elsewhere, with a service whose sessions are graded in other processes, or that has no node yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.service import say

from .test_restart import engine_server
from .world import elsewhere

pytestmark = pytest.mark.deep


def half(outcome: Any) -> float:
    return 0.5


@pytest.mark.parametrize("evaluator", ["reported", "callable"])
async def test_other_processes_grade(tmp_path: Path, evaluator: str) -> None:
    spec = (
        {"kind": "reported"}
        if evaluator == "reported"
        else {"kind": "callable", "path": "external.test_processes:half"}
    )
    report = {"reward": 0.5} if evaluator == "reported" else {"answer": "x"}
    async with (
        engine_server(tmp_path) as (_, url),
        elsewhere(tmp_path, processes=2, engines=({"kind": "vllm", "name": "e", "url": url},)) as world,
    ):
        opened = await world.owner.open(evaluator=spec)
        await world.agent(opened).ask("Where is it?")
        assert (await world.owner.complete(opened, **report)).status_code == 200
        result = await world.owner.result(opened)
        assert result["error"] is None, result["error"]
        assert result["verdict"]["reward"] == 0.5


async def test_a_session_waits_for_a_node_that_grades(tmp_path: Path) -> None:
    spec = {"kind": "callable", "path": "external.test_processes:half"}
    async with elsewhere(tmp_path, processes=0, replies=[say("In a file.")]) as world:
        opened, reported = await world.owner.open(evaluator=spec), await world.owner.open()
        for each, report in ((opened, {"answer": "x"}), (reported, {"reward": 1})):
            await world.agent(each).ask("Where is it?")
            assert (await world.owner.complete(each, **report)).status_code == 200
        assert (await world.owner.result(reported))["verdict"]["reward"] == 1
        await asyncio.sleep(0.3)
        session = (await world.owner.call("GET", f"/sessions/{opened['session']['id']}")).json()
        assert session["state"] == "running", "not an error, and not lost"
