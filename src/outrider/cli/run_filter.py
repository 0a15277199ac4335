"""The options with which several commands filter sessions. `options.py` adds them to each command that has a parameter
of the type `RunFilter`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from outrider.cli.command_line import CliOption
from outrider.errors import InvalidField

PANEL = "Filter"
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

OPTIONS: Mapping[str, Any] = {
    "state": Annotated[
        list[str] | None,
        CliOption("--state", metavar="STATE", help="Such as running or done. May be repeated: any.", panel=PANEL),
    ],
    "label": Annotated[
        list[str] | None,
        CliOption("--label", metavar="NAME=VALUE", help="A label of the group. May be repeated: all.", panel=PANEL),
    ],
    "of_group": Annotated[
        list[str] | None, CliOption("--group", metavar="GROUP", help="The id of its group.", panel=PANEL)
    ],
    "harness": Annotated[
        str | None,
        CliOption("--harness", metavar="NAME", help="A preset, an agent, command or external.", panel=PANEL),
    ],
    "min_reward": Annotated[
        float | None, CliOption("--min-reward", metavar="NUMBER", help="At least this reward.", panel=PANEL)
    ],
    "max_reward": Annotated[
        float | None, CliOption("--max-reward", metavar="NUMBER", help="At most this reward.", panel=PANEL)
    ],
    "stop_reason": Annotated[
        str | None, CliOption("--stop-reason", metavar="REASON", help="Such as agent_timeout.", panel=PANEL)
    ],
    "error": Annotated[str | None, CliOption("--error", metavar="CODE", help="The code of its error.", panel=PANEL)],
    "since": Annotated[
        str | None,
        CliOption("--since", metavar="TIME", help="Submitted since: 2h, 3d, 2026-11-29T12:00.", panel=PANEL),
    ],
    "until": Annotated[
        str | None, CliOption("--until", metavar="TIME", help="Submitted before this time.", panel=PANEL)
    ],
    "text": Annotated[
        str | None,
        CliOption("--text", metavar="TEXT", help="In its error, end of output or answer.", panel=PANEL),
    ],
}


class RunFilter:
    """A filter of sessions, made from the values of the options in OPTIONS."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.fields: dict[str, Any] = {
            name: given.get(name)
            for name in ("harness", "min_reward", "max_reward", "stop_reason", "error", "text")
            if given.get(name) is not None
        }
        if given.get("state"):
            self.fields["state"] = list(given["state"])
        if given.get("label"):
            self.fields["labels"] = pairs_of(given["label"])
        if given.get("of_group"):
            self.fields["groups"] = list(given["of_group"])
        for name in ("since", "until"):
            if given.get(name) is not None:  # an empty text is refused: without the filter, more sessions would match
                self.fields[name] = time_of(given[name], f"--{name}")

    def __bool__(self) -> bool:
        return bool(self.fields)


def time_of(text: str, option: str, *, now: float | None = None) -> float:
    """Convert the value of an option to seconds since the epoch. Raises InvalidField.

    The value is one of these:

    - an age, such as 2h
    - a date and time in ISO 8601, which is local time unless it names a time zone
    - a number of seconds since the epoch"""
    if age := re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)", text.strip()):
        return (time.time() if now is None else now) - float(age[1]) * UNITS[age[2]]
    if re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        return float(text)
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidField(
            f"{text!r} is no time", field=option, hint="write an age (30min, 2h, 3d) or a time (2026-11-29T12:00)"
        ) from None


def pairs_of(given: Sequence[str] | None) -> dict[str, str]:
    """Parse labels in the form NAME=VALUE. Raises InvalidField for any other form."""
    found = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidField(f"{pair!r} is not NAME=VALUE", field="--label")
        found[name] = value
    return found
