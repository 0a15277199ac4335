"""The two small agents, mini-swe-agent and Pi: the certification's rows. Neither has sub-agents."""

from __future__ import annotations

import pytest

from .certified import ECHOES, STREAMED, assert_exact, assert_one_conversation, certified

pytestmark = pytest.mark.real


async def test_pi_is_certified() -> None:
    for row in (await certified("pi", (*STREAMED, "unknown-tool", "long-output"))).values():
        assert_one_conversation(row)
        assert row.streamed


async def test_mini_swe_agent_is_certified() -> None:
    """A reply whose call it cannot use is not kept: it asks again, and both of that are rows of their own."""
    for name, row in (await certified("mini-swe-agent", ECHOES)).items():
        assert not row.streamed
        if name == "malformed-call":
            assert_exact(row)
            assert (row.branches, row.forks) == ({"main": 3}, {"sibling": 2})
        else:
            assert_one_conversation(row)
