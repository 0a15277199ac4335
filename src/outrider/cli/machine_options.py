"""Options of the commands that run sessions on this machine: `outrider serve` and `outrider nodes join`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LANES = "Lanes"
SANDBOXES = "Sandboxes"

InitLane = Annotated[
    int | None,
    typer.Option(metavar="N", help="Sandboxes prepared at once.", show_default="16", rich_help_panel=LANES),
]
ReadyLane = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Sandboxes being prepared, or prepared and waiting to run.",
        show_default="twice --init-lane",
        rich_help_panel=LANES,
    ),
]
RunLane = Annotated[
    int | None, typer.Option(metavar="N", help="Agents running at once.", show_default="64", rich_help_panel=LANES)
]
EvalLane = Annotated[
    int | None, typer.Option(metavar="N", help="Outcomes graded at once.", show_default="16", rich_help_panel=LANES)
]
SandboxCpus = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Processors that all tasks together may set aside.",
        show_default="the machine's",
        rich_help_panel=SANDBOXES,
    ),
]
SandboxMemory = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        help="Memory that all tasks together may set aside.",
        show_default="the machine's",
        rich_help_panel=SANDBOXES,
    ),
]
SandboxGpu = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A GPU that tasks may set aside. May be repeated.",
        show_default="the machine's",
        rich_help_panel=SANDBOXES,
    ),
]
Warm = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Sandboxes to start ahead, of each kind used lately.",
        show_default="0",
        rich_help_panel=SANDBOXES,
    ),
]
WarmMemory = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        help="Memory that sandboxes started ahead may take.",
        show_default="4096",
        rich_help_panel=SANDBOXES,
    ),
]
Files = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the files that `upload` steps name.", show_default="none")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes that run sessions, for machines with many cores.",
        show_default="one for every four cores",
    ),
]
StopSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="How long sessions under way may go on after a signal to stop.",
        show_default="20",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings as TOML. Flags and OUTRIDER_* variables win over it.")
]
