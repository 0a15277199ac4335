"""The harness of an agent that runs elsewhere.

`sessions/external.py` runs sessions with this harness. A node makes this harness only to grade such a session.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.sandbox.runtimes.base import Availability


class ExternalHarness:
    """A harness with nothing to install and nothing to run."""

    def available(self) -> Availability:
        return Availability(ok=True, detail="")

    def mounts(self) -> tuple[Path, ...]:
        return ()

    async def install(self, context: HarnessContext) -> None:
        raise HarnessError("an external agent has no sandbox: its session was given to a node that runs agents")

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        raise HarnessError("an external agent is not started here: its session was given to a node that runs agents")
