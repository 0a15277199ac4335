"""The certification of the two small agents, mini-swe-agent and Pi, which have no sub-agents."""

from __future__ import annotations

import pytest

from .certified import ECHOES, STREAMED, assert_exact, assert_one_conversation, certified

pytestmark = pytest.mark.real


async def test_pi_is_certified() -> None:
    for row in (await certified("pi", (*STREAMED, "unknown-tool", "long-output"))).values():
        assert_one_conversation(row)
        assert row.streamed


async def test_mini_swe_agent_is_certified() -> None:
    """mini-swe-agent drops a reply with a malformed call, and requests another one. The dropped reply and the repeated
    request become separate training rows."""
    for name, row in (await certified("mini-swe-agent", ECHOES)).items():
        assert not row.streamed
        if name == "malformed-call":
            assert_exact(row)
            assert (row.branches, row.forks) == ({"main": 3}, {"sibling": 2})
        else:
            assert_one_conversation(row)
