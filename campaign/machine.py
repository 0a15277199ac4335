"""A machine that joins the service of a campaign: `outrider nodes join`, as a program of the starter process."""

from __future__ import annotations

from outrider.cli import main as outrider

LANES = {"init": 3, "run": 16, "eval": 4}
STOP_SECONDS = 1.0
"""Grace period of the sessions under way after a SIGTERM. It is so short that some sessions end, and others run again
on another node."""


def main(url: str, name: str, processes: str) -> None:
    """Run sessions for the service at `url` until SIGTERM."""
    lanes = [word for lane, size in LANES.items() for word in (f"--{lane}-lane", str(size))]
    options = ["--name", name, "--processes", processes, "--stop-seconds", str(STOP_SECONDS)]
    if code := outrider(["nodes", "join", url, *options, *lanes]):
        raise SystemExit(code)
