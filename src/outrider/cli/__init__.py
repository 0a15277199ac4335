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

        if None in (sys.stdin, sys.stdout, sys.stderr):
            _open_closed_streams()
        if (sys.argv[1:] if argv is None else list(argv)) == ["--version"]:
            # `--version` is handled first, because importing click and rich takes longer than printing the version.
            from outrider.environment import installed_version

            try:
                print(f"outrider {installed_version('outrider')}", flush=True)
            except OSError:  # such as a full disk; `run_command` prints this error
                pass
            else:
                return SUCCESS
        if argv is None:
            import gc

            gc.disable()  # imports are faster without garbage collection; CliCommand.invoke turns it on again
        from outrider.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the starting program has closed. Otherwise, the next file
    that this process opens, such as a database, would take the place of the stream, and output would be written to
    it."""
    import os
    import sys

    # In this order, because each call of `open` takes the lowest free descriptor.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  # stays open
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # stays open
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # stays open
