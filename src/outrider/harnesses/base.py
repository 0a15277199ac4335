"""The interface of a harness, which starts an agent program and points it at its model endpoint.

Invariant: a harness that fails raises an error with the end of the program's output, and never returns normally.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from outrider.errors import HarnessError, RequestError
from outrider.messages import Message, ToolSpec
from outrider.sandbox.runtimes.base import Availability, Runtime
from outrider.spec import TaskSpec


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses at which programs inside the sandbox reach the session's model.

    base_url: `http://host:port/s/<key>`, without `/v1`.
    api_key: the credential of the session.
    model: the name under which the model is served."""

    base_url: str
    api_key: str
    model: str


class SessionIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of an attempt to run a session. `sample_index` is the session's position in its group, from 0. `attempt`
    counts from 1."""

    group_id: str = ""
    session_id: str = ""
    sample_index: int = 0
    attempt: int = 1


class SessionFolders(msgspec.Struct, frozen=True, kw_only=True):
    """Folders in the agent's sandbox whose files are kept as artifacts (docs/tasks.md): `artifacts` for the agent's
    work, `logs` for its logs. Both are below `parent`, and exist before the agent starts."""

    parent: str = ""

    @property
    def artifacts(self) -> str:
        return f"{self.parent}/artifacts"

    @property
    def logs(self) -> str:
        return f"{self.parent}/logs"


def folders_in(runtime: Runtime) -> SessionFolders:
    """Return the paths of the session's folders in this sandbox."""
    return SessionFolders(parent=f"{runtime.scratch}/outrider-session")


class ModelRefused(RequestError):
    """A frozen model (a model that is never trained) refused a call, and the agent is the cause: the session has used
    up its turns or tokens of this model, or the prompt is too long. If the agent does not catch this error, the session
    is still graded."""

    code = "model_refused"
    http_status = 429


class ModelClient(Protocol):
    """Calls the session's models for in-process agents, without HTTP. Calls are limited and recorded like those at the
    gateway. `model` is the name of a frozen model, or None for the policy.

    A call of the policy raises ContextOverflow, EngineError, and the errors of the session's limits. A call of a frozen
    model raises ModelRefused, EngineError, and NotFound for an unknown name.
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
    """The input of a harness for one session. `folders` are the session's folders in the sandbox."""

    task: TaskSpec
    runtime: Runtime
    endpoint: ModelEndpoint
    model: ModelClient
    ids: SessionIds = SessionIds()

    @property
    def folders(self) -> SessionFolders:
        return folders_in(self.runtime)


class HarnessOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an agent's run.

    log_tail: the end of the agent's log.
    answer: the answer that the agent returned, or None.
    exit_code: not zero if the program failed but its work is still graded."""

    log_tail: str = ""
    answer: str | None = None
    exit_code: int = 0


class ProgramExit(HarnessError):
    """An agent program ended with a non-zero exit code. The session is still graded if the model has replied at least
    once."""

    def __init__(self, message: str, *, exit_code: int, hint: str, log_tail: str) -> None:
        super().__init__(message, hint=hint, log_tail=log_tail)
        self.exit_code = exit_code


class Harness(Protocol):
    """An agent program for one session, made from the task's spec. It keeps no state from other sessions."""

    def available(self) -> Availability:
        """Report whether the agent's program is installed on this node. This is called when a task is submitted."""
        ...

    def mounts(self) -> tuple[Path, ...]:
        """Return the folders and files of the host that the agent's program and its tools need. They are mounted
        read-only in the sandbox, at the same paths."""
        ...

    async def install(self, context: HarnessContext) -> None:
        """Write the agent's config files into the started sandbox. This is called while the session is initialising,
        and again before each later step of the task."""
        ...

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        """Run the agent to its end. Raises ProgramExit if the program fails but its work can be graded, and
        HarnessError for other failures. At a time limit, this call is cancelled. It must then end all processes that it
        has started."""
        ...
