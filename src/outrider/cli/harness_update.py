"""The work of `outrider harness update`: installs the newest version of a preset's program beside the pinned version,
checks both versions, and prints the differences.

Only this command imports the module, because the module loads the libraries of the service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from outrider.cli.exit_codes import FAILURE, SUCCESS
from outrider.cli.harness_check import VERSION, certificate_of, find_subject
from outrider.cli.tables import table
from outrider.cli.terminal import Terminal
from outrider.harnesses.install import install
from outrider.harnesses.newest import newest_version, pin_file, write_pin
from outrider.harnesses.presets import load_preset
from outrider.lab.certify.judge import Certificate, RowVerdict


class VersionDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between the certificates of the pinned and the newest version."""

    row: str
    fact: str
    pinned: str
    newest: str


class TriedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider harness update --json`.

    ok: the certificate of the newest version holds, or the newest version is already the pinned one.
    written: the command has pinned the newest version in the preset's file.
    of_pinned, of_newest: the certificates of both versions. None if the newest version is already the pinned one.
    """

    harness: str
    pinned: str
    newest: str
    ok: bool
    written: bool = False
    differences: tuple[VersionDifference, ...] = ()
    of_pinned: Certificate | None = None
    of_newest: Certificate | None = None


def update_and_print(
    terminal: Terminal, name: str, *, only_check: bool, runtime: str | None, rows: Sequence[str], seconds: float
) -> int:
    """Check the newest version of a preset's program, and return the exit code. If the version passes, it becomes the
    preset's pinned version. With `only_check`, the pin does not change.

    Raises InvalidField if the preset has no program. Without `only_check`, also raises InvalidField if Outrider does
    not run from a checkout of its source. Raises HarnessUnavailable if the registry does not reply or the program
    cannot be installed.
    """
    preset = load_preset(name, field="preset")
    if not only_check and preset.install is not None:
        pin_file(preset)
    newest = newest_version(preset, terminal.note)
    assert preset.install is not None  # `newest_version` raises an error for a preset without a program
    pinned = preset.install.version
    update = TriedUpdate(harness=name, pinned=pinned, newest=newest, ok=True)
    if newest == pinned:
        terminal.show(update, f"{name} {pinned} is the newest version")
        return SUCCESS
    certificates = []
    for version in (None, newest):
        install(name, terminal.note, version=version)
        terminal.note(f"certifying {name} {version or pinned}")
        subject = find_subject(
            preset=name, command=None, venv=None, task=None, dialect=None, runtime=runtime, version=version
        )
        certificates.append(certificate_of(terminal, subject, names=rows, seconds=seconds))
    before, after = certificates
    written = after.ok and not only_check
    if written:
        write_pin(preset, newest)
    update = msgspec.structs.replace(
        update,
        ok=after.ok,
        written=written,
        differences=tuple(_differences(before, after)),
        of_pinned=before,
        of_newest=after,
    )
    terminal.show(
        update, table(("row", "fact", pinned, newest), [msgspec.structs.astuple(d) for d in update.differences])
    )
    terminal.note(_result(update))
    return SUCCESS if update.ok else FAILURE


def _result(update: TriedUpdate) -> str:
    held = "holds" if update.ok else "does not hold"
    result = f"{update.harness} {update.newest} {held}; {len(update.differences)} differences to {update.pinned}"
    if update.written:
        return f"{result}. The preset pins {update.newest} now: change docs/harnesses/{update.harness}.md as well"
    return result + (f". A task runs it with harness.version = {update.newest!r}" if update.ok else "")


def _differences(before: Certificate, after: Certificate) -> Iterator[VersionDifference]:
    """Yield the differences between two certificates with the same rows. Times, tokens and logs always differ and are
    not compared."""
    for one, other in zip(before.rows, after.rows, strict=True):
        for (fact, pinned), (_, newest) in zip(_facts(one), _facts(other), strict=True):
            if pinned != newest:
                yield VersionDifference(row=one.row, fact=fact, pinned=pinned, newest=newest)


def _facts(row: RowVerdict) -> Iterator[tuple[str, str]]:
    yield "verdict", row.verdict if row.row == VERSION else f"{row.verdict} {row.reason}".strip()
    yield "turns", str(row.turns)
    yield "drift", str(row.drift_tokens)
    yield "streamed", str(row.streamed)
    for fact in ("forks", "branches", "ignored"):
        yield fact, ", ".join(f"{key} {count}" for key, count in sorted(getattr(row, fact).items()))
