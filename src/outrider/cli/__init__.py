"""The command line: `outrider ...`. Each command, or group of commands, has its own module, and `commands.py` combines
all commands in one program."""

from __future__ import annotations

from outrider.cli.exit_codes import INTERRUPTED

TYPE_CHECKING = False  # see outrider/__init__.py for the reason
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` are the arguments without the program's name, by default those
    of this process."""
    try:
        # The import is here, because it takes a second, and Ctrl-C meanwhile must not end in a traceback.
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:  # Typer does the same for a command that is running
        return INTERRUPTED
