"""The faults, the fleet and the groups of a run depend only on its seed. Every run has the most harmful faults."""

from __future__ import annotations

import random

from campaign.faults import (
    ON_MACHINES,
    ON_NODES,
    ON_POSTGRESQL,
    ON_SERVERS,
    ON_SQLITE,
    SILENCES,
    FaultKind,
    draw_faults,
)
from campaign.fleet import MACHINES, Fleet, fleet_of
from campaign.tasks import draw_groups


def test_the_same_seed_breaks_the_same() -> None:
    assert draw_faults(random.Random(7)) == draw_faults(random.Random(7))
    assert draw_faults(random.Random(7)) != draw_faults(random.Random(8))


def test_every_run_kills_the_service_early_and_again() -> None:
    drawn = [draw_faults(random.Random(seed)) for seed in range(100)]
    for faults in drawn:
        assert faults == sorted(faults)
        assert all(0 < fault.at <= 0.95 for fault in faults)
        kills = [fault.at for fault in faults if fault.kind is FaultKind.SERVICE_KILLED]
        assert kills[0] <= 0.2
        assert len(kills) >= 2
        assert {FaultKind.ENGINE_KILLED, FaultKind.LEASES_LAPSED} <= {fault.kind for fault in faults}
    assert {fault.kind for faults in drawn for fault in faults} == set(ON_SQLITE)


def test_in_every_run_two_things_are_silent_for_long() -> None:
    for kinds in (ON_SQLITE, ON_POSTGRESQL):
        drawn = [draw_faults(random.Random(seed), kinds) for seed in range(200)]
        silent = [[fault for fault in faults if fault.kind in SILENCES] for faults in drawn]
        assert {len({fault.kind for fault in faults}) for faults in silent} == {2}
        assert all(9 <= fault.long <= 45 for faults in silent for fault in faults)
        outages = [fault.outage for faults in silent for fault in faults]
        assert all(5 <= seconds <= 30 or seconds == 120 for seconds in outages)
        assert 0.05 < sum(seconds == 120 for seconds in outages) / len(outages) < 0.2


def test_every_run_on_a_server_kills_it() -> None:
    drawn = [draw_faults(random.Random(seed), ON_POSTGRESQL) for seed in range(100)]
    for faults in drawn:
        assert FaultKind.DATABASE_KILLED in {fault.kind for fault in faults}
    assert {fault.kind for faults in drawn for fault in faults} == set(ON_POSTGRESQL) > ON_SERVERS


def test_every_run_with_machines_kills_one_and_cuts_a_connection() -> None:
    kinds = (*ON_SQLITE, *ON_NODES, *ON_MACHINES)
    drawn = [draw_faults(random.Random(seed), kinds) for seed in range(100)]
    for faults in drawn:
        found = [fault.kind for fault in faults]
        assert {FaultKind.MACHINE_KILLED, FaultKind.CONNECTION_CUT} <= set(found)
        assert sum(kind in ON_MACHINES for kind in found) >= 5
    assert {fault.kind for faults in drawn for fault in faults} == set(kinds)
    silent = sum(any(fault.kind is FaultKind.CONNECTION_SILENT for fault in faults) for faults in drawn)
    assert 20 < silent < 80, "it takes half a minute"


def test_a_seed_says_what_runs_its_sessions() -> None:
    fleets = [fleet_of(seed) for seed in range(1, 13)]
    assert fleets[:2] == fleets[3:5] == [Fleet(processes=1), Fleet(processes=2)]
    assert [fleet.several for fleet in fleets[:3]] == [False, True, True]
    joined = fleets[2::3]
    assert {fleet.machines for fleet in joined} == {MACHINES}
    assert {(fleet.processes, fleet.elsewhere) for fleet in joined} == {(0, False), (0, True), (1, False), (1, True)}


def test_the_same_seed_draws_the_same_groups() -> None:
    def groups(seed: int) -> list[dict[str, object]]:
        return draw_groups(random.Random(seed), 10, runtime="namespace", callback="http://127.0.0.1:1/done")

    assert groups(1) == groups(1) != groups(2)
    assert len({str(group["idempotency_key"]) for group in groups(1)}) == 10
    assert sum("callback_url" in group for group in groups(1)) == 5
