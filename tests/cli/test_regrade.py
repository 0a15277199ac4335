"""Grading again with the client and with `outrider regrade`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.world import REPLIES, TASK, Cli, write_task
from outrider.client.client import AsyncClient
from outrider.errors import InvalidField, NotFound
from outrider.spec import RegradeSpec
from support.service import running_service

KEPT = TASK.replace('path = "cli.world:grade"', 'path = "cli.world:grade"\ncarry = ["out.txt"]\nkeep = true')


@pytest.mark.deep
async def test_a_session_and_a_group_are_graded_again(tmp_path: Path, cli: Cli) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        ran = await cli("run", write_task(tmp_path, KEPT), "-n", "2", "--url", url, "--json")
        old = await client.group(ran.document["id"])
        session = old.sessions[0].id
        spec = RegradeSpec(labels={"graded": "twice"}, idempotency_key="once")
        group = await client.regrade(session, spec)
        assert (group.n, group.labels) == (1, {"name": "hi", "graded": "twice"})
        assert (await client.regrade(session, spec)).id == group.id
        [done] = await client.wait([group.id])
        result = done.sessions[0].result
        assert result is not None
        assert result.verdict is not None
        assert (result.verdict.reward, result.regrades) == (1.0, session)
        listed = await cli("artifacts", session, "--url", url)
        assert "outrider:carried" in listed.out
        assert len(await client.artifact(session, "outrider:carried")) > 0

        shown = await cli("regrade", old.id, session, "--url", url)
        assert shown.code == 0
        header, _, *rows = shown.out.splitlines()
        assert header.split() == ["session", "was", "now", "graded", "as", "why"]
        named = [*(each.id for each in old.sessions), session]
        assert [row.split()[:3] for row in rows] == [[id, "1.00", "1.00"] for id in named]
        assert shown.err.count("is graded again as group g-") == 2

        for id in ("g-none", "s-none-0", "../x"):
            with pytest.raises(NotFound):
                await client.regrade(id)
        with pytest.raises(InvalidField) as refused:
            await client.regrade(old.id, {"evaluator": {"kind": "callable", "path": "cli.world:none"}})
        assert refused.value.field == "evaluator.path"
        with pytest.raises(InvalidField) as refused:
            await client.regrade(old.id, {"evaluatr": {}})
        assert refused.value.field == "evaluatr"


async def test_another_tasks_evaluator_and_what_it_could_not_grade(tmp_path: Path, cli: Cli) -> None:
    worse = TASK.replace("cli.world:grade", "cli.test_regrade:fail_on_hi")
    none = write_task(tmp_path, 'instruction = "x"\n', "none.toml")
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", write_task(tmp_path, KEPT), "--url", url, "--json")
        task = write_task(tmp_path, worse, "worse.toml")
        graded = await cli("regrade", ran.document["id"], "--task", task, "--url", url, "--json")
        refused = await cli("regrade", ran.document["id"], "--task", none, "--url", url)
    assert graded.code == 1
    [session] = graded.document["sessions"]
    assert (session["was"]["reward"], session["now"]) == (1.0, None)
    assert session["error"]["code"] == "evaluator_error"
    assert (refused.code, refused.err.splitlines()[0]) == (2, f"error: task: {none} has no [evaluator]")


async def fail_on_hi(outcome: object) -> float:
    raise ValueError("this grader does not like it")
