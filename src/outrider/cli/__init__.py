"""The command line: `outrider ...`. Each command, or group of commands, has its own module, and `commands.py` combines
all commands in one program."""

from __future__ import annotations

from outrider.cli.exit_codes import INTERRUPTED, SUCCESS

TYPE_CHECKING = False  # see outrider/__init__.py for the reason
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` are the arguments without the program's name, by default those
    of this process."""
    try:
        # The imports are inside the block, because they take long, and Ctrl-C during the imports must not print a
        # traceback.
        import sys

        if (sys.argv[1:] if argv is None else list(argv)) == ["--version"]:
            # The version is printed before click and rich are imported, because the import takes longer than the
            # output.
            from outrider.environment import installed_version

            print(f"outrider {installed_version('outrider')}")
            return SUCCESS
        if argv is None:
            import gc

            gc.disable()  # turned on again by CliCommand.invoke, when the command runs
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
