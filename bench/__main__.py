"""`python -m bench [NAMES...] [--rounds N] [--quick] [--json FILE]`: run benchmarks one after another, and print
them.

A full run of all of them is stored in bench/results; a quick or partial run is only printed. With `--rounds N` every
benchmark runs N times, and each figure is the median of its rounds, with their range. With `--against CHECKOUT` the
benchmarks of another checkout run in the same rounds, with its own `.venv` (`make venv` in it first). The two checkouts
take turns at running first, so that other work of the machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console

from bench import (
    dialects,
    floods,
    gateway,
    graders,
    history,
    memory,
    pages,
    rate,
    report,
    routing,
    samples,
    sampling,
    sandboxes,
    scaling,
    service,
    sessions,
    staleness,
    starts,
    store,
    tools,
    turns,
)
from bench.processes import ROOT
from bench.rounds import combined, compared, medians, one_round
from bench.tables import Results

BENCHES: dict[str, Callable[[bool], Awaitable[dict[str, Any]]]] = {
    "gateway": gateway.run,
    "rate": rate.run,
    "turns": turns.run,
    "dialects": dialects.run,
    "floods": floods.run,
    "memory": memory.run,
    "sessions": sessions.run,
    "sandboxes": sandboxes.run,
    "tools": tools.run,
    "store": store.run,
    "service": service.run,
    "pages": pages.run,
    "scaling": scaling.run,
    "history": history.run,
    "graders": graders.run,
    "sampling": sampling.run,
    "staleness": staleness.run,
    "samples": samples.run,
    "routing": routing.run,
    "starts": starts.run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Outrider's benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: about a minute for all")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="run all so often: medians with their range")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with those of another checkout")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare only figures whose name holds this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(BENCHES)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.against is not None and not _python_of(options.against).exists():
        parser.error(f"{options.against} has no environment: run `make venv` there, then this command again")
    names = options.names or list(BENCHES)
    console = Console()
    at, load = report.now(), os.getloadavg()[0]
    apart = options.rounds > 1 or options.against is not None
    rounds = _rounds(names, options, console) if apart else _one_round(names, options, console)
    done = report.Report(
        at=at,
        machine=report.machine(),
        load=(load, os.getloadavg()[0]),
        seconds=rounds.seconds,
        quick=options.quick,
        results=medians(combined(rounds.own)),
        rounds=tuple(rounds.own) if len(rounds.own) > 1 else (),
        against=tuple(rounds.others),
    )
    report.show(done, console)
    if rounds.others:
        console.print(compared(combined(rounds.others), combined(rounds.own), options.only))
    if options.json is not None:
        report.write_json(done, options.json)
    if not options.quick and set(names) == set(BENCHES):
        kept = report.keep(done)
        console.print(f"Kept as {kept.parent.name}/{kept.name} and latest.md; the table in README.md is written anew.")


class Rounds(NamedTuple):
    """The results of each round, the results of the other checkout, and the duration of each benchmark of this
    checkout, in seconds."""

    own: list[Results]
    others: list[Results]
    seconds: dict[str, float]


def _one_round(names: Sequence[str], options: argparse.Namespace, console: Console) -> Rounds:
    """Run all benchmarks in this process."""
    results: Results = {}
    seconds: dict[str, float] = {}
    for name in names:
        gc.collect()
        begun = time.perf_counter()
        with console.status(f"measuring {name}"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results[name] = runner.run(_awaited(BENCHES[name](options.quick)))
        seconds[name] = time.perf_counter() - begun
        console.print(f"[dim]{name}: {seconds[name]:.1f} s")
    return Rounds([results], [], seconds)


def _rounds(names: Sequence[str], options: argparse.Namespace, console: Console) -> Rounds:
    """Run each benchmark of each round in its own process. A benchmark of the other checkout runs just before or after
    the same benchmark of this one."""
    own: list[Results] = [{} for _ in range(options.rounds)]
    others: list[Results] = [] if options.against is None else [{} for _ in range(options.rounds)]
    seconds = dict.fromkeys(names, 0.0)
    sides = [(sys.executable, ROOT, own)]
    if options.against is not None:
        sides.append((str(_python_of(options.against)), options.against, others))
    for number in range(options.rounds):
        for name in names:
            for python, tree, found in sides[:: 1 if number % 2 else -1]:
                begun = time.perf_counter()
                with console.status(f"round {number + 1} of {options.rounds}: {name} in {tree}"):
                    found[number][name] = one_round(python, tree, name, quick=options.quick)
                if found is own:
                    seconds[name] += time.perf_counter() - begun
        console.print(f"[dim]round {number + 1} of {options.rounds}: {sum(seconds.values()):.1f} s so far")
    return Rounds(own, others, seconds)


def _python_of(checkout: Path) -> Path:
    return checkout.resolve() / ".venv/bin/python"


async def _awaited(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await work


if __name__ == "__main__":
    main()
