"""Sessions whose agents run elsewhere, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.lifecycle import SessionState
from support.service import say, scripted_engine

from .world import elsewhere

REPLIES = (say("It is in a file."), say("The file is empty."), say("Done."))
WHERE = {"role": "user", "content": "Where is it?"}


async def test_an_agent_elsewhere_is_recorded_and_rewarded(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        owner = world.owner
        opened = await owner.open(labels={"run": "r1"})
        assert opened["base_url"].startswith(f"{owner.url}/s/outrider_x_")
        assert opened["variables"]["ANTHROPIC_BASE_URL"] == opened["base_url"]
        agent = world.agent(opened)
        replies = [await agent.ask("Where is it?"), await agent.ask("Read it.")]
        assert replies == ["It is in a file.", "The file is empty."]
        session = opened["session"]
        assert (session["state"], session["node"]) == ("running", "external")
        report = {"reward": 0.5, "metrics": {"tests": 3}, "reason": "half", "turns": {"1": 0.25}, "answer": "empty"}
        assert (await owner.complete(opened, **report)).status_code == 200
        group = await owner.done(session["group_id"])
        result = group["sessions"][0]["result"]
        assert (result["stop_reason"], result["answer"]) == ("completed", "empty")
        assert result["verdict"] == {
            "reward": 0.5,
            "metrics": {"tests": 3.0},
            "reason": "half",
            "turns": {"1": 0.25},
            "rows": {},
        }
        [row] = group["samples"]
        assert row["turns"] == [0, 1]
        assert sum(row["loss_mask"]) > 0
        assert (row["reward"], row["turn_rewards"], row["labels"]) == (0.5, [None, 0.25], {"run": "r1"})
        assert (await agent.post([WHERE])).status_code == 410
        assert (await owner.complete(opened, **report)).status_code == 200, "the same report again"
        assert (await owner.complete(opened, reward=1.0)).status_code == 409


async def test_an_opened_session_accepts_calls_once_it_is_shown_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        stored, store = asyncio.Event(), world.service.store
        set_state = store.set_state

        async def slow(session_id: str, attempt: int, state: SessionState) -> None:
            if state is SessionState.RUNNING:
                await stored.wait()
            await set_state(session_id, attempt, state)

        monkeypatch.setattr(store, "set_state", slow)
        opening = asyncio.create_task(world.owner.open())
        done, _ = await asyncio.wait({opening}, timeout=0.3)
        assert not done
        stored.set()
        assert (await opening)["session"]["state"] == "running"


async def test_a_group_is_filled_by_agents_elsewhere(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        owner = world.owner
        task = {"instruction": "Find it.", "harness": {"external": {}}, "evaluator": {"kind": "reported"}}
        group = (await owner.call("POST", "/groups", {"task": task, "n": 4})).json()

        async def roll_out(index: int) -> None:
            opened = await owner.open(group_id=group["id"], sample_index=index)
            assert opened["key"] == (await owner.open(group_id=group["id"], sample_index=index))["key"]
            assert (opened["instruction"], opened["variables"]["OUTRIDER_INSTRUCTION"]) == ("Find it.", "Find it.")
            await world.agent(opened).ask("Where is it?")
            assert (await owner.complete(opened, reward=index)).status_code == 200

        await asyncio.gather(*map(roll_out, range(4)))
        done = await owner.done(group["id"])
        assert [session["result"]["verdict"]["reward"] for session in done["sessions"]] == [0, 1, 2, 3]
        assert [row["reward"] for row in done["samples"]] == [0, 1, 2, 3]
        results = (await owner.call("GET", "/results", after=0)).json()
        assert [each["id"] for each in results["groups"]] == [group["id"]]


async def test_sessions_elsewhere_do_not_wait_behind_full_lanes(tmp_path: Path) -> None:
    """All slots are taken, and the queue is long."""
    engine = scripted_engine(tmp_path, [{"reply": say("x"), "stall": 0}])
    async with elsewhere(tmp_path, engine=engine, lanes={"init": 1, "run": 1}) as world:
        task = {
            "instruction": "Wait.",
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "command", "run": "true"},
        }
        assert (await world.owner.call("POST", "/groups", {"task": task, "n": 8})).status_code == 201
        await engine.stalled.wait()
        await asyncio.gather(*(world.owner.open() for _ in range(20)))
        engine.release()


async def test_another_evaluator_grades_the_transcript_and_the_answer(tmp_path: Path) -> None:
    evaluator = {"kind": "callable", "path": "external.test_external:graded"}
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open(evaluator=evaluator)
        await world.agent(opened).ask("Where is it?")
        assert (await world.owner.complete(opened, reward=1.0)).json()["field"] == "reward"
        assert (await world.owner.complete(opened, answer="empty")).status_code == 200
        result = await world.owner.result(opened)
        assert result["verdict"]["reward"] == 0.75
        assert (result["regrades"], result["answer"]) == (None, "empty")


def graded(outcome: Any) -> float:
    assert outcome.harness.answer == "empty"
    assert outcome.transcript[-1].content == "It is in a file."
    return 0.75


async def test_a_session_starts_over(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open()
        agent = world.agent(opened)
        await agent.ask("Where is it?")
        assert (await world.owner.call("POST", f"/sessions/{opened['session']['id']}/reset")).status_code == 200
        again = world.agent(opened)
        await again.ask("Another question?")
        await world.owner.complete(opened, reward=1)
        group = await world.owner.done(opened["session"]["group_id"])
        assert group["sessions"][0]["result"]["turns"] == 1
        assert group["samples"][0]["turns"] == [0]


async def test_nobody_completes_the_session(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open(idle_seconds=0.3)
        late = await world.owner.open(limits={"session_seconds": 0.3})
        await world.agent(opened).ask("Where is it?")
        for each, said in ((opened, "no model call came for 0.3 s"), (late, "session_seconds, 0.3 s")):
            result = await world.owner.result(each)
            assert (result["stop_reason"], result["verdict"]) == ("error", None)
            assert said in result["error"]["message"]
            assert result["error"]["code"] == "agent_failed"
            assert (await world.owner.complete(each, reward=1)).status_code == 409


async def test_a_failed_agent_gets_no_reward(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        failed, silent = await world.owner.open(), await world.owner.open()
        await world.owner.complete(failed, error="its machine was lost")
        await world.owner.complete(silent, reward=0)
        result = await world.owner.result(failed)
        assert (result["verdict"], result["error"]["message"]) == (None, "reported: its machine was lost")
        result = await world.owner.result(silent)
        assert result["verdict"] is None
        assert "without a single model call" in result["error"]["message"]


async def test_a_failed_engine_is_no_reward(tmp_path: Path) -> None:
    """The agent's last call fails, and the agent reports the reward of its half-done work."""
    replies = [say("It is in a file."), {"reply": say("x"), "fail": "unavailable", "after": 1}]
    async with elsewhere(tmp_path, replies=replies) as world:
        opened = await world.owner.open()
        agent = world.agent(opened)
        await agent.ask("Where is it?")
        assert (await agent.post([WHERE])).status_code >= 500
        await world.owner.complete(opened, reward=0)
        result = await world.owner.result(opened)
        assert (result["verdict"], result["error"]["boundary"]) == (None, "engine")


@pytest.mark.parametrize("reset", [False, True])
async def test_a_call_given_up_while_the_service_stands_still_is_no_reward(tmp_path: Path, reset: bool) -> None:
    """If the session is not reset after the stall, the agent's reward does not count, and the result is an error."""
    slow = {"reply": say("It is in a file."), "stall": 2}
    async with elsewhere(tmp_path, replies=[say("Ask."), slow, say("Ask."), slow]) as world:
        opened = await world.owner.open()

        async def hang_up() -> None:
            agent = world.agent(opened)
            await agent.ask("Hello?")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await agent.ask("Where is it?")

        await hang_up()
        world.service.external._watchdog.note(2.5)
        if reset:
            assert (await world.owner.call("POST", f"/sessions/{opened['session']['id']}/reset")).status_code == 200
            await hang_up()
        await world.owner.complete(opened, reward=1)
        result = await world.owner.result(opened)
        if reset:
            assert result["verdict"]["reward"] == 1
        else:
            assert (result["verdict"], result["error"]["code"]) == (None, "service_error")
            assert "stood still for 2.5 s" in result["error"]["message"]


async def test_a_session_is_cancelled(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open()
        agent = world.agent(opened)
        await agent.ask("Where is it?")
        assert (await world.owner.call("DELETE", f"/sessions/{opened['session']['id']}")).status_code == 200
        result = await world.owner.result(opened)
        assert (result["stop_reason"], result["turns"]) == ("cancelled", 1)
        assert (await agent.post([WHERE])).status_code == 410


async def test_a_session_at_its_limit_says_so(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open(limits={"turns": 1})
        agent = world.agent(opened)
        await agent.ask("Where is it?")
        assert (await agent.post([WHERE])).status_code == 429
        await world.owner.complete(opened, reward=1)
        assert (await world.owner.result(opened))["stop_reason"] == "max_turns"


async def test_sessions_are_listed_by_their_fields(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        first, second = await world.owner.open(labels={"run": "a"}), await world.owner.open(labels={"run": "b"})
        await world.owner.complete(first, error="lost")
        await world.owner.result(first)

        async def ids(**query: Any) -> list[str]:
            page = (await world.owner.call("GET", "/sessions", **query)).json()
            return [each["id"] for each in page["sessions"]]

        one, two = first["session"]["id"], second["session"]["id"]
        assert await ids() == [two, one]
        assert await ids(label="run=a") == [one]
        assert await ids(state="running") == [two]
        assert await ids(harness="external", since=second["session"]["created"]) == [two]
        assert await ids(harness="claude-code") == []
        page = (await world.owner.call("GET", "/sessions", limit=1)).json()
        assert [each["id"] for each in page["sessions"]] == [two]
        assert await ids(after=page["after"]) == [one]
        assert (await world.owner.call("GET", "/sessions", state="sleeping")).status_code == 422


async def test_turns_have_their_tokens_for_the_owner(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open()
        agent = world.agent(opened)
        await agent.ask("Where is it?")
        await agent.ask("Read it.")
        path = f"/sessions/{opened['session']['id']}/turns"
        first, second = (await world.owner.call("GET", path, tokens=True)).json()["turns"]
        ids = [
            number
            for each in (first, second)
            for number in each["tokens"]["prompt_delta"] + each["tokens"]["output_ids"]
        ]
        await world.owner.complete(opened, reward=1)
        assert (await world.owner.done(opened["session"]["group_id"]))["samples"][0]["ids"] == ids
        assert len(first["tokens"]["logprobs"]) == len(first["tokens"]["output_ids"])
        assert second["tokens"]["messages"][0]["content"] == "Read it."
        assert second["tokens"]["reply"]["content"] == "The file is empty."
        assert (await world.owner.call("GET", path)).json()["turns"][0].get("tokens") is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"group_id": "g-1", "instruction": "x"}, ""),
        ({"sample_index": 1}, ""),
        ({"limits": {"agent_seconds": 5}}, ""),
        ({"evaluator": {"kind": "reported", "run": "true"}}, "evaluator.run"),
        ({"evaluator": {"kind": "callable", "path": "no.such:thing"}}, "evaluator.path"),
    ],
)
async def test_a_session_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], field: str) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        reply = await world.owner.call("POST", "/sessions", fields)
        assert reply.status_code == 422, reply.text
        assert (reply.json()["field"] or "") == field


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({}, "reward"),
        ({"reward": "high"}, "reward"),
        ({"reward": 1e300}, "reward"),
        ({"reward": 1, "turns": {"7": 1}}, "reward"),
        ({"reward": 1, "rows": {"-1": 1}}, "rows.-1"),
        ({"metrics": {"x": 1}}, ""),
        ({"reward": 1, "error": "lost"}, ""),
        ({"reward": 1, "stop_reason": "cancelled"}, "stop_reason"),
    ],
)
async def test_a_report_that_does_not_fit_is_refused(tmp_path: Path, report: dict[str, Any], field: str) -> None:
    async with elsewhere(tmp_path, replies=REPLIES) as world:
        opened = await world.owner.open()
        await world.agent(opened).ask("Where is it?")
        reply = await world.owner.complete(opened, **report)
        assert reply.status_code == 422, reply.text
        assert (reply.json()["field"] or "") == field
        assert (await world.owner.complete(opened, reward=1)).status_code == 200
