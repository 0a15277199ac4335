"""`outrider doctor`: prints which features work on this machine, with hints for the others."""

from __future__ import annotations

import typer

from outrider.cli.options import command
from outrider.cli.tables import table
from outrider.cli.terminal import Terminal
from outrider.doctor import Finding, diagnose


@command
def doctor(terminal: Terminal) -> None:
    """Show what works on this machine, and how to get what does not.

    Looks at runtimes, harnesses, engines, file formats, stores, the service's
    port, the limit of open files, and GPUs for sandboxes.

    Exit code 1: no sandbox can be made here.

    Examples:

        outrider doctor

        outrider doctor --json | jq .runtimes
    """
    diagnosis = diagnose()
    versions = [f"{name} {found or '-'}" for name, found in diagnosis.versions.items()]
    parts: tuple[tuple[str, tuple[Finding, ...]], ...] = (
        ("runtimes", diagnosis.runtimes),
        ("harnesses", diagnosis.harnesses),
        ("engines", diagnosis.engines),
        ("formats", diagnosis.formats),
        ("stores", diagnosis.stores),
        ("ports", diagnosis.ports),
        ("limits", diagnosis.limits),
        ("GPUs", diagnosis.gpus),
    )
    rows = [
        (part if index == 0 else "", found.name, found.ok, found.detail)
        for part, findings in parts
        for index, found in enumerate(findings)
    ]
    hints = [f"{found.name}: {found.hint}" for _, findings in parts for found in findings if found.hint]
    terminal.show(diagnosis, ", ".join(versions), table(("", "name", "usable", "detail"), rows), *hints)
    raise typer.Exit(0 if diagnosis.ok else 1)
