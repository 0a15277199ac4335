"""The in-process harness: runs an agent that is a Python class. The agent's tools run in the sandbox.

Invariant: any exception of an agent except an OutriderError becomes a HarnessError with the end of its traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from outrider.errors import LOG_TAIL, HarnessError, OutriderError
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.plugins import plugin_code
from outrider.sandbox.runtimes.base import Availability


class Agent(Protocol):
    """An agent in Python. It is constructed with the task's harness options: once when the task is submitted, and once
    for each session. If the constructor raises an exception, the task is invalid. The error names the option if the
    exception is a pydantic ValidationError.

    An agent that supports the task's fields `mcp_servers` or `skills` has an attribute `takes`, a set of these names.
    For other agents, a task with these fields is invalid.

    `init` prepares the started sandbox while the session is initializing. `run` calls the model (`context.model`) and
    uses the sandbox (`context.runtime`) until the agent is done. Both methods are called for each step of a task, and
    may be cancelled at any await.
    """

    def __init__(self, options: Mapping[str, Any]) -> None: ...
    async def init(self, context: HarnessContext) -> None: ...
    async def run(self, context: HarnessContext) -> HarnessOutcome: ...


@runtime_checkable
class MountingAgent(Protocol):
    """An agent whose tools need host folders in the sandbox. `mounts` returns these folders, which are mounted
    read-only at the same paths. The first call may block for some seconds while the folders are made."""

    def mounts(self) -> tuple[Path, ...]: ...


class InProcessHarness:
    """Runs one agent object, and converts its exceptions to HarnessErrors."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def available(self) -> Availability:
        return Availability(ok=True, detail="runs inside the node's own process")

    def mounts(self) -> tuple[Path, ...]:
        return self._agent.mounts() if isinstance(self._agent, MountingAgent) else ()

    async def install(self, context: HarnessContext) -> None:
        await self._attributed("init", self._agent.init(context))

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        outcome = await self._attributed("run", self._agent.run(context))
        if not isinstance(outcome, HarnessOutcome):
            raise HarnessError(f"{self._name}.run returned {type(outcome).__name__}, not a HarnessOutcome")
        return outcome

    @property
    def _name(self) -> str:
        return type(self._agent).__name__

    async def _attributed(self, hook: str, call: Awaitable[Any]) -> Any:
        try:
            with plugin_code():
                return await call
        except OutriderError:
            raise
        except Exception as error:  # the agent is user code, which may raise anything
            raise HarnessError(
                f"{self._name}.{hook} raised {type(error).__name__}: {error}",
                log_tail=traceback.format_exc()[-LOG_TAIL:],
            ) from error
