"""The notes that commands print during a long wait."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from cli.test_regrade import KEPT
from cli.world import REPLIES, STALLED, Cli, program, write_task
from outrider.cli.terminal import Terminal
from outrider.cli.waiting import reason_of_wait, waits_noted
from outrider.client.client import AsyncClient
from outrider.schemas import LaneStats, ServiceStatus
from support.service import running_service, scripted_engine


async def status(tmp_path: Path) -> ServiceStatus:
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        return await client.status()


async def test_the_reason_of_a_wait_is_named(tmp_path: Path) -> None:
    idle = await status(tmp_path)
    [engine], [node] = idle.engines, idle.nodes

    def changed(**fields: object) -> str:
        return reason_of_wait(msgspec.structs.replace(idle, **fields))

    down = msgspec.structs.replace(engine, ok=False, url="http://10.0.0.1:8000", detail="connection refused")
    full = LaneStats(name="run", size=4, in_use=4, waiting=9, served=0, waited_seconds=0.0)
    assert changed(engines=()) == "the service has no engine; add one with `outrider engines add`"
    assert "(http://10.0.0.1:8000): connection refused" in changed(engines=(down,))
    assert "outrider policy resume" in changed(policy=msgspec.structs.replace(idle.policy, paused="finish"))
    assert "outrider nodes" in changed(nodes=())
    assert "all 4 slots of the lane 'run'" in changed(nodes=(msgspec.structs.replace(node, lanes=(full,)),))
    assert changed(sessions={"running": 2}).startswith("no model call is under way, and the sessions are 2 running")


async def test_a_wait_is_noted_once_and_only_while_nothing_happens(cli: Cli, tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [STALLED])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url), AsyncClient(url) as client:
        submitted = asyncio.create_task(cli("run", write_task(tmp_path), "--url", url))
        await engine.stalled.wait()
        noted = Noted()
        async with waits_noted(noted, client, every=0.02):
            while not noted.lines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
        await client.cancel((await client.groups())[0].id)
        await submitted
    assert [re.sub(r"\d+", "N", line) for line in noted.lines] == [
        "waiting: N replies are being generated, and no session has ended since"
    ]


async def never(outcome: object) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.deep
async def test_an_evaluation_and_a_grading_again_note_what_they_wait_for(cli: Cli, tmp_path: Path) -> None:
    stuck = write_task(tmp_path, KEPT.replace("cli.world:grade", "cli.test_waiting:never"), "stuck.toml")
    async with running_service(tmp_path=tmp_path, replies=list(REPLIES)) as (_, url), AsyncClient(url) as client:
        ran = await cli("run", write_task(tmp_path, KEPT), "--url", url, "--json")
        words = (("eval", stuck), ("regrade", ran.document["id"], "--task", stuck))
        waiting = [await program(*each, "--url", url) for each in words]
        for process in waiting:
            assert process.stderr is not None
            while b"waiting: no model call is under way" not in await process.stderr.readline():
                assert not process.stderr.at_eof()
        for group in await client.groups(state="active"):
            await client.cancel(group.id)
        assert [await process.wait() for process in waiting] == [1, 1]  # nothing was graded


class Noted(Terminal):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)
