"""The command line: `outrider ...`. One module a command or a group of commands; `main` puts them together."""

from __future__ import annotations

from outrider.cli.main import main

__all__ = ["main"]
