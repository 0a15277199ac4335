"""The OpenHands CLI on its own Python: the certification's rows. It rewrites what it sends back, and never streams."""

from __future__ import annotations

import pytest

from outrider.errors import HarnessUnavailable
from outrider.harnesses.interpreters import find_python
from outrider.harnesses.presets import load_preset

from .certified import assert_passed, certified

pytestmark = pytest.mark.real


def python_is_there() -> bool:
    recipe = load_preset("openhands").install
    assert recipe is not None
    try:
        find_python(recipe.python, uv=None)
    except HarnessUnavailable:
        return False
    return True


@pytest.mark.skipif(not python_is_there(), reason="there is no Python 3.12 on this machine")
async def test_openhands_is_certified() -> None:
    rows = await certified("openhands", without=("tool-error",))
    streaming = rows.pop("streaming")
    assert (streaming.verdict, streaming.reason) == ("not applicable", "it asks for its replies in one piece")
    for name, row in rows.items():
        assert_passed(row)
        assert row.forks == {}, f"{name}: its rewriting is recognised"
        assert row.branches == ({"main": 1, "subagent": 1} if name == "sub-agent" else {"main": 1})
    assert rows["three-turns"].turns == 3
