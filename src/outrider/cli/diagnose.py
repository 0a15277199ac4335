"""`outrider diagnose`: looks for known faults in the results of a run, and prints each fault with its evidence and the
next step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

from click.exceptions import Exit
from rich.text import Text

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.tables import counted
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import RunDiagnosis, RunFinding, RunSeconds

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
FAIL_ON = {"error": {"error"}, "warning": {"error", "warning"}}
"""For each value of --fail-on, the severities of a fault that make the command exit with an error code."""


@command
def diagnose(
    terminal: Terminal,
    service: Client,
    which: Annotated[
        list[str] | None,
        CliArgument(metavar="[NAME=VALUE|GROUP]...", help="Labels, which must all be equal, or ids of groups (g-…)."),
    ] = None,
    since: Annotated[
        str | None,
        CliOption("--since", metavar="TIME", help="Groups created since, such as 2h, 3d or 2026-11-29T08:00."),
    ] = None,
    fail_on: Annotated[
        str | None,
        CliOption(
            "--fail-on", metavar="SEVERITY", help="Exit with 1 for a finding: warning or error.", show_default="never"
        ),
    ] = None,
) -> None:
    """List the faults of a run, with evidence and the next step.

    The command reads the results of all sessions, and the turns of only a sample
    of them. Without a label or a group, it reads all groups of the service. Of a
    run with more than 200,000 sessions, it reads only the newest groups.

    Examples:

        outrider diagnose run=tuesday

        outrider diagnose g-0019a4e2b6c1f3d2

        outrider diagnose --since 2h --fail-on error --json
    """
    if fail_on is not None and fail_on not in FAIL_ON:
        raise InvalidField(f"{fail_on!r} is not a severity to fail on", field="--fail-on", hint="warning or error")
    labels = dict(_label(each) for each in which or () if "=" in each)
    groups = [each for each in which or () if "=" not in each]
    for each in groups:
        if each.startswith("s-"):
            raise InvalidField(
                f"{each!r} is a session", field="GROUP", hint=f"name its group, or see: outrider show {each}"
            )
    found = service.diagnosis(labels=labels, groups=groups, since=0.0 if since is None else _time(since, time.time()))
    terminal.show(found, *_lines(found))
    if fail_on is not None and any(finding.severity in FAIL_ON[fail_on] for finding in found.findings):
        raise Exit(FAILURE)


def _lines(found: RunDiagnosis) -> Iterator[Text]:
    """Yield the lines to print: what the command read, where the sessions spent their time, and the faults."""
    read = [
        f"{counted(found.sessions, 'session')} in {counted(found.groups, 'group')} read",
        f"with all turns of {found.read_sessions:,}",
    ]
    if found.not_done:
        read.append(f"{found.not_done:,} not done")
    if found.truncated:
        read.append("older groups were not read")
    yield Text(" · ".join(read), style="bold")
    if time_line := _time_line(found.seconds):
        yield Text(time_line, style="dim")
    if not found.findings:
        yield Text("no fault was found", style="green")
    for finding in found.findings:
        yield Text()
        yield from _finding(finding)


def _finding(finding: RunFinding) -> Iterator[Text]:
    line = Text(f"{finding.severity}: ", style=STYLES[finding.severity])
    yield line + Text(printable(finding.text).replace("\n", " "), style="default")
    if finding.sessions:
        yield Text(printable(f"  see: outrider show {finding.sessions[0]}"), style="default")
        if others := finding.sessions[1:]:
            yield Text(printable(f"  also: {' '.join(others)}"), style="dim")
    yield Text(f"  next: {finding.next}", style="cyan")


def _time_line(seconds: RunSeconds) -> str:
    """Return how the sessions spent their time, the largest share first: `time: model 62%, tools 30%`. Shares below
    0.5 % are left out. Returns "" if the sessions spent no time."""
    used = {name: getattr(seconds, name) for name in RunSeconds.__struct_fields__}
    total = sum(used.values())
    if not total:
        return ""
    shares = sorted(used.items(), key=lambda item: -item[1])
    return "time: " + ", ".join(f"{name} {part / total:.0%}" for name, part in shares if part / total >= 0.005)


def _label(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name:
        raise InvalidField(f"{text!r} is not NAME=VALUE", field="NAME=VALUE")
    return name, value


def _time(text: str, now: float) -> float:
    """Parse a time into seconds since the epoch. `text` is an age such as 2h, or a date with or without a time of day.
    A time without a time zone is local time."""
    if age := re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d)", text):
        return max(0.0, now - float(age[1]) * UNITS[age[2]])
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidField(
            f"{text!r} is no time", field="--since", hint="an age such as 30min, 2h or 3d, or a date: 2026-11-29T08:00"
        ) from error
