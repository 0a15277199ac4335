"""`outrider top`: shows what a service does at present. The view is printed once, or drawn again every second.

`frame` draws a `TopView`, and depends on nothing else. A `TopView` combines the service's status, its rates, and a
query for the newest errors. A tenant's token may not read the rates. So for a tenant, the rates are computed from two
readings of the status.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from outrider.cli.command_line import CliOption
from outrider.cli.options import command
from outrider.cli.tables import (
    MAX_ERROR,
    age,
    engine_table,
    failing_table,
    node_table,
    number,
    policy_line,
    table,
)
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.errors import Forbidden, OutriderError
from outrider.schemas import ServiceStatus

REFRESH_SECONDS = 1.0
QUIT = "q"
"""The key that ends the command."""
RATE_SECONDS = 30.0
"""The length of the period over which rates are averaged, in seconds."""
ERRORS_EVERY = 10.0
"""Seconds between two queries for errors. The interval is long, because the service starts a process for each query."""
ERROR_SECONDS = 3600
ERRORS = f"""SELECT code, boundary, count(*) AS times, max(at) AS at, session_id, message
FROM errors WHERE at > unixepoch() - {ERROR_SECONDS} GROUP BY code, boundary ORDER BY at DESC LIMIT 8"""


class ErrorCause(msgspec.Struct, frozen=True, kw_only=True):
    """All errors of the last hour with the same code and boundary.

    times: the number of these errors.
    at, session, message: the time, session and message of the newest one."""

    code: str
    boundary: str
    times: int
    at: float
    session: str
    message: str


class TopRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second, averaged over the last `seconds` seconds: done sessions, failed sessions, stored model calls
    and sampled tokens. With a tenant's token, only the rate of done sessions is known. The other rates are then
    None."""

    seconds: float
    sessions: float
    failed: float | None = None
    calls: float | None = None
    tokens: float | None = None


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider top --once --json`. `rates` is None while there are too few readings for an
    average. `errors` is None if the query for errors failed."""

    at: float
    service: ServiceStatus
    rates: TopRates | None
    errors: tuple[ErrorCause, ...] | None


@command
def top(
    terminal: Terminal,
    service: Client,
    once: Annotated[bool, CliOption("--once", help="Print one frame, and end.")] = False,
) -> None:
    """Show what the service does, live in the terminal.

    The view shows these things, and is drawn again every second:

    - the sessions by state
    - the sessions and tokens per second
    - the lanes, the engines and the policy version
    - the errors of the last hour by cause

    Press q to quit. Without a terminal, the view is printed once.

    Examples:

        outrider top

        outrider top --once --json
    """
    readings = TopReadings(service)
    if once or terminal.json or not terminal.out.is_terminal:
        view = readings.read()
        if view.rates is None:
            time.sleep(REFRESH_SECONDS)
            view = readings.read()
        terminal.show(view, frame(view))
        return
    shown = frame(readings.read())  # an error in the first reading ends the command; later errors are only shown
    with (
        service.impatient() as client,
        _keys() as pressed,
        Live(console=terminal.out, screen=True, auto_refresh=False) as live,
    ):
        readings = TopReadings(client)
        while True:
            live.update(_Cut(shown), refresh=True)
            if QUIT in pressed(REFRESH_SECONDS):
                return
            try:
                shown = frame(readings.read())
            except OutriderError as error:  # the service may just be restarting
                shown = f"{printable(error.message)}\nThe service is asked again each second."


class TopReadings:
    """Reads a `TopView` from a service. Raises the errors of the client's calls."""

    def __init__(self, service: Client) -> None:
        self._service = service
        self._before: tuple[float, int] | None = None
        """An earlier status, for computing rates: its time and number of done sessions. It is replaced after
        RATE_SECONDS. This time and `_errors_at` are of the monotonic clock, because the machine's clock may jump."""
        self._tenant = False
        self._errors: tuple[ErrorCause, ...] | None = None
        self._errors_at = -ERRORS_EVERY

    def read(self) -> TopView:
        at, now = time.time(), time.monotonic()
        status = self._service.status()
        if now - self._errors_at >= ERRORS_EVERY:
            self._errors, self._errors_at = self._read_errors(), now
        return TopView(at=at, service=status, rates=self._rates(now, status), errors=self._errors)

    def _rates(self, now: float, status: ServiceStatus) -> TopRates | None:
        if not self._tenant:
            try:
                listed = self._service.rates()
            except Forbidden:
                self._tenant = True
            else:
                points = [point for point in listed.points if point.at > listed.now - RATE_SECONDS]
                seconds = len(points) * listed.step_seconds
                if not points:
                    return None
                return TopRates(
                    seconds=seconds,
                    sessions=sum(point.sessions_done for point in points) / seconds,
                    failed=sum(point.sessions_failed for point in points) / seconds,
                    calls=sum(point.calls for point in points) / seconds,
                    tokens=sum(point.tokens_sampled for point in points) / seconds,
                )
        done = status.sessions.get("done", 0)
        if self._before is not None and done < self._before[1]:
            self._before = None  # groups were removed, and their sessions count no longer
        before, seconds = self._before, 0.0
        if before is not None:
            seconds = now - before[0]
        if before is None or seconds > RATE_SECONDS:
            self._before = now, done
        return (
            None if before is None or seconds <= 0 else TopRates(seconds=seconds, sessions=(done - before[1]) / seconds)
        )

    def _read_errors(self) -> tuple[ErrorCause, ...] | None:
        try:
            rows = self._service.query(ERRORS).rows
        except OutriderError:  # the service may be busy with other queries; the next reading will try again
            return None
        names = ("code", "boundary", "times", "at", "session", "message")
        return tuple(ErrorCause(**dict(zip(names, row, strict=True))) for row in rows)


def frame(view: TopView) -> RenderableType:
    """Draw a view. In 80 columns or more, no line is cut."""
    status, rates = view.service, view.rates
    states = " · ".join(f"{count} {state}" for state, count in status.sessions.items() if count)
    parts: list[Any] = [
        f"outrider {status.version} · model {printable(status.model)} · {policy_line(status.policy)}",
        f"sessions: {states or 'none'}",
        _rate_line(rates),
    ]
    if status.failing:
        parts += ["", failing_table(status.failing)]
    for node in status.nodes:
        parts += ["", node_table(node)]
    parts += ["", engine_table(status.engines), ""]
    if view.errors is None:
        parts.append("errors: the query failed; see outrider query")
    elif not view.errors:
        parts.append("no errors in the last hour")
    else:
        rows = [
            (f"{each.boundary}: {each.code}", each.times, age(each.at), each.session, _line(each.message))
            for each in view.errors
        ]
        columns = ("errors of the last hour", "times>", "newest>", "session", "message")
        parts.append(table(columns, rows))
    return Group(*parts)


def _rate_line(rates: TopRates | None) -> str:
    if rates is None:
        return "rates: not known yet"
    others = {"failed": rates.failed, "calls": rates.calls, "tokens": rates.tokens}
    shown = "".join(f" · {number(value, 1)} {name}/s" for name, value in others.items() if value is not None)
    return f"{number(rates.sessions)} sessions/s{shown} (mean of {rates.seconds:.0f} s)"


def _line(message: str) -> str:
    text = message.replace("\n", " ")
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 3]}..."


class _Cut:
    """Draws `inner`, cut to the height of the terminal, because the screen cannot be scrolled. The last line gives the
    number of hidden lines."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        room = max(1, console.height - 1)
        yield SegmentLines(lines[:room], new_lines=True)
        rest = len(lines) - room
        yield Text(f"q quits · {rest} more lines: outrider top --once" if rest > 0 else "q quits", end="")


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for pressed keys, and returns them. Its argument is the maximum wait in seconds.
    While the block runs, the terminal passes each key on at once, and does not show it. Ctrl-C still interrupts the
    program."""
    import termios  # imported here, because only a terminal needs these modules
    import tty

    if not sys.stdin.isatty():
        yield _no_keys
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(file, 100).decode(errors="replace") or QUIT  # the input has ended
        except OSError:  # the terminal is gone
            return QUIT

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""
