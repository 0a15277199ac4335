"""`outrider policy`: shows, pauses, resumes and updates the policy that the engines of a running service serve."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import policy_line, policy_table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.schemas import PolicyStatus


class Mode(StrEnum):
    """How a pause treats generations in flight. `finish` waits for them. `abort` stops them; they continue later."""

    FINISH = "finish"
    ABORT = "abort"


InFlight = Annotated[
    Mode, CliOption("--mode", help="Let generations in flight finish, or cut them off and continue them afterwards.")
]


GoBack = Annotated[
    bool, CliOption("--go-back", help="N may be lower than the policy's version: undo one that was set by mistake.")
]


@command
def show(terminal: Terminal, service: Client) -> None:
    """Show the policy's version, and the version of each engine.

    Example:

        outrider policy show
    """
    _show(terminal, service.policy())


@command
def pause(terminal: Terminal, service: Client, mode: InFlight = Mode.FINISH) -> None:
    """Hold new generations back, and wait until no generation is in flight.

    The clocks of the sessions' time limits stop until the policy is resumed.

    Example:

        outrider policy pause --mode abort
    """
    _show(terminal, service.pause_policy(mode.value))


@command
def resume(
    terminal: Terminal,
    service: Client,
    version: Annotated[
        int | None,
        CliArgument(metavar="[N]", help="Version of the weights that the engines have now; by default the old one."),
    ] = None,
    go_back: GoBack = False,
) -> None:
    """Resume generation.

    If N is given, the command first records the engines' current weights as
    version N of the policy.

    Example:

        outrider policy resume 12
    """
    _show(terminal, service.resume_policy(version, go_back=go_back))


@command
def update(
    terminal: Terminal,
    service: Client,
    version: Annotated[int, CliArgument(metavar="N", help="The new version.")],
    weights: Annotated[
        str | None,
        CliOption(
            metavar="PATH", help="File or folder that every engine loads; by default the weights stay as they are."
        ),
    ] = None,
    mode: InFlight = Mode.FINISH,
    cancel_older_than: Annotated[
        int | None, CliOption(metavar="M", help="Cancel groups whose first session began at a version below this.")
    ] = None,
    go_back: GoBack = False,
) -> None:
    """Set the policy's version, and have the engines load new weights.

    The command pauses generation, has the engines load the weights (if --weights
    is given), sets the version, and resumes generation.

    Example:

        outrider policy update 12 --weights checkpoints/12 --mode abort
    """
    path = None if weights is None else str(Path(weights).absolute()) if Path(weights).exists() else weights
    _show(
        terminal,
        service.update_policy(
            version, mode=mode.value, weights=path, cancel_older_than=cancel_older_than, go_back=go_back
        ),
    )


def _show(terminal: Terminal, policy: PolicyStatus) -> None:
    cancelled = [f"cancelled: {', '.join(policy.cancelled)}"] if policy.cancelled else []
    terminal.show(policy, policy_line(policy), policy_table(policy), *cancelled)
