"""The fuzzer as a command, started by `scripts/fuzz_gateway.py`."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from support.fuzz.campaign import SESSION_REQUESTS, Campaign
from support.fuzz.chat import Chat
from support.fuzz.gemini import Gemini
from support.fuzz.messages import Messages
from support.fuzz.player import Tally
from support.fuzz.responses import Responses
from support.fuzz.speaker import Speaker
from support.fuzz.stage import Ground
from support.fuzz.verdict import as_json, as_table

SPEAKERS: dict[str, Callable[[], Speaker]] = {speaker.name: speaker for speaker in (Chat, Responses, Messages, Gemini)}
STUCK_SECONDS = 60
"""A run in which no session ends for this many seconds counts as stuck. The cause is code that blocks the event
loop."""
PROGRESS_SESSIONS = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the run found no violation, otherwise 1. Wrong arguments end the process with 2."""
    asked = _parser().parse_args(arguments)
    first, requests = (0, asked.requests) if asked.session is None else (asked.session, SESSION_REQUESTS)
    with tempfile.TemporaryDirectory(prefix="outrider-fuzz-") as folder:
        begun = time.monotonic()
        watch = _Watch(requests, quiet=asked.json)
        campaign = Campaign(SPEAKERS[asked.dialect](), Ground(Path(folder)), asked.seed, watch.told)
        signal.signal(signal.SIGALRM, watch.stuck)
        tally = asyncio.run(campaign.run(requests, first=first))
        signal.alarm(0)
    seconds = time.monotonic() - begun
    if asked.json:
        print(json.dumps(as_json(asked.dialect, asked.seed, tally, seconds), indent=1))
    else:
        print(as_table(asked.dialect, asked.seed, tally, seconds))
    return 1 if tally.failures else 0


class _Watch:
    """Prints the progress of a run, and ends a stuck run with an alarm signal."""

    def __init__(self, requests: int, *, quiet: bool) -> None:
        self._requests = requests
        self._quiet = quiet
        self._sessions = 0
        signal.alarm(STUCK_SECONDS)

    def told(self, tally: Tally) -> None:
        signal.alarm(STUCK_SECONDS)
        self._sessions = tally.sessions
        if not self._quiet and tally.sessions % PROGRESS_SESSIONS == 0:
            print(f"{tally.requests}/{self._requests} requests, {len(tally.failures)} violations", file=sys.stderr)

    def stuck(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"violation: session {self._sessions} hangs; again with --session {self._sessions}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Throw odd, broken and ordinary requests at the model gateway.")
    parser.add_argument("--dialect", choices=sorted(SPEAKERS), required=True)
    parser.add_argument("--requests", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what the requests are drawn from (default: %(default)s)")
    parser.add_argument("--session", type=int, help="play only this session of the seed again")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON, and no progress")
    return parser
