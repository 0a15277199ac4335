"""The certification of the OpenHands CLI and SDK, on the Python version that they need. Both rewrite the replies that
they send back, and never stream."""

from __future__ import annotations

import pytest

from outrider.errors import HarnessUnavailable
from outrider.harnesses.interpreters import find_python
from outrider.harnesses.presets import load_preset

from .certified import ECHOES, SUB_AGENT, assert_one_conversation, certified

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def python_is_there() -> bool:
    recipe = load_preset("openhands").install
    assert recipe is not None
    try:
        find_python(recipe.python, uv=None)
    except HarnessUnavailable:
        return False
    return True


@pytest.mark.skipif(not python_is_there(), reason="there is no Python 3.12 on this machine")
@pytest.mark.parametrize("preset", ["openhands", "openhands-sdk"])
async def test_openhands_is_certified(preset: str) -> None:
    """The rewritten replies are recognised as the recorded ones."""
    for row in (await certified(preset, (*ECHOES, SUB_AGENT))).values():
        assert_one_conversation(row)
        assert not row.streamed
