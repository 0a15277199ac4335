"""The command line: `outrider ...`. One module for each command or group of commands, and `commands.py` for the
whole."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in outrider/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` excludes the program's name; the default is the process's
    own."""
    try:
        # Imported here: the import of all commands takes a second, and Ctrl-C in it must not end in a traceback.
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
