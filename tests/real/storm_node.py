"""`python -m real.storm_node TALLY ARGUMENTS`: `outrider serve ARGUMENTS` on the stage that a storm's agents need.

A session's runtime `real.storm_node:Counted` is the namespace runtime; each sandbox that it starts adds a byte to the
file TALLY, which no kill takes back.
"""

from __future__ import annotations

import os
import sys

from outrider.cli import main
from outrider.runtimes.namespace.runtime import NamespaceRuntime
from service.stage import a_stage

COUNTED = "real.storm_node:Counted"


class Counted(NamespaceRuntime):
    async def start(self) -> None:
        await super().start()
        tally = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(tally, b".")
        os.close(tally)


if __name__ == "__main__":
    with a_stage():
        sys.exit(main(["serve", *sys.argv[2:]]))
