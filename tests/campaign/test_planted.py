"""The tests of the campaign itself: a sound service passes, and each planted bug is caught as the harm that it does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
from campaign.__main__ import one_run
from campaign.checks import Finding, Harm
from campaign.faults import SILENT
from campaign.fleet import MACHINES, Fleet
from campaign.processes import program_starter
from campaign.run import GROUPS, RunReport

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

SEEDS = (3, 4, 5)
"""A fault can miss: sessions may not run when their leases lapse. It does not miss three times."""


LATE_SEEDS = (24, 27, 21)
"""In these, a machine is lost after the service was started for the last time: with it, all would be forgotten."""

ONE = Fleet(processes=1)
JOINED = Fleet(processes=0, machines=MACHINES)


async def reported(program: str, seed: int, fleet: Fleet = ONE, *, silent: int = 0) -> RunReport:
    async with program_starter() as starter:
        report = await one_run(starter, seed, program=program, fleet=fleet, silent=silent)
    print(report)
    if report.folder is not None:
        shutil.rmtree(report.folder)
    return report


async def caught(program: str, fleet: Fleet = ONE, seeds: Sequence[int] = SEEDS) -> set[Harm]:
    """The harms of the first run that has any."""
    for seed in seeds:
        if findings := (await reported(program, seed, fleet)).findings:
            return {finding.harm for finding in findings}
    return set()


@pytest.mark.parametrize("fleet", [Fleet(processes=2), JOINED], ids=str)
async def test_a_sound_service_passes(fleet: Fleet) -> None:
    report = await reported("campaign.service", SEEDS[0], fleet)
    assert report.findings == []
    assert report.kills >= 3
    assert report.groups == GROUPS
    assert sum(report.endings.values()) == GROUPS * 4


async def test_a_sound_service_passes_while_engines_and_stores_are_silent() -> None:
    report = await reported("campaign.service", SEEDS[1], silent=SILENT)
    assert report.findings == []


async def test_an_answer_before_its_commit_is_caught() -> None:
    assert Harm.LOST in await caught("tests.campaign.ack_before_commit")


async def test_a_missing_fence_is_caught() -> None:
    assert Harm.STALE_WRITE in await caught("tests.campaign.missing_fence")


async def test_a_teardown_that_a_cancellation_ends_is_caught() -> None:
    assert Harm.LEAKED in await caught("tests.campaign.unshielded_teardown")


async def test_a_service_that_does_not_come_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the run must not end, as stalled, before the service was killed.
    monkeypatch.setattr("campaign.run.STALL_SECONDS", 30.0)
    monkeypatch.setattr("campaign.run.JOIN_SECONDS", 10.0)
    report = await reported("tests.campaign.no_second_start", SEEDS[0])
    assert Finding(Harm.LOST, "the service is not there again") in report.findings


async def test_waiting_for_a_machine_that_is_gone_is_caught() -> None:
    assert Harm.LOST in await caught("tests.campaign.kept_attempts", JOINED, LATE_SEEDS)
