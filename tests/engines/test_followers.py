"""A policy's gate with followers in other processes."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from outrider.engines.pool.policy import PolicyGate
from outrider.engines.pool.sharing import GateReport


async def settles(gate: PolicyGate) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await gate.settled()
    except TimeoutError:
        return False
    return True


def report(gate: PolicyGate, *, behind: int = 0, in_flight: int = 0, whole: int = 0) -> GateReport:
    return GateReport(closings=gate.closings - behind, in_flight=in_flight, whole=whole)


@pytest.mark.parametrize(("mode", "field"), [("finish", "in_flight"), ("abort", "whole")])
async def test_a_gate_has_settled_when_all_followers_have(
    mode: Literal["finish", "abort"], field: Literal["in_flight", "whole"]
) -> None:
    gate = PolicyGate()
    for name in ("a", "b"):
        gate.expect(name)
        gate.report(name, report(gate))
    gate.close(mode)
    assert not await settles(gate)  # neither has heard of it
    gate.report("a", report(gate))
    assert not await settles(gate)
    gate.report("b", report(gate, in_flight=1, whole=field == "whole"))
    assert not await settles(gate)
    gate.report("b", report(gate, in_flight=mode == "abort"))  # what can be cut off need not end
    assert await settles(gate)


async def test_a_stricter_closing_is_waited_for_anew() -> None:
    gate = PolicyGate()
    gate.close("finish")
    gate.expect("a")
    gate.report("a", report(gate))
    assert await settles(gate)
    gate.close("abort")
    assert not await settles(gate)
    gate.report("a", report(gate))
    assert await settles(gate)
    gate.close("finish")  # milder: nothing changes
    assert gate.mode == "abort"
    assert await settles(gate)


async def test_a_follower_that_is_gone_has_nothing_in_flight() -> None:
    gate = PolicyGate()
    gate.close("finish")
    gate.expect("a")
    gate.report("a", report(gate, in_flight=3))
    assert not await settles(gate)
    gate.forget("a")
    assert await settles(gate)
    gate.forget("a")


@pytest.mark.parametrize("answers", [True, False])
async def test_a_follower_that_takes_too_long_is_lost(answers: bool) -> None:
    """One that says nothing of a pause, and one that says for ever that its generations go on."""
    gate, lost = PolicyGate(), list[str]()
    gate.answer_seconds, gate.settle_seconds = (60.0, 0.05) if answers else (0.05, 60.0)
    gate.expect("slow", lost.append)
    gate.expect("other", lost.append)
    gate.close("finish")
    if answers:
        gate.report("slow", report(gate, in_flight=10**9))
    gate.report("other", report(gate))
    async with asyncio.timeout(20):
        await gate.settled()
    assert len(lost) == 1
    assert ("had its generations end" if answers else "answered") in lost[0]
    gate.report("slow", report(gate, in_flight=10**9))  # what is lost does not count
    assert await settles(gate)


async def test_what_cannot_be_of_a_gate_is_refused() -> None:
    gate = PolicyGate()
    gate.report("unknown", report(gate, in_flight=5))
    gate.close("finish")
    assert await settles(gate), "nobody has expected it"
    gate.expect("a")
    for wrong in (report(gate, behind=-1), GateReport(closings=1, in_flight=1, whole=2)):
        with pytest.raises(ValueError, match="a gate that was closed"):
            gate.report("a", wrong)
    gate.report("a", report(gate, in_flight=3))
    with pytest.raises(ValueError, match="behind a closed gate"):
        gate.report("a", report(gate, in_flight=4))
    gate.report("a", report(gate, in_flight=2))


async def test_changes_are_told_and_counted() -> None:
    seen: list[tuple[str | None, int]] = []
    gate = PolicyGate(lambda: seen.append((gate.mode, gate.closings)))
    gate.close("finish")
    gate.close("finish")
    gate.open()
    gate.open()
    assert seen == [("finish", 1), ("finish", 1), (None, 2)]
