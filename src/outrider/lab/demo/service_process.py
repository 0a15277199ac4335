"""Runs a whole service in a separate process, for a trainer that uses the service by its URL.

Invariant: the service's process has ended when the `with` block of `service_process` ends. It also ends when this
process is killed, or when the thread that opened the block ends. The service has its own process group, so that Ctrl-C
in a terminal does not reach it: the trainer ends the service.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.config import PREFIX, Config
from outrider.environment import variables
from outrider.errors import ServiceError

PROGRAM = """
import signal, sys
from outrider.cli import main
from outrider.sandbox.runtimes.guest.isolation import syscalls
syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
sys.exit(main())
"""
READY = "outrider is ready at "
SECONDS_TO_START = 120.0
SECONDS_TO_STOP = 60.0


@contextmanager
def service_process(config: Config, folder: Path) -> Iterator[str]:
    """Run `outrider serve` with these settings, and yield the service's URL. The log is written to `folder`.

    Raises ServiceError, with the end of the log, if the service does not start.
    """
    log = folder / "service.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve"],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(config),
            process_group=0,
        ) as process,
    ):
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Read the URL from the first line of the service's output. The rest of the output is never read, because it is
    only one line, which fits into the pipe's buffer."""
    assert process.stdout is not None
    give_up_at = time.monotonic() + SECONDS_TO_START
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, give_up_at - time.monotonic())):
            line = process.stdout.readline().decode()
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
            if not line:
                break
    raise ServiceError("the service did not start", log_tail=log.read_text(errors="replace")[-2000:])


def _environment(config: Config) -> dict[str, str]:
    """Return this process's environment variables, but with the settings in `config` in place of the process's own
    settings."""
    written = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    settings = {
        f"{PREFIX}{name.upper()}": json.dumps(value) if isinstance(value, dict | list) else str(value)
        for name, value in written.items()
    }
    own = {f"{PREFIX}{name.upper()}" for name in Config.model_fields}
    return {name: value for name, value in variables().items() if name.split("__")[0] not in own} | settings
