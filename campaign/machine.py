"""A machine that joins the service of a campaign: `outrider nodes join` itself, as a program of the nursery."""

from __future__ import annotations

from outrider.cli import main as outrider

LANES = {"init": 3, "run": 16, "eval": 4}
STOP_SECONDS = 1.0
"""What sessions under way have to end after a SIGTERM: some end, and some are run again elsewhere."""


def main(url: str, name: str, processes: str) -> None:
    """Work for the service at that URL until SIGTERM."""
    lanes = [word for lane, size in LANES.items() for word in (f"--{lane}-lane", str(size))]
    options = ["--name", name, "--processes", processes, "--stop-seconds", str(STOP_SECONDS)]
    if code := outrider(["nodes", "join", url, *options, *lanes]):
        raise SystemExit(code)
