"""`python -m campaign [--runs N] [--seed S] [--store sqlite|postgresql] [--json]`: run the fault campaign.

The runs follow one another, with the seeds S, S + 1, and so on. The last line printed is the sum of all runs as JSON.
After a finding, the run's folder, which has the logs of all programs and the database, is not removed. The folder and
the seed are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console

from campaign.checks import Harm
from campaign.faults import Fault
from campaign.fleet import Fleet, fleet_of
from campaign.processes import ProgramStarter, program_starter
from campaign.run import GROUPS, Run, RunReport
from campaign.stores import Cluster, a_cluster

PREFIX = "campaign-"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaign", description="Outrider's fault campaign.")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="how many runs (default: 1)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the seed of the first run (default: 1)")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite", help="the service's store")
    parser.add_argument("--json", action="store_true", help="write the report of each run as a line of JSON, too")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    console = Console(stderr=True)
    # SIGTERM raises KeyboardInterrupt like Ctrl-C, so that the campaign unmounts its disk and kills its programs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with a_cluster() if options.store == "postgresql" else nullcontext() as cluster:
        reports = asyncio.run(_campaign(options.runs, options.seed, cluster, console, json=options.json))
    print(msgspec.json.encode(total(reports)).decode())
    return int(any(report.findings for report in reports))


async def _campaign(runs: int, seed: int, cluster: Cluster | None, console: Console, *, json: bool) -> list[RunReport]:
    reports = []
    async with program_starter() as starter:
        for number in range(seed, seed + runs):
            with console.status(f"run {number - seed + 1} of {runs}, seed {number}"):
                report = await one_run(starter, number, cluster=cluster)
            if json:
                print(msgspec.json.encode(report).decode(), flush=True)
            show(report, console)
            reports.append(report)
    return reports


async def one_run(
    starter: ProgramStarter,
    seed: int,
    *,
    groups: int = GROUPS,
    program: str = "campaign.service",
    fleet: Fleet | None = None,
    faults: Sequence[Fault] | None = None,
    cluster: Cluster | None = None,
) -> RunReport:
    """Run once and return the report. Without a `cluster` the store is SQLite; without a `fleet` or `faults` the seed's
    are used. The folder is removed unless there is a finding or the run itself fails."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    fleet = fleet_of(seed) if fleet is None else fleet
    report = await Run(
        starter,
        seed,
        folder,
        groups=groups,
        program=program,
        fleet=fleet,
        faults=faults,
        cluster=cluster,
    ).run()
    if report.findings:
        return msgspec.structs.replace(report, folder=str(folder))
    await asyncio.to_thread(shutil.rmtree, folder)
    return report


def show(report: RunReport, console: Console) -> None:
    endings = ", ".join(f"{number} {name}" for name, number in sorted(report.endings.items()))
    joined = f"{len(report.fleet.machines)} machines joined, " if report.fleet.machines else ""
    console.print(
        f"seed {report.seed}: {joined}{report.groups} groups, {report.kills} kills, {report.attempts} attempts, "
        f"{report.turns} turns in {report.seconds} s ({endings})",
        style="red" if report.findings else "dim",
    )
    for finding in report.findings[:20]:
        console.print(f"  {finding.harm}: {finding.what}", style="red", markup=False)
    if report.folder:
        console.print(f"  kept in {report.folder}")


def total(reports: Sequence[RunReport]) -> dict[str, int]:
    harms = Counter(finding.harm for report in reports for finding in report.findings)
    return {
        "runs": len(reports),
        "groups": sum(report.groups for report in reports),
        "kills": sum(report.kills for report in reports),
        **{harm.value: harms[harm] for harm in Harm},
        "seed": reports[0].seed,
    }


if __name__ == "__main__":
    sys.exit(main())
