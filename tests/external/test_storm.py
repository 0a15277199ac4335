"""Random calls, resets, reports and cancellations, at the same time, of sessions whose agents run elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.service import say

from .world import Elsewhere, elsewhere

MEANT = {200, 201, 404, 409, 410, 429, 503}
SESSIONS = 40


class Life:
    """One session, and clients that call, reset, complete and cancel the session at random times."""

    def __init__(self, world: Elsewhere, opened: dict[str, Any], chance: random.Random) -> None:
        self.world = world
        self.opened = opened
        self.chance = chance
        self.statuses: Counter[int] = Counter()
        self.accepted: list[dict[str, Any]] = []

    async def live(self) -> None:
        acts = [self.talk, self.talk, self.talk, self.reset, self.report, self.report]
        if self.chance.random() < 0.3:
            acts.append(self.cancel)
        self.chance.shuffle(acts)
        await asyncio.gather(*(self.later(act) for act in acts))
        reply = await self.world.owner.complete(self.opened, reward=9)
        if reply.status_code == 200:
            self.accepted.append({"reward": 9})

    async def later(self, act: Any) -> None:
        await asyncio.sleep(self.chance.random() / 4)
        await act()

    async def talk(self) -> None:
        agent = self.world.agent(self.opened)
        messages: list[dict[str, Any]] = []
        for number in range(self.chance.randrange(1, 5)):
            messages.append({"role": "user", "content": f"Question {number}?"})
            try:
                async with asyncio.timeout(self.chance.choice((0.02, 5))):
                    reply = await agent.post(messages, stream=self.chance.random() < 0.3)
            except TimeoutError:  # the client hangs up
                return
            self.statuses[reply.status_code] += 1
            if reply.status_code != 200 or "text/event-stream" in reply.headers["content-type"]:
                return
            messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})

    async def reset(self) -> None:
        reply = await self.world.owner.call("POST", f"/sessions/{self.opened['session']['id']}/reset")
        self.statuses[reply.status_code] += 1

    async def report(self) -> None:
        report = self.chance.choice(({"reward": 1}, {"reward": 0.5}, {"error": "lost"}))
        reply = await self.world.owner.complete(self.opened, **report)
        self.statuses[reply.status_code] += 1
        if reply.status_code == 200:
            self.accepted.append(report)

    async def cancel(self) -> None:
        reply = await self.world.owner.call("DELETE", f"/sessions/{self.opened['session']['id']}")
        self.statuses[reply.status_code] += 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
async def test_nothing_is_lost_or_made_up(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with elsewhere(tmp_path, replies=[say(f"Reply {number}.") for number in range(5)]) as world:
        opened = [await world.owner.open(idle_seconds=20) for _ in range(SESSIONS)]
        lives = [Life(world, each, random.Random(chance.random())) for each in opened]
        await asyncio.gather(*(life.live() for life in lives))
        for life in lives:
            assert set(life.statuses) <= MEANT, life.statuses
            group = await world.owner.done(life.opened["session"]["group_id"])
            [session] = group["sessions"]
            result, rewards = session["result"], {report.get("reward") for report in life.accepted}
            assert len({str(report) for report in life.accepted}) <= 1, "one report is accepted"
            turns = (await world.owner.call("GET", f"/sessions/{session['id']}/turns")).json()["turns"]
            assert [turn["index"] for turn in turns] == list(range(len(turns)))
            assert result["turns"] == len(turns)
            if result["verdict"] is not None:
                assert {result["verdict"]["reward"]} == rewards
            elif result["stop_reason"] != "cancelled":
                error = result["error"]
                # a busy machine is to blame, not the agent
                slow = "s longer than usual" in error["message"] or "stood still" in error["message"]
                assert error["code"] in ("agent_failed", "engine_silent") or slow, error
            for row in group["samples"] or []:
                assert len(row["ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
