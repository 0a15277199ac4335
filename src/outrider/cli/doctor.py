"""`outrider doctor`: prints what works on this machine, with hints for the rest."""

from __future__ import annotations

import typer

from outrider.cli.options import command
from outrider.cli.tables import table, word
from outrider.cli.terminal import Terminal, printable
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
    exit_code = 0 if diagnosis.ok else 1
    if terminal.json:
        terminal.write_json(diagnosis)
        raise typer.Exit(exit_code)
    versions = [f"{name} {found or '-'}" for name, found in diagnosis.versions.items()]
    terminal.out.print(", ".join(versions), soft_wrap=True)
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
        (part if index == 0 else "", found.name, word("yes" if found.ok else "no"), printable(found.detail))
        for part, findings in parts
        for index, found in enumerate(findings)
    ]
    terminal.out.print(table(("", "name", "usable", "detail"), rows))
    for found in (found for _, findings in parts for found in findings if found.hint):
        terminal.out.print(f"{found.name}: {found.hint}", soft_wrap=True)
    raise typer.Exit(exit_code)
