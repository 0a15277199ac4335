"""Tests of whole campaign runs: a sound service passes, and each planted bug is found, with the right kind of harm."""

from __future__ import annotations

import re
import shutil

import pytest
from campaign.__main__ import one_run
from campaign.checks import Finding, Harm
from campaign.faults import Fault, FaultKind
from campaign.fleet import MACHINES, Fleet
from campaign.processes import program_starter
from campaign.run import GROUPS, RunReport

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

SEEDS = (3, 4, 5)
"""Three seeds, because a fault can have no effect in a run, for example if no sessions run when the leases lapse. No
fault misses in all three runs."""
FEW = 16
"""Number of groups in a run with a planted bug."""


def faults(kind: FaultKind, *points: float) -> list[Fault]:
    return [Fault(at, kind, seconds=0.5, share=0.3) for at in points]


KILLED = faults(FaultKind.SERVICE_KILLED, 0.1, 0.3, 0.5)
LAPSED = faults(FaultKind.LEASES_LAPSED, 0.2, 0.4, 0.6)
SILENCE = faults(FaultKind.CONNECTION_SILENT, 0.2)


async def run_of(program: str, seed: int, harmful: list[Fault], fleet: Fleet) -> RunReport:
    async with program_starter() as starter:
        report = await one_run(starter, seed, program=program, groups=FEW, fleet=fleet, faults=harmful)
    print(report)
    if report.folder is not None:
        shutil.rmtree(report.folder)
    return report


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of a run, because a planted bug makes some of them endless."""
    monkeypatch.setattr("campaign.run.STALL_SECONDS", 20.0)
    monkeypatch.setattr("campaign.run.JOIN_SECONDS", 10.0)
    monkeypatch.setattr("campaign.processes.STOP_SECONDS", 5.0)


async def test_a_sound_service_passes() -> None:
    """The faults are drawn from all kinds for SQLite, nodes and machines. The sessions run in the service and on two
    machines that join."""
    async with program_starter() as starter:
        report = await one_run(starter, SEEDS[0], fleet=Fleet(processes=1, machines=MACHINES))
    assert report.findings == []
    assert report.kills >= 3
    assert report.groups == GROUPS
    assert sum(report.endings.values()) == GROUPS * 4


@pytest.mark.parametrize(
    ("program", "harm", "what", "harmful", "fleet"),
    [
        ("ack_before_commit", Harm.LOST, "was accepted, and is not known any more", KILLED, Fleet(processes=1)),
        ("missing_fence", Harm.STALE_WRITE, "a turn of attempt", LAPSED, Fleet(processes=1)),
        ("unshielded_teardown", Harm.LEAKED, "the idle service holds the sandbox", LAPSED, Fleet(processes=1)),
        # These sessions had begun on the machine that fell silent, and the service has not started them elsewhere.
        (
            "kept_attempts",
            Harm.LOST,
            "is not done: .*(initializing|running)",
            SILENCE,
            Fleet(processes=0, machines=(1,)),
        ),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_a_planted_bug_is_caught(program: str, harm: Harm, what: str, harmful: list[Fault], fleet: Fleet) -> None:
    """The test requires a finding that only the bug causes. With the short waits of `impatient`, a busy machine causes
    other findings, too."""
    for seed in SEEDS:
        report = await run_of(f"tests.campaign.{program}", seed, harmful, fleet)
        if any(finding.harm is harm and re.search(what, finding.what) for finding in report.findings):
            return
    raise AssertionError(f"no run had a finding such as {what!r}")


@pytest.mark.usefixtures("impatient")
async def test_a_service_that_does_not_come_back_is_caught() -> None:
    report = await run_of("tests.campaign.no_second_start", SEEDS[0], KILLED, Fleet(processes=1))
    assert Finding(Harm.LOST, "the service is not there again") in report.findings
