"""The contract of a harness: an agent program, how it is started and pointed at its model endpoint.

It knows no tokens, no reward and no engine. Invariant: a harness that fails raises an error with the end of the
program's output; it never returns quietly from a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from outrider.errors import HarnessError, RequestError
from outrider.messages import Message, ToolSpec
from outrider.runtimes.base import Availability, Runtime
from outrider.spec import TaskSpec


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent finds its session's model, as seen from inside the sandbox. `base_url` is
    `http://host:port/s/<key>` without `/v1`, `api_key` the session's credential, `model` the served model's name."""

    base_url: str
    api_key: str
    model: str


class ModelRefused(RequestError):
    """A frozen model refused a call for what the agent did: the session has used up its turns or tokens of that model,
    or the prompt is too long for it. An agent that lets it out is graded, as a program that exits non-zero is."""

    code = "model_refused"
    http_status = 429


class ModelClient(Protocol):
    """The session's models for in-process agents: the path of the gateway without HTTP. `model` is the name of a frozen
    model; None is the policy.

    Raises what a model call raises: ContextOverflow, EngineError, and the session's limits; for a frozen model
    ModelRefused and EngineError, and NotFound for a name under which none is served.
    """

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        model: str | None = None,
    ) -> Message: ...


class HarnessContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a harness is given for one session.

    run_name: the name under which its program is started (`Outlives.exec_once`), so that the next node can wait for the
        same run; None if the program ends with this node. Only for a harness that `outlives_node`.
    """

    task: TaskSpec
    runtime: Runtime
    endpoint: ModelEndpoint
    model: ModelClient
    run_name: str | None = None


class HarnessOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent left: the end of its log, its answer if it gives one, and the exit code of its program, where that
    is not 0 and its work is graded all the same."""

    log_tail: str = ""
    answer: str | None = None
    exit_code: int = 0


class ProgramExit(HarnessError):
    """An agent program ended with an `exit_code` of its own, not 0. The session is graded if its model had replied."""

    def __init__(self, message: str, *, exit_code: int, hint: str, log_tail: str) -> None:
        super().__init__(message, hint=hint, log_tail=log_tail)
        self.exit_code = exit_code


class Harness(Protocol):
    """An agent. Made for each session from the task's spec; it keeps no state between sessions.

    An attribute is optional: `outlives_node` is True where all of the agent runs in the sandbox, so that `run` of
    another node, with the same `run_name`, goes on with what this one has begun.
    """

    def available(self) -> Availability:
        """Whether its program is installed on this node. Asked when a task is submitted."""
        ...

    def mounts(self) -> tuple[Path, ...]:
        """Host folders that hold its program, mounted read-only in the sandbox at the same path."""
        ...

    async def install(self, context: HarnessContext) -> None:
        """Write what it needs (config files) into the started sandbox. Part of INIT, and of each later step of the
        task."""
        ...

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        """Run the agent to its end. Raises HarnessError when its program fails, a ProgramExit where the outcome can
        still be graded. It is cancelled at a time limit: everything that it started must then end."""
        ...
