"""Rewards of turns and rows, from the evaluator of a live service to the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from support.scribe import scribe_task
from support.service import running_service, say

SAID = [say("one"), say("two"), say("three")]


async def test_rewards_of_turns_and_rows_are_stored_and_placed(tmp_path: Path) -> None:
    task = scribe_task("placed", rewards=[0.5], rewrites=[0], turns={"1": 0.25, "2": -1.0}, rows={"1": 2.0})
    async with running_service(tmp_path=tmp_path, replies=SAID) as (service, url), AsyncClient(url) as client:
        group = await client.submit({"task": task | {"instruction": "go"}})
        [done] = await client.wait([group.id])
        samples = (await service.group(group.id, wait=0, samples=True)).samples or ()
    result = done.sessions[0].result
    assert result is not None
    assert result.verdict is not None
    assert (result.verdict.turns, result.verdict.rows) == ({1: 0.25, 2: -1.0}, {1: 2.0})
    assert [(sample.turns, sample.reward, sample.turn_rewards) for sample in samples] == [
        ((0, 1), 0.5, (None, 0.25)),
        ((2,), 2.0, (-1.0,)),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turns": {"2": 1.0}}, "it rewards turn 2, and the session has 2 turns, from 0"),
        ({"rows": {"1": 1.0}}, "it rewards row 1, and the rows that train are: 0"),
    ],
)
async def test_a_reward_for_what_is_not_there_is_an_error(tmp_path: Path, given: Any, message: str) -> None:
    async with running_service(tmp_path=tmp_path, replies=SAID) as (_, url), AsyncClient(url) as client:
        task = scribe_task(f"not there {message}", **given) | {"instruction": "go"}
        [done] = await client.wait([(await client.submit({"task": task})).id])
    result = done.sessions[0].result
    assert result is not None
    assert result.verdict is None
    assert result.error is not None
    assert result.error.code == "evaluator_error"
    assert message in result.error.message
