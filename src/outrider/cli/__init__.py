"""The command line `outrider ...`. The modules of this package define the commands, and `commands.py` combines the
commands into one program."""

from __future__ import annotations

from outrider.cli.exit_codes import INTERRUPTED, SUCCESS

TYPE_CHECKING = False  # importing typing would be slow (see outrider/__init__.py)
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is by default the command line of this process, without the
    program's name."""
    try:
        # The imports are inside the `try`, because they are slow, and Ctrl-C during an import must not print a
        # traceback.
        import sys

        if (sys.argv[1:] if argv is None else list(argv)) == ["--version"]:
            # `--version` is handled first, because importing click and rich takes longer than printing the version.
            from outrider.environment import installed_version

            print(f"outrider {installed_version('outrider')}")
            return SUCCESS
        if argv is None:
            import gc

            gc.disable()  # imports are faster without garbage collection; CliCommand.invoke turns it on again
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
