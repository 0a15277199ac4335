"""The tokens of the wires equal the group's rows for an agent that branches, compacts its history and calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from external.world import elsewhere
from outrider.client.client import AsyncClient
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.trajectory import unpack_ids, unpack_logprobs
from support.service import call, say

from .prorl_world import instance, prorl_service
from .test_polar import ended, serving, task
from .test_verl import TOOL, Recipe

REPLIES = (f"I look.{call('ls')}", say("It is in a file."), say("A summary."), say("Go on."), say("Done."))


class Branching:
    """An agent that continues its history, forks the history in parallel, and then starts over from a summary."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        def user(text: str) -> Message:
            return Message(role=Role.USER, content=text)

        chat = context.model.chat
        history = [user(context.task.instruction)]
        history.append(await chat(history))
        history.append(user("And now?"))
        await asyncio.gather(chat(history), chat([*history[:2], user("Or so?")]))
        await chat([*history, user("Summarise.")])
        last = [user("A summary of all that was said before.")]
        last.append(await chat(last))
        await chat([*last, user("Go on.")])
        return HarnessOutcome()


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging"])
async def test_traces_of_polar(tmp_path: Path, builder: str) -> None:
    agent = {"import_path": "api.compat.test_wire_rows:Branching", "settings": {}}
    async with serving(tmp_path, replies=REPLIES) as (_, client, url), AsyncClient(url) as native:
        await client.submit(task(builder={"strategy": builder, "config": {}}, agent=agent, num_samples=2))
        results = (await ended(client)).results
        [group] = (await native.results(samples=True)).groups
    assert group.samples is not None
    for result in results:
        rows = [sample for sample in group.samples if sample.session_id == result.session_id]
        traces = result.trajectory.traces
        assert len(rows) > 1
        if builder == "prefix_merging":
            for trace, row in zip(traces, rows, strict=True):
                start = row.prompt_length
                assert trace.prompt_ids + trace.response_ids == row.ids.tolist()
                assert trace.loss_mask == row.loss_mask[start:].tolist()
                assert trace.response_logprobs == row.logprobs[start:].tolist()
                assert trace.reward == row.reward
        else:
            for trace in traces:
                row = rows[trace.metadata["row"]]
                whole, start = trace.prompt_ids + trace.response_ids, len(trace.prompt_ids)
                assert whole == row.ids[: len(whole)].tolist()
                assert trace.response_logprobs == row.logprobs[start : len(whole)].tolist()
                assert trace.loss_mask == row.loss_mask[start : len(whole)].tolist()
        assert sum(sum(trace.loss_mask) for trace in traces) == sum(row.trained_tokens for row in rows)


async def test_messages_of_prorl(tmp_path: Path) -> None:
    """The messages are those of the conversation that ends last, so their ids are the beginning of one row."""
    async with prorl_service(tmp_path, replies=REPLIES) as (_, client), AsyncClient(client.url) as native:
        await client.start()
        result = await client.process(instance(source="branching"))
        [group] = (await native.results(samples=True)).groups
    assert result.report is not None
    assert result.report["rows"] == len(group.samples or ()) > 1
    replied = [message for message in result.messages if message.role == "assistant"]
    whole = (replied[-1].input_ids or []) + replied[-1].token_ids
    [row] = [row for row in group.samples or () if row.ids[: len(whole)].tolist() == whole]
    assert len(replied) > 1
    for message in replied:
        assert message.input_ids is not None
        start, end = len(message.input_ids), len(message.input_ids) + len(message.token_ids)
        assert message.input_ids + message.token_ids == row.ids[:end].tolist()
        assert message.logprobs == row.logprobs[start:end].tolist()
        assert row.loss_mask[start:end].all()


async def test_turns_of_verl(tmp_path: Path) -> None:
    """The record has each sampled token of the session's tree once, in the order of the calls."""
    async with elsewhere(tmp_path, replies=REPLIES, compat=("verl",)) as world, aiohttp.ClientSession() as http:
        client = Recipe(http, world.owner.url)
        await client.status("POST", "/sessions/a", "created")
        first = [{"role": "user", "content": "Where is it?"}]
        history = [*first, await client.chat("a", first, tools=[TOOL])]
        result = {"role": "tool", "content": "a.txt", "tool_call_id": history[1]["tool_calls"][0]["id"]}
        await client.chat("a", [*history, result], tools=[TOOL])
        await client.chat("a", [*history, {**result, "content": "b.txt"}], tools=[TOOL])
        await client.chat("a", [{"role": "user", "content": "A summary of all that was said."}], tools=[TOOL])
        record = await client.record("a")
        [group] = await world.service.store.groups()
        [session] = await world.service.store.sessions(group.id)
        turns = await world.service.store.turns(session.id)
    assert [turn.parent for turn in turns] == [None, 0, 0, None]
    for shown, turn in zip(record.turns, turns, strict=True):
        assert shown.completion_token_ids == unpack_ids(turn.output_ids).tolist() != []
        assert shown.completion_logprobs == unpack_logprobs(turn.logprobs).tolist()
    assert [[message["role"] for message in turn.request_messages] for turn in record.turns] == [
        *(["user"], ["tool"], ["tool"], ["user"])
    ]
