"""The examples of docs/frozen-models.md work as described, with the page's own settings, agents and task."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.config import Config, FrozenConfig
from outrider.schemas import SessionView
from outrider.spec import EngineSpec
from support.service import running_service, say

from .pages import page

BLOCKS = {block.info: block.text for block in page("docs/frozen-models.md").blocks}
CUSTOMER = [say("My lamp is broken."), say("Do I get my money back?"), say("Thank you. END")]
CLERK = [say("I am sorry."), say("Your refund is on its way.")]
JUDGE = [say("Yes, it is.")]


def frozen() -> tuple[FrozenConfig, ...]:
    """Return the frozen models of the page, on scripted engines."""
    scripts = {"customer": CUSTOMER, "judge": JUDGE}
    made = []
    for model in Config.model_validate(tomllib.loads(BLOCKS["toml settings"])).frozen:
        engine = EngineSpec(kind="scripted", name=model.name, options={"replies": scripts[model.name]})
        made.append(model.model_copy(update={"tokenizer": None, "engines": (engine,)}))
    return tuple(made)


async def run(tmp_path: Path, task: dict[str, Any]) -> tuple[SessionView, list[tuple[str | None, str]]]:
    async with (
        running_service(tmp_path=tmp_path, replies=CLERK, frozen=frozen()) as (_, url),
        AsyncClient(url) as client,
    ):
        [group] = await client.wait([(await client.submit({"task": {**task, "max_attempts": 1}})).id])
        turns = await client.turns(group.sessions[0].id)
        samples = await client.samples(group.sessions[0].id)
        assert [sample.turns for sample in samples] == [
            tuple(n for n, turn in enumerate(t for t in turns if not t.model))
        ]
        return group.sessions[0], [(turn.model, turn.sampled) for turn in turns]


@pytest.mark.deep
async def test_a_simulated_customer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpdesk.py").write_text(BLOCKS["python agent"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "helpdesk", raising=False)
    session, said = await run(tmp_path, {**tomllib.loads(BLOCKS["toml task"]), "runtime": {"kind": "process"}})
    assert session.result is not None
    assert session.result.verdict is not None, session.result.error
    assert session.result.verdict.reward == 1.0
    assert said == [
        ("customer", CUSTOMER[0]),
        (None, CLERK[0]),
        ("customer", CUSTOMER[1]),
        (None, CLERK[1]),
        ("customer", CUSTOMER[2]),
    ]


@pytest.mark.deep
async def test_a_program_with_the_openai_sdk(tmp_path: Path) -> None:
    """A real process with the official client finds both models by the variables that every command gets."""
    task = {
        "instruction": "Say that you are sorry.",
        "harness": {"command": [sys.executable, "-W", "ignore", "both.py"]},
        "runtime": {"kind": "process", "prepare": [{"write": BLOCKS["python openai"], "to": "both.py"}]},
        "evaluator": {"kind": "command", "run": "true"},
    }
    session, said = await run(tmp_path, task)
    assert session.result is not None
    assert session.result.error is None, session.result.error
    assert session.result.stop_reason == "completed", session.result.harness_exit
    assert said == [(None, CLERK[0]), ("judge", JUDGE[0])]
