"""Tenants in the lanes of a real node: how much one tenant holds, and when the next tenant gets a slot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.config import LanesConfig
from outrider.errors import InvalidField
from outrider.lifecycle import SessionState, StopReason
from outrider.service.admission import BOUNDS, validate_group
from outrider.service.principals import Principal

from .conftest import MakeWorld
from .world import group, result_of

LOUD = Principal("loud", "admin", "loud")
"""An admin, so that the task may name the test's plugins. The tested behaviour is the same for every role."""
NEW = Principal("new", "admin", "new")
NARROW = LanesConfig(init=2, ready=2, run=2, eval=2)


async def test_a_tenant_whose_sandboxes_are_prepared_for_ever_does_not_keep_another_out(world: MakeWorld) -> None:
    """The first tenant's sessions hold every slot until their preparation times out. The other tenant then gets a slot,
    whatever the priorities are."""
    hanging: dict[str, Any] = {"init": ["wait forever"], "limits": {"prepare_seconds": 0.5}, "priority": 1000}
    async with world(lanes=NARROW) as w:
        many = [await w.service.submit(group("ask", n=10, **hanging), LOUD) for _ in range(5)]
        await w.state(many[0].sessions[0].id, SessionState.INITIALIZING)
        new = await w.service.submit(group("ask", priority=-1000), NEW)
        [session] = (await w.done(new.id)).sessions
        assert result_of(session).stop_reason is StopReason.COMPLETED
        ended = [one for view in many for one in (await w.service.reader.group(view.id)).sessions if one.result]
        assert len(ended) <= 4 * NARROW.init
        await asyncio.gather(*(w.service.cancel(view.id) for view in many))
        w.assert_quiet()


SEVEN_DAYS = 604_800


@pytest.mark.parametrize(
    ("field", "limits", "seconds"),
    [
        ("task.limits.prepare_seconds", {"prepare_seconds": SEVEN_DAYS, "session_seconds": 86_400}, 60),
        ("task.limits.session_seconds", {"session_seconds": SEVEN_DAYS}, 60),
        ("task.evaluator.seconds", {}, SEVEN_DAYS),
    ],
)
async def test_only_an_admin_may_hold_a_slot_for_long(
    world: MakeWorld, field: str, limits: dict[str, float], seconds: float
) -> None:
    assert field in {bound.field for bound in BOUNDS}
    task = {
        "instruction": "say hello",
        "harness": {"agent": "tools"},
        "runtime": {"kind": "memory"},
        "limits": limits,
        "evaluator": {"kind": "command", "run": "true", "seconds": seconds},
    }
    spec = validate_group({"task": task})
    async with world() as w:
        with pytest.raises(InvalidField, match="seconds are more than") as refused:
            await w.service.submit(spec, Principal("tenant", "submit", "tenant"))
        assert refused.value.field == field
        await w.service.cancel((await w.service.submit(spec)).id)
