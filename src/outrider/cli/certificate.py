"""What `outrider harness check` does once it is asked: the subject, the rows, and the certificate on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from outrider.certify.judge import RowVerdict
from outrider.certify.rows import ROWS, Row
from outrider.certify.run import Certificate, Subject, certify, default_runtime
from outrider.cli.loop import run_service
from outrider.cli.tables import number, table, word
from outrider.cli.terminal import Terminal
from outrider.dialects import dialects
from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses.factory import make_harness
from outrider.harnesses.install import check, installed
from outrider.harnesses.presets import DIALECT, Preset, load_preset
from outrider.spec import HarnessSpec

VERSION = "version"
"""The row that starts the installed program once; a program of one's own has none."""

_COLUMNS = ("row", "verdict", "turns>", "sampled>", "drift>", "seconds>", "what it is, or why")

ALSO_CALLED = {"anthropic": "messages", "openai": "chat", "google": "gemini"}
"""What people call a dialect by its maker."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` was asked: exactly one of `name` and `command`, and no `rows` for all."""

    name: str | None
    command: str | None
    dialect: str | None
    runtime: str | None
    rows: tuple[str, ...]
    seconds: float


def certify_and_show(terminal: Terminal, asked: Asked) -> int:
    """Certify and show the certificate; the exit code. Raises what is wrong with what was asked."""
    subject = _subject(asked)
    rows = _rows(asked.rows)
    first = [_version(asked.name)] if asked.name and (VERSION in asked.rows or not asked.rows) else []
    for verdict in first:
        _tell(terminal, verdict)
    certificate = _certificate(terminal, asked, subject, rows, first)
    if terminal.json:
        terminal.document(certificate)
    else:
        _show(terminal, certificate)
    return 0 if certificate.ok else 1


def _certificate(
    terminal: Terminal, asked: Asked, subject: Subject, rows: Sequence[Row], first: Sequence[RowVerdict]
) -> Certificate:
    runtime = asked.runtime or default_runtime()
    made = Certificate(harness=subject.name, dialect=subject.dialect, runtime=runtime, ok=True, rows=(), seconds=0.0)
    if rows:
        work = certify(
            subject,
            rows,
            runtime=runtime,
            agent_seconds=asked.seconds,
            watch=lambda verdict: _tell(terminal, verdict),
        )
        made = run_service(work)
    failed = any(verdict.verdict == "failed" for verdict in first)
    return msgspec.structs.replace(made, rows=(*first, *made.rows), ok=made.ok and not failed)


def _subject(asked: Asked) -> Subject:
    asked = msgspec.structs.replace(asked, dialect=ALSO_CALLED.get(asked.dialect or "", asked.dialect))
    known = [dialect.name for dialect in dialects()]
    if asked.dialect is not None and asked.dialect not in known:
        raise InvalidField(f"unknown dialect {asked.dialect!r}", field=DIALECT, hint=f"known: {', '.join(known)}")
    if (asked.name is None) == (asked.command is None):
        raise InvalidField("give a preset or a --command, and not both", field="command")
    if asked.command is not None:
        return _own(asked.command, asked.dialect)
    preset = load_preset(str(asked.name), field="preset")
    dialect = _dialect_of(preset, asked.dialect)
    options = {DIALECT: dialect} if DIALECT in preset.options else {}
    harness = HarnessSpec(preset=preset.name, options=options)
    make_harness(harness)
    if preset.install is not None and installed(preset.name) is None:
        check(preset.name)  # raises, with what to do
    return Subject(name=preset.name, harness=harness, dialect=dialect, hint=preset.certify)


def _own(command: str, dialect: str | None) -> Subject:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidField(f"cannot be read as a shell would: {error}", field="command") from error
    if not words:
        raise InvalidField("names no program", field="command")
    return Subject(name=words[0], harness=HarnessSpec(command=words), dialect=dialect)


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
        return RowVerdict(row=VERSION, what=what, verdict="not applicable", reason="it brings no program")
    try:
        return RowVerdict(row=VERSION, what=what, verdict="ok", reason=check(name))
    except HarnessUnavailable as error:
        return RowVerdict(row=VERSION, what=what, verdict="failed", reason=error.message, log_tail=error.log_tail)


def _tell(terminal: Terminal, verdict: RowVerdict) -> None:
    terminal.note(f"{verdict.row}: {verdict.verdict}")


def _show(terminal: Terminal, certificate: Certificate) -> None:
    cells = [
        (
            row.row,
            word(row.verdict),
            str(row.turns) if row.turns else "-",
            str(row.sampled_tokens) if row.turns else "-",
            str(row.drift_tokens) if row.turns else "-",
            number(row.seconds, 1) if row.turns else "-",
            row.reason or row.what,
        )
        for row in certificate.rows
    ]
    terminal.out.print(table(_COLUMNS, cells))
    for row in certificate.rows:
        if row.log_tail:
            terminal.note(f"{row.row}: the end of what the program wrote:\n{row.log_tail.rstrip()}")
    verdict = "holds" if certificate.ok else "does not hold"
    spoken = certificate.dialect or "any dialect"
    terminal.out.print(
        f"{certificate.harness} ({spoken}) in {certificate.runtime} sandboxes: {verdict}, {certificate.seconds:.0f} s",
        soft_wrap=True,
    )
