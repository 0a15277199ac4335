"""`python -m bench [NAMES...] [--quick] [--json FILE]`: run the benchmarks, one after another, and print them.

A full run of all of them is kept in bench/results; a quick or partial one is only printed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench import (
    dialects,
    floods,
    gateway,
    graders,
    history,
    memory,
    report,
    sampling,
    sandboxes,
    scaling,
    service,
    sessions,
    store,
    tools,
    turns,
)

BENCHES: dict[str, Callable[[bool], Awaitable[dict[str, Any]]]] = {
    "gateway": gateway.run,
    "turns": turns.run,
    "dialects": dialects.run,
    "floods": floods.run,
    "memory": memory.run,
    "sessions": sessions.run,
    "sandboxes": sandboxes.run,
    "tools": tools.run,
    "store": store.run,
    "service": service.run,
    "scaling": scaling.run,
    "history": history.run,
    "graders": graders.run,
    "sampling": sampling.run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Outrider's benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: about a minute for all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(BENCHES)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    names = options.names or list(BENCHES)
    console = Console()
    done = _run(names, quick=options.quick, console=console)
    report.show(done, console)
    if options.json is not None:
        report.write_json(done, options.json)
    if not options.quick and set(names) == set(BENCHES):
        kept = report.keep(done)
        console.print(f"Kept as {kept.parent.name}/{kept.name} and latest.md.")


def _run(names: Sequence[str], *, quick: bool, console: Console) -> report.Report:
    at, load = report.now(), os.getloadavg()[0]
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name in names:
        gc.collect()
        begun = time.perf_counter()
        with console.status(f"measuring {name}"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results[name] = runner.run(_awaited(BENCHES[name](quick)))
        seconds[name] = time.perf_counter() - begun
        console.print(f"[dim]{name}: {seconds[name]:.1f} s")
    return report.Report(
        at=at,
        machine=report.machine(),
        load=(load, os.getloadavg()[0]),
        seconds=seconds,
        quick=quick,
        results=results,
    )


async def _awaited(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await work


if __name__ == "__main__":
    main()
