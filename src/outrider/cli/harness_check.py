"""The work of `outrider harness check`: lets a harness do small tasks with a scripted model, and prints a certificate
with one row per task.

Commands import this module only when they run, because this module loads the libraries of the service.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Column, Table
from rich.text import Text

from outrider.cli.event_loop import run_service
from outrider.cli.exit_codes import FAILURE, SUCCESS
from outrider.cli.progress import row_progress
from outrider.cli.tables import number, table, word
from outrider.cli.task_sources import load_group
from outrider.cli.terminal import Terminal, printable
from outrider.dialects import DIALECTS
from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses.factory import make_harness
from outrider.harnesses.install import check, installed
from outrider.harnesses.presets import DIALECT, load_preset
from outrider.lab.certify.judge import Certificate, RowVerdict, Subject, holds
from outrider.lab.certify.rows import ROWS
from outrider.sandbox.runtimes.default_runtime import default_runtime
from outrider.spec import HarnessSpec, RuntimeSpec

VERSION = "version"
"""Name of the row that runs a preset's installed program once, to read its version. A harness without a preset does not
have this row."""

VENDORS = {"anthropic": "messages", "openai": "chat", "google": "gemini"}
"""API dialects by vendor. Instead of a dialect, users may name its vendor."""


def find_subject(
    *,
    preset: str | None,
    command: str | None,
    venv: Path | None,
    task: Path | None,
    dialect: str | None,
    runtime: str | None,
    version: str | None = None,
) -> Subject:
    """Return the harness to check. Exactly one of `preset`, `command` and `task` must be given.

    Raises InvalidField for an unknown name or contradictory options. Raises HarnessUnavailable if the preset's program
    is not installed.
    """
    dialect = VENDORS.get(dialect or "", dialect)
    known = [each.name for each in DIALECTS]
    if dialect is not None and dialect not in known:
        raise InvalidField(f"unknown dialect {dialect!r}", field=DIALECT, hint=f"known: {', '.join(known)}")
    if sum(each is not None for each in (preset, command, task)) != 1:
        raise InvalidField("give a preset, a --command or a --task, and only one of them", field="command")
    if version is not None and preset is None:
        raise InvalidField("is for a preset; a task names its version itself", field="version")
    if venv is not None and command is None:
        raise InvalidField("is for a --command; a task names its environment itself", field="venv")
    sandbox: RuntimeSpec | None = None
    if task is not None:
        spec = load_group(task, n=1, priority=0).task
        name, harness = task.stem, spec.harness
        sandbox = spec.runtime.model_copy(update={"kind": runtime or spec.runtime.sandbox_kind})
    elif command is not None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise InvalidField(f"cannot be read as a shell would: {error}", field="command") from error
        if not words:
            raise InvalidField("names no program", field="command")
        name, harness = words[0], HarnessSpec(command=words, venv=str(venv.absolute()) if venv else None)
    else:
        name, harness = str(preset), HarnessSpec(preset=load_preset(str(preset), field="preset").name)
        load_preset(name).at_version(version)  # raises an error if `version` is malformed
        harness = harness.model_copy(update={"version": version})
    if sandbox is None:
        sandbox = RuntimeSpec(kind=runtime or default_runtime()[0])
    if harness.preset is None:
        return Subject(name=name, harness=harness, runtime=sandbox, dialect=dialect)
    loaded = load_preset(harness.preset, field="preset")
    dialect = dialect or harness.options.get(DIALECT)
    if dialect is not None and dialect not in loaded.dialects:
        speaks = ", ".join(loaded.dialects)
        raise InvalidField(f"{loaded.name} does not speak {dialect!r}", field=DIALECT, hint=f"it speaks: {speaks}")
    dialect = dialect or loaded.dialects[0]
    options = {DIALECT: dialect} if DIALECT in loaded.options else {}
    harness = harness.model_copy(update={"options": {**harness.options, **options}})
    make_harness(harness)  # raises an error for invalid options
    if loaded.install is not None and installed(loaded.name, harness.version) is None:
        check(loaded.name, harness.version)  # raises an error whose hint says how to install the program
    return Subject(name=name, harness=harness, runtime=sandbox, dialect=dialect, hint=loaded.certify)


def check_and_print(terminal: Terminal, subject: Subject, *, names: Sequence[str], seconds: float) -> int:
    """Check the harness `subject`, print its certificate, and return the exit code. `certificate_of` describes `names`
    and `seconds`."""
    certificate = certificate_of(terminal, subject, names=names, seconds=seconds)
    if terminal.json:
        terminal.write_json(certificate)
    else:
        print_certificate(terminal, certificate)
    return SUCCESS if certificate.ok else FAILURE


def certificate_of(terminal: Terminal, subject: Subject, *, names: Sequence[str], seconds: float) -> Certificate:
    """Check the harness `subject` and return its certificate. Raises InvalidField for an unknown row.

    names: the rows to try. All rows if empty.
    seconds: the time limit of each row."""
    # Imported here, so that the command refuses a wrong harness before it loads the libraries of the service.
    from outrider.lab.certify.run import certify

    known = [VERSION, *(row.name for row in ROWS)]
    for name in names:
        if name not in known:
            raise InvalidField(f"no row {name!r}", field="row", hint=f"known: {', '.join(known)}")
    rows = [row for row in ROWS if not names or row.name in names]
    certificate = Certificate(
        harness=subject.name,
        dialect=subject.dialect,
        runtime=subject.runtime.sandbox_kind,
        ok=True,
        rows=(),
        seconds=0.0,
    )
    first: tuple[RowVerdict, ...] = ()
    if subject.harness.preset and (VERSION in names or not names):
        first = (_version_row(subject.harness),)
    with row_progress(terminal, len(first) + len(rows)) as watch:
        for verdict in first:
            watch(verdict)
        if rows:
            certificate = run_service(certify(subject, rows, agent_seconds=seconds, watch=watch))
    verdicts = (*first, *certificate.rows)
    return msgspec.structs.replace(certificate, rows=verdicts, ok=holds(verdicts))


def _version_row(harness: HarnessSpec) -> RowVerdict:
    what = "the installed program starts and is of the pinned version, or of the version that the task names"
    name = str(harness.preset)
    if load_preset(name).install is None:
        return RowVerdict(row=VERSION, what=what, verdict="not tried", required=False, reason="it brings no program")
    try:
        return RowVerdict(row=VERSION, what=what, verdict="holds", reason=check(name, harness.version))
    except HarnessUnavailable as error:
        return RowVerdict(
            row=VERSION, what=what, verdict="does not hold", reason=error.message, log_tail=error.log_tail
        )


def print_certificate(terminal: Terminal, certificate: Certificate) -> None:
    """Print the certificate: the table of rows, the reasons for the rows' verdicts, the ends of logs, and the result.
    No line is wider than the terminal."""
    cells = []
    for row in certificate.rows:
        numbers = (row.turns, row.sampled_tokens, row.drift_tokens, number(row.seconds, 1))
        cells.append((row.row, word(row.verdict), *(numbers if row.turns else "-" * len(numbers))))
    terminal.out.print(table(("row", "verdict", "turns>", "sampled>", "drift>", "seconds>"), cells))
    reasons = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for row in certificate.rows:
        if row.reason and row.row != VERSION:
            reasons.add_row(row.row, Text(printable(row.reason)))
    if reasons.row_count:
        terminal.out.print("", reasons)
    for row in certificate.rows:
        if row.log_tail:
            terminal.note(f"{row.row}: the end of what the program wrote:\n{row.log_tail.rstrip()}")
    counts = Counter(row.verdict for row in certificate.rows)
    rows = f"{counts['holds']} of {len(certificate.rows)} rows hold"
    others = [f", {counts[verdict]} {verdict}" for verdict in ("does not hold", "not tried") if counts[verdict]]
    missed = [row.row for row in certificate.rows if row.required and row.verdict == "not tried"]
    why = f" (what must be tried: {', '.join(missed)})" if missed else ""
    result = (
        f"{certificate.harness} ({certificate.dialect or 'any dialect'}) in {certificate.runtime} sandboxes: "
        f"{'holds' if certificate.ok else 'does not hold'}. {rows}{''.join(others)}{why}; {certificate.seconds:.0f} s"
    )
    terminal.out.print("", Text(result), sep="\n")
