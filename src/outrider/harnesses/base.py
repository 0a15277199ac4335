"""The harness seam: the agent program, how it is started and pointed at its model endpoint.

It knows no tokens, no reward and no engine. Invariant: a harness that fails raises, with the end of the
program's output attached; it never returns quietly from a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from outrider.errors import HarnessError
from outrider.messages import Message, ToolSpec
from outrider.runtimes.base import Availability, Runtime
from outrider.spec import TaskSpec


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the session's model is. `base_url` is `http://host:port/s/<key>` without `/v1`; `api_key` is the
    session's credential, `model` the served model's name. Valid inside the sandbox."""

    base_url: str
    api_key: str
    model: str


class ModelClient(Protocol):
    """The session's model for in-process agents: the gateway's own path, without HTTP.

    Raises what a model call raises: ContextOverflow, EngineError, and the session's limits.
    """

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Message: ...


class HarnessContext(msgspec.Struct, frozen=True, kw_only=True):
    """All a harness is given for one session."""

    task: TaskSpec
    runtime: Runtime
    endpoint: ModelEndpoint
    model: ModelClient


class HarnessOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent left: the end of its log, its final words if it has any, and its program's exit code if that is
    not 0 and its work is graded all the same."""

    log_tail: str = ""
    answer: str | None = None
    exit_code: int = 0


class ProgramExit(HarnessError):
    """An agent program that ended with an `exit_code` of its own, not 0: an outcome, if its model had said anything."""

    def __init__(self, message: str, *, exit_code: int, hint: str, log_tail: str) -> None:
        super().__init__(message, hint=hint, log_tail=log_tail)
        self.exit_code = exit_code


class Harness(Protocol):
    """An agent. Made once per session from the task's spec; holds no state between sessions."""

    def available(self) -> Availability:
        """Whether its program is installed on this node; asked at submission."""
        ...

    def mounts(self) -> tuple[Path, ...]:
        """Host folders its program lives in, shown read-only in the sandbox at the same path."""
        ...

    async def install(self, context: HarnessContext) -> None:
        """Put what it needs (config files) into the started sandbox; part of INIT."""
        ...

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        """Drive the agent to its end. Raises HarnessError when it exits non-zero, as a ProgramExit where that can be
        graded. Cancelled on a time limit: everything it started must then die."""
        ...
