"""`python -m real.storm_node TALLY ARGUMENTS` runs `outrider serve ARGUMENTS` with the stage (`service.stage`) that
a storm's agents need.

The runtime `real.storm_node:Counted` is the namespace runtime with a count: each started sandbox appends one byte to
the file TALLY. The bytes stay when the process is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli import main
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime, launch
from outrider.sandbox.runtimes.tool_server.launch import RunningServer
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import RuntimeSpec
from service.stage import a_stage

COUNTED = "real.storm_node:Counted"


@asynccontextmanager
async def counted_launch(spec: RuntimeSpec, context: SandboxContext) -> AsyncIterator[RunningServer]:
    async with launch(spec, context) as server:
        tally = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(tally, b".")
        os.close(tally)
        yield server


class Counted(NamespaceRuntime):
    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return ToolServerSandbox(counted_launch, spec, context)


if __name__ == "__main__":
    with a_stage():
        sys.exit(main(["serve", *sys.argv[2:]]))
