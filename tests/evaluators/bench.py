"""Grades an agent's last reply with the evaluator of a spec, in real sandboxes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.concurrency.watchdog import Watchdog
from outrider.evaluators.base import Outcome
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec, Resources, RuntimeSpec, TaskSpec
from outrider.trajectory import Verdict
from runtimes.world import World

PIDS = 96
"""Maximum number of processes in a sandbox. It is low, so that a fork bomb stays small."""


class Bench:
    """Grades in `sandbox`. All its sandboxes have the same `fields`. `others` is the number of sandboxes that
    evaluators have started beside `sandbox`."""

    def __init__(self, world: World, sandbox: Runtime, fields: dict[str, Any], watchdog: Watchdog) -> None:
        self._world = world
        self._watchdog = watchdog
        self.sandbox = sandbox
        self.fields = fields
        self.others = 0
        self.log = bytearray()
        """The output of graders."""

    @asynccontextmanager
    async def beside(self, resources: Resources | None = None) -> AsyncIterator[Runtime]:
        self.others += 1
        fields = self.fields if resources is None else self.fields | {"resources": resources.model_dump()}
        other = await self._world.start("namespace", **fields)
        try:
            yield other
        finally:
            await other.stop()

    async def renew(self) -> None:
        """Replace the sandbox by a new one for the next evaluation."""
        await self.sandbox.stop()
        self.sandbox = await self._world.start("namespace", **self.fields)

    async def grade(self, spec: EvaluatorSpec, said: str = "") -> Verdict:
        reply = Message(role=Role.ASSISTANT, content=said)
        outcome = Outcome(
            task=TaskSpec(
                instruction="x",
                harness=HarnessSpec(command=["true"]),
                runtime=RuntimeSpec.model_validate(self.fields),
                evaluator=spec,
            ),
            runtime=self.sandbox,
            stop_reason=StopReason.COMPLETED,
            harness=HarnessOutcome(),
            transcript=(Message(role=Role.USER, content="x"), reply) if said else (),
            turns=1,
            beside=self.beside,
            stalled_seconds=self._watchdog.stalled_seconds,
            log=self.log.extend,
        )
        return await make_evaluator(spec).evaluate(outcome)


@asynccontextmanager
async def a_bench(**fields: Any) -> AsyncIterator[Bench]:
    fields.setdefault("resources", {"pids": PIDS, "memory_mb": 512})
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        async with Host(Path(name)) as host, Watchdog() as watchdog:
            world = World(host)
            try:
                yield Bench(world, await world.start("namespace", **fields), fields, watchdog)
            finally:
                for runtime in world.made:
                    await runtime.stop()
