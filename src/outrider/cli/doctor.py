"""`outrider doctor`: prints which features work on this machine, with hints for the others."""

from __future__ import annotations

import msgspec
from click.exceptions import Exit
from rich.text import Text

from outrider.cli.exit_codes import FAILURE, SUCCESS
from outrider.cli.options import command
from outrider.cli.tables import table
from outrider.cli.terminal import Terminal
from outrider.doctor import Finding, diagnose

NAMES = {"gpus": "GPUs"}
"""The report's headings for fields of a `Diagnosis`. Any other field has its own name as its heading."""


@command
def doctor(terminal: Terminal) -> None:
    """Show what works on this machine, and how to get the rest.

    The command checks runtimes, harnesses, engines, file formats, stores, the
    service's port, the limit of open files, and GPUs and networks of sandboxes.

    Exit code 1: no kind of sandbox works here.

    Examples:

        outrider doctor

        outrider doctor --json | jq .runtimes
    """
    diagnosis = diagnose()
    versions = [f"{name} {found or '-'}" for name, found in diagnosis.versions.items()]
    fields = msgspec.structs.asdict(diagnosis)
    parts: dict[str, tuple[Finding, ...]] = {name: fields[name] for name in fields if name not in ("ok", "versions")}
    rows = [
        (NAMES.get(part, part) if index == 0 else "", found.name, found.ok, found.detail)
        for part, findings in parts.items()
        for index, found in enumerate(findings)
    ]
    hinted: dict[str, list[Finding]] = {}
    for found in (found for findings in parts.values() for found in findings if found.hint):
        hinted.setdefault(str(found.hint).replace(f"install {found.name}", "install NAME"), []).append(found)
    hints = [
        f"{', '.join(found.name for found in alike)}: {hint if len(alike) > 1 else alike[0].hint}"
        for hint, alike in hinted.items()
    ]
    terminal.show(diagnosis, Text(", ".join(versions)), table(("", "name", "usable", "detail"), rows), *hints)
    raise Exit(SUCCESS if diagnosis.ok else FAILURE)
