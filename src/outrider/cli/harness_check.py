"""What `outrider harness check` does once it is asked: the subject, the rows, and the certificate on the terminal."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from outrider.certify.judge import RowVerdict, holds
from outrider.certify.rows import ROWS, Row
from outrider.certify.run import Certificate, Subject, certify, default_runtime
from outrider.cli.event_loop import run_service
from outrider.cli.tables import number, table, word
from outrider.cli.task_file import load_group
from outrider.cli.terminal import Terminal, printable
from outrider.dialects import dialects
from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses.factory import make_harness
from outrider.harnesses.install import check, installed
from outrider.harnesses.presets import DIALECT, Preset, load_preset
from outrider.spec import HarnessSpec, RuntimeSpec

Watch = Callable[[RowVerdict], None]

VERSION = "version"
"""The row that starts the installed program once; a program of one's own has none."""

_COLUMNS = ("row", "verdict", "turns>", "sampled>", "drift>", "seconds>")

ALSO_CALLED = {"anthropic": "messages", "openai": "chat", "google": "gemini"}
"""What people call a dialect by its maker."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` was asked: exactly one of `name`, `command` and `task`, and no `rows` for all."""

    name: str | None
    command: str | None
    venv: Path | None
    task: Path | None
    dialect: str | None
    runtime: str | None
    rows: tuple[str, ...]
    seconds: float


def certify_and_show(terminal: Terminal, asked: Asked) -> int:
    """Certify and show the certificate; the exit code. Raises what is wrong with what was asked."""
    subject = _subject(asked)
    rows = _rows(asked.rows)
    preset = subject.harness.preset
    first = [_version(preset)] if preset and (VERSION in asked.rows or not asked.rows) else []
    with progress(terminal, len(first) + len(rows)) as watch:
        for verdict in first:
            watch(verdict)
        certificate = _certificate(asked, subject, rows, first, watch)
    if terminal.json:
        terminal.write_json(certificate)
    else:
        show(terminal, certificate)
    return 0 if certificate.ok else 1


def _certificate(
    asked: Asked, subject: Subject, rows: Sequence[Row], first: Sequence[RowVerdict], watch: Watch
) -> Certificate:
    kind = subject.runtime.kind
    made = Certificate(harness=subject.name, dialect=subject.dialect, runtime=kind, ok=True, rows=(), seconds=0.0)
    if rows:
        made = run_service(certify(subject, rows, agent_seconds=asked.seconds, watch=watch))
    judged = (*first, *made.rows)
    return msgspec.structs.replace(made, rows=judged, ok=holds(judged))


@contextmanager
def progress(terminal: Terminal, rows: int) -> Iterator[Watch]:
    """Tells each verdict as it comes; on a terminal also how many are to come, and for how long it has been at it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal, transient=True) as shown:
        bar = shown.add_task("starting a service", total=rows)

        def watch(verdict: RowVerdict) -> None:
            terminal.note(f"{verdict.row}: {verdict.verdict}")
            shown.update(bar, advance=1, description="rows")

        yield watch


def _subject(asked: Asked) -> Subject:
    asked = msgspec.structs.replace(asked, dialect=ALSO_CALLED.get(asked.dialect or "", asked.dialect))
    known = [dialect.name for dialect in dialects()]
    if asked.dialect is not None and asked.dialect not in known:
        raise InvalidField(f"unknown dialect {asked.dialect!r}", field=DIALECT, hint=f"known: {', '.join(known)}")
    given = [one for one in (asked.name, asked.command, asked.task) if one is not None]
    if len(given) != 1:
        raise InvalidField("give a preset, a --command or a --task, and only one of them", field="command")
    if asked.venv is not None and asked.command is None:
        raise InvalidField("is for a --command; a task says it itself", field="venv")
    if asked.task is not None:
        task = load_group(asked.task, n=1, priority=0).task
        kind = asked.runtime or task.runtime.kind
        name, harness, runtime = asked.task.stem, task.harness, task.runtime.model_copy(update={"kind": kind})
    else:
        name, harness = (asked.name, HarnessSpec(preset=asked.name)) if asked.name else _own(asked)
        runtime = RuntimeSpec(kind=asked.runtime or default_runtime())
    if harness.preset is None:
        return Subject(name=name, harness=harness, runtime=runtime, dialect=asked.dialect)
    preset = load_preset(harness.preset, field="preset")
    dialect = _dialect_of(preset, asked.dialect or harness.options.get(DIALECT))
    options = {DIALECT: dialect} if DIALECT in preset.options else {}
    harness = harness.model_copy(update={"options": {**harness.options, **options}})
    make_harness(harness)
    if preset.install is not None and installed(preset.name) is None:
        check(preset.name)  # raises, with what to do
    return Subject(name=name, harness=harness, runtime=runtime, dialect=dialect, hint=preset.certify)


def _own(asked: Asked) -> tuple[str, HarnessSpec]:
    try:
        words = shlex.split(str(asked.command))
    except ValueError as error:
        raise InvalidField(f"cannot be read as a shell would: {error}", field="command") from error
    if not words:
        raise InvalidField("names no program", field="command")
    venv = str(asked.venv.absolute()) if asked.venv else None
    return words[0], HarnessSpec(command=words, venv=venv)


def _dialect_of(preset: Preset, asked: str | None) -> str:
    if asked is not None and asked not in preset.dialects:
        raise InvalidField(
            f"{preset.name} does not speak {asked!r}", field=DIALECT, hint=f"it speaks: {', '.join(preset.dialects)}"
        )
    return asked or preset.dialects[0]


def _rows(names: Sequence[str]) -> list[Row]:
    """The rows of those names, all without any. The version's is none of them."""
    known = [row.name for row in ROWS]
    for name in names:
        if name not in (VERSION, *known):
            raise InvalidField(f"no row {name!r}", field="row", hint=f"known: {VERSION}, {', '.join(known)}")
    return [row for row in ROWS if not names or row.name in names]


def _version(name: str) -> RowVerdict:
    what = "the installed program starts and is of the pinned version"
    if load_preset(name).install is None:
        return RowVerdict(row=VERSION, what=what, verdict="not tried", required=False, reason="it brings no program")
    try:
        return RowVerdict(row=VERSION, what=what, verdict="holds", reason=check(name))
    except HarnessUnavailable as error:
        return RowVerdict(
            row=VERSION, what=what, verdict="does not hold", reason=error.message, log_tail=error.log_tail
        )


def show(terminal: Terminal, certificate: Certificate) -> None:
    """The table, then what there is to say of rows, then the verdict: none wider than the terminal."""
    terminal.out.print(table(_COLUMNS, map(_cells, certificate.rows)))
    reasons = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for row in certificate.rows:
        if row.reason and row.row != VERSION:
            reasons.add_row(row.row, Text(printable(row.reason)))
    if reasons.row_count:
        terminal.out.print("", reasons)
    for row in certificate.rows:
        if row.log_tail:
            terminal.note(f"{row.row}: the end of what the program wrote:\n{row.log_tail.rstrip()}")
    terminal.out.print("", Text(_summary(certificate)), sep="\n")


def _cells(row: RowVerdict) -> tuple[str | Text, ...]:
    numbers = (str(row.turns), str(row.sampled_tokens), str(row.drift_tokens), number(row.seconds, 1))
    return (row.row, word(row.verdict), *(numbers if row.turns else "-" * len(numbers)))


def _summary(certificate: Certificate) -> str:
    counts = Counter(row.verdict for row in certificate.rows)
    rows = f"{counts['holds']} of {len(certificate.rows)} rows hold"
    others = [f", {counts[verdict]} {verdict}" for verdict in ("does not hold", "not tried") if counts[verdict]]
    missed = [row.row for row in certificate.rows if row.required and row.verdict == "not tried"]
    why = f" (what must be tried: {', '.join(missed)})" if missed else ""
    spoken = certificate.dialect or "any dialect"
    return (
        f"{certificate.harness} ({spoken}) in {certificate.runtime} sandboxes: "
        f"{'holds' if certificate.ok else 'does not hold'}. {rows}{''.join(others)}{why}; {certificate.seconds:.0f} s"
    )
