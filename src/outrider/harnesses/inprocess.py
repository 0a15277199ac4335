"""The in-process harness: runs an agent that is a Python class. The tools of the agent run in the sandbox.

Invariant: any exception of an agent except an OutriderError becomes a HarnessError with the end of the traceback.
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
    """An agent in Python.

    The class is called with the task's harness options: once when the task is submitted, and once per session. If the
    call raises an exception, the task is refused with an InvalidField. For a ValidationError of pydantic, the
    InvalidField names the option.

    The attribute `takes` is a set of the fields that the agent supports: `mcp_servers`, `skills`. A task that sets one
    of these fields is invalid if the field is not in the agent's `takes`.

    `init` prepares the sandbox while the session is initialising. `run` calls the model (`context.model`) and uses the
    sandbox (`context.runtime`) until the agent is done. Both are called for each step of the task, and may be cancelled
    at any await.
    """

    def __init__(self, options: Mapping[str, Any]) -> None: ...
    async def init(self, context: HarnessContext) -> None: ...
    async def run(self, context: HarnessContext) -> HarnessOutcome: ...


@runtime_checkable
class MountingAgent(Protocol):
    """An agent whose tools need folders of the host in the sandbox. `mounts` returns these folders, which are mounted
    read-only at the same paths. The first call may block for some seconds, because it makes the folders."""

    def mounts(self) -> tuple[Path, ...]: ...


class InProcessHarness:
    """Runs an agent object, and converts its exceptions to HarnessErrors."""

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
        except Exception as error:  # code of users may raise anything
            raise HarnessError(
                f"{self._name}.{hook} raised {type(error).__name__}: {error}",
                log_tail=traceback.format_exc()[-LOG_TAIL:],
            ) from error
