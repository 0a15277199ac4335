"""The certification of Gemini CLI, the real program."""

from __future__ import annotations

import pytest

from .certified import ECHOES, IMAGE, SUB_AGENT, assert_one_conversation, certified

pytestmark = pytest.mark.real


async def test_gemini_cli_is_certified() -> None:
    for row in (await certified("gemini-cli", (*ECHOES, IMAGE, SUB_AGENT))).values():
        assert_one_conversation(row, label="generalist")
