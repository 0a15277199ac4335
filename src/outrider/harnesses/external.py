"""The harness of an external session, whose agent runs elsewhere.

`sessions/external.py` runs such sessions. A node makes this harness only to grade an external session.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.sandbox.runtimes.base import Availability


class ExternalHarness:
    """A harness that installs nothing and runs nothing."""

    def available(self) -> Availability:
        return Availability(ok=True, detail="")

    def mounts(self) -> tuple[Path, ...]:
        return ()

    async def install(self, context: HarnessContext) -> None:
        raise HarnessError("an external agent has no sandbox: its session was given to a node that runs agents")

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        raise HarnessError("an external agent is not started here: its session was given to a node that runs agents")
