"""The built-in agent's IPython, and the mounts that agents request for their sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.factory import make_harness
from outrider.harnesses.inprocess import InProcessHarness
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import ScriptedModel, calls, context, results, says


@pytest.mark.deep
def test_only_an_agent_with_ipython_shows_it(monkeypatch: pytest.MonkeyPatch, ipython_home: Path) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("OUTRIDER_HOME", str(ipython_home))
    shown = make_harness(HarnessSpec(agent="tools", options={"tools": ["ipython"]})).mounts()
    assert [path.is_relative_to(ipython_home) and (path / "bin/python3").exists() for path in shown] == [True]
    assert make_harness(HarnessSpec(agent="tools")).mounts() == ()


def test_an_agent_may_ask_for_mounts() -> None:
    class Agent:
        def __init__(self, options: dict[str, Any]) -> None: ...
        async def init(self, context: HarnessContext) -> None: ...
        async def run(self, context: HarnessContext) -> HarnessOutcome:
            return HarnessOutcome()

    class Mounting(Agent):
        def mounts(self) -> tuple[Path, ...]:
            return (Path("/opt/tools"),)

    assert InProcessHarness(Agent({})).mounts() == ()
    assert InProcessHarness(Mounting({})).mounts() == (Path("/opt/tools"),)


@pytest.mark.deep
async def test_the_model_calls_ipython(sandbox: Runtime, monkeypatch: pytest.MonkeyPatch, ipython_home: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(ipython_home))
    spec = HarnessSpec(agent="tools", options={"tools": ["ipython"]})
    given = context(sandbox, spec, calls(("ipython", json.dumps({"code": "x = 6\nx * 7"}))), says("42"))
    harness = make_harness(spec)
    assert harness.mounts()
    await harness.install(given)
    await harness.run(given)
    assert isinstance(given.model, ScriptedModel)
    assert results(given.model.asked[1]) == ["42"]
    assert given.model.tools == [["ipython"]] * 2
