"""The command line: `outrider ...`. One module a command or a group of commands; `commands.py` puts them together."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in outrider/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. `argv` lacks the program's name; by default it is the process's own."""
    try:
        # Imported here: to import all commands takes a second, in which Ctrl-C must not end in a traceback.
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
