"""Starts agents on a Harbor run server and follows their runs.

A run server accepts a task folder and the name of an agent (docs/external.md). Outrider stores the id that the server
assigns to the run, and follows the same run after a restart. The server has no request that ends a run. When a session
is cancelled, its key becomes invalid, so the agent's model calls fail.

Invariants: a run that is lost or fails is an error, never a reward; a request that may have started a run is repeated
only under the same id (`Idempotency-Key`), because a second run would write into the same session.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
from pydantic import Field, ValidationError

from outrider.config import AgentServiceConfig
from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.sessions.agent_service_calls import TRANSIENT, NotConnected, RemoteRunFailed, ServiceCalls
from outrider.spec import (
    REPORTED,
    Name,
    PrepareCommand,
    RemoteSpec,
    ReportedStop,
    ReportSpec,
    Seconds,
    Spec,
    TaskSpec,
    Text,
)

SUBMIT_SECONDS = 600.0
FIELD = "task.harness.remote.options"
REFUSED_FOR_NOW = frozenset({429, 503})
"""HTTP statuses that prove, in the reply to a submission, that no run was started."""
NOT_YET = TRANSIENT | {404}
"""HTTP statuses after which a request for the state of a run is repeated. 404 is among them, because the server may not
list a run right after its submission."""
TASK_TOML = "task.toml"


class RemoteRunUnclear(RemoteRunFailed):
    """It is unknown whether a run is still active. The session is not retried, because the calls of a second run could
    be mixed with the calls of this one."""

    code = "remote_run_unclear"
    retryable = False


class HarborRunAgent(Spec):
    """The field `agent` of a Harbor request. The field names are defined by Harbor."""

    name: Name | None = None
    import_path: Name | None = None
    model_name: Name | None = None
    override_timeout_sec: Seconds | None = None
    override_setup_timeout_sec: Seconds | None = None
    max_timeout_sec: Seconds | None = None
    kwargs: Annotated[dict[Name, Any], Field(max_length=256)] = Field(default_factory=dict)


class HarborRunVerifier(Spec):
    """The field `verifier` of a Harbor request, with the limits of the run's verifier. The field names are defined by
    Harbor. If `disable` is True, the run is not graded and has no rewards."""

    override_timeout_sec: Seconds | None = None
    max_timeout_sec: Seconds | None = None
    disable: bool = False


class HarborRemoteOptions(Spec):
    """The `options` of a task whose agent runs on a Harbor run server. `reward` is the name of the run's reward that
    becomes the session's reward. All other fields are sent to the server.

    Harbor's `max_retries` is not supported, because the turns of a failed run would stay in the session when the server
    repeats the run. Use the task's `max_attempts` instead."""

    agent: HarborRunAgent
    job_id: Name | None = None
    task_id: Name | None = None
    task_path: Text | None = None
    timeout_multiplier: Annotated[float, Field(ge=0.1, le=1000)] | None = None
    verifier: HarborRunVerifier | None = None
    environment_overrides: dict[Name, Any] | None = None
    environment_kwargs: dict[Name, Any] | None = None
    reward: Name | None = None


class HarborRemoteState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a run's status or result that Outrider reads."""

    status: str
    rewards: dict[str, float] | None = None
    error: str | None = None


class _Begun(msgspec.Struct, frozen=True):
    run_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9._:@-]+$")]


def harbor_options(remote: RemoteSpec) -> HarborRemoteOptions:
    """Return a task's options for the run server. Raises InvalidField with the name of the invalid option."""
    try:
        return HarborRemoteOptions.model_validate(remote.options)
    except ValidationError as error:
        raise first_fault(error, below=FIELD, hint="docs/external.md has the options of a Harbor run server") from error


def check_harbor_task(task: TaskSpec, remote: RemoteSpec) -> None:
    """Raise InvalidField if a run server cannot run the task."""
    options = harbor_options(remote)
    if (options.agent.name is None) == (options.agent.import_path is None):
        raise InvalidField("give exactly one of name and import_path", field=f"{FIELD}.agent")
    if not any(not isinstance(step, PrepareCommand) for step in task.runtime.prepare):
        raise InvalidField(
            "a Harbor run server needs a task folder",
            field="task.runtime.prepare",
            hint='upload it: prepare = [{ upload = "my-task", to = "my-task" }], below the setting files',
        )
    if task.evaluator.kind == REPORTED and options.verifier is not None and options.verifier.disable:
        raise InvalidField(
            "without a verifier a run has no rewards, but the evaluator 'reported' takes them",
            field=f"{FIELD}.verifier.disable",
            hint="leave it out, or give the task an evaluator of its own",
        )


class HarborRemoteRun:
    """One run on a Harbor run server.

    name: Outrider's id of the run.
    known: returns the server's id of the run if it was started before, else None.
    keep: stores the server's id.
    base_url: the base URL for the session's model calls."""

    def __init__(
        self,
        service: AgentServiceConfig,
        task: TaskSpec,
        remote: RemoteSpec,
        *,
        name: str,
        group_id: str,
        model: str,
        base_url: str,
        known: Callable[[], Awaitable[str | None]],
        keep: Callable[[str], Awaitable[None]],
    ) -> None:
        self._service = service
        self._task = task
        self._options = harbor_options(remote)
        self._name = name
        self._group_id = group_id
        self._model = model
        self._base_url = base_url
        self._known = known
        self._keep = keep
        self._calls = ServiceCalls(service, f"{service.url.rstrip('/')}/api/v1/runs", name)

    async def follow(self, archive: bytes | None) -> ReportSpec:
        """Start the run, unless it was started before, and wait until it ends. `archive` contains the task's folder.
        Raises RemoteRunFailed."""
        async with self._calls:
            run = await self._known()
            if run is None:
                run = await self._submit(archive or b"")
                await self._keep(run)
            while True:
                state = await self._look(f"/async/{run}/status")
                if state.status in ("completed", "failed", "timeout"):
                    return self._report(await self._ended(run, state))
                await asyncio.sleep(self._service.poll_seconds)

    async def end_earlier(self) -> None:
        """Do nothing. After a run that may still be active, the session is not retried (RemoteRunUnclear)."""

    async def cancel(self) -> None:
        """Do nothing, because a run server has no request that ends a run. The run's model calls fail, because the key
        of a cancelled session is invalid."""

    async def _submit(self, archive: bytes) -> str:
        """Start the run, and return the id that the server has assigned to it. Raises RemoteRunFailed, or
        RemoteRunUnclear if a run may have been started."""
        folder = await asyncio.to_thread(task_folder_in, archive)
        boundary = secrets.token_hex(16)
        body = multipart(boundary, msgspec.json.encode(self._metadata(folder)), archive)
        kind = f"multipart/form-data; boundary={boundary}"
        # For a repeated request, a server that reads this header replies with the same run. Other servers ignore it.
        more = {"Idempotency-Key": self._name}
        give_up_at = asyncio.get_running_loop().time() + self._service.patience_seconds
        tries = 0
        while True:
            try:
                reply = await self._calls.once("POST", "/async", body, kind, seconds=SUBMIT_SECONDS, more=more)
                failure = f"answered {reply.status}"
            except NotConnected as error:  # no connection was opened, so no run was started
                reply, failure = None, f"cannot be reached: {type(error).__name__}"
            except OSError as error:
                raise self._unclear(f"broke off the submission: {type(error).__name__}") from error
            if reply is not None and reply.ok:
                try:
                    return msgspec.json.decode(reply.content, type=_Begun).run_id
                except (msgspec.DecodeError, ValueError) as error:
                    raise self._unclear(f"gave no run_id: {error}") from error
            if reply is not None and reply.status not in REFUSED_FOR_NOW:
                if reply.status >= 500 or reply.status == 408:
                    raise self._unclear(failure, log_tail=reply.excerpt)
                raise RemoteRunFailed(f"agent service {self._service.name!r} {failure}", log_tail=reply.excerpt)
            await self._calls.pause(tries, give_up_at, failure)
            tries += 1

    def _unclear(self, failure: str, *, log_tail: str | None = None) -> RemoteRunUnclear:
        return RemoteRunUnclear(
            f"agent service {self._service.name!r} {failure}: its run may go on",
            hint="see at the server whether the run goes on, and submit the task again",
            log_tail=log_tail,
        )

    def _metadata(self, folder: str) -> Mapping[str, Any]:
        """Return the `metadata` part of the request, without null values. The value of `agent.max_timeout_sec` is at
        most the session's time limit."""
        options, seconds = self._options, self._task.limits.session_seconds
        given = options.model_dump(mode="json", exclude_none=True, exclude={"reward"})
        most = options.agent.max_timeout_sec
        agent = {"model_name": self._model, "kwargs": {}, **given["agent"]}
        agent["max_timeout_sec"] = seconds if most is None else min(most, seconds)
        return {
            "job_id": self._group_id,
            "task_id": self._name,
            "task_path": folder,
            "timeout_multiplier": 1.0,
            "max_retries": 0,
            **given,
            "agent": agent,
            "llm_proxy_url": f"{self._base_url}/v1",
        }

    async def _look(self, path: str) -> HarborRemoteState:
        """Request a run's status or result, and repeat the request until the server replies. Raises
        RemoteRunUnclear."""
        try:
            return self._calls.state(await self._calls.ask("GET", path, again_on=NOT_YET), HarborRemoteState)
        except RemoteRunFailed as error:
            raise RemoteRunUnclear(error.message, hint=error.hint, log_tail=error.log_tail) from error

    async def _ended(self, run: str, state: HarborRemoteState) -> HarborRemoteState:
        """Return the result of a run that has ended. If the result cannot be read, or has another status than `state`,
        return `state`."""
        try:
            content = await self._calls.ask("GET", f"/async/{run}/result")
            result = self._calls.state(content, HarborRemoteState)
        except RemoteRunFailed:
            return state
        return result if result.status == state.status else state

    def _report(self, state: HarborRemoteState) -> ReportSpec:
        reason = state.error or f"the run ended as {state.status}"
        if state.status == "failed":
            raise RemoteRunFailed(f"agent service {self._service.name!r}: {reason}")
        timeout = state.status == "timeout"
        stop: ReportedStop = "agent_timeout" if timeout else "completed"
        if self._task.evaluator.kind != REPORTED:
            return ReportSpec(stop_reason=stop)
        if not state.rewards:
            if timeout:  # no retry: the agent caused the timeout, so another attempt would take as long
                return ReportSpec(error=reason[:1000])
            raise RemoteRunFailed(f"agent service {self._service.name!r} gave no rewards: {reason}")
        reward = reward_of(state.rewards, self._options.reward)
        try:
            return ReportSpec(reward=reward, metrics=state.rewards, reason=state.error, stop_reason=stop)
        except ValueError as error:  # a ValidationError of pydantic
            raise RemoteRunFailed(f"the rewards of agent service {self._service.name!r}: {error}") from error


def reward_of(rewards: Mapping[str, float], name: str | None) -> float:
    """Return the reward called `name`. If `name` is None, return the only reward or, if there are several, the reward
    called `reward`. Raises RemoteRunFailed if the run has no such reward."""
    if name is None:
        name = next(iter(rewards)) if len(rewards) == 1 else "reward"
    if name not in rewards:
        raise RemoteRunFailed(
            f"the run rewards {', '.join(map(repr, sorted(rewards)))}, and none of it is {name!r}",
            hint="name the session's reward by the option reward",
        )
    return rewards[name]


def task_folder_in(archive: bytes) -> str:
    """Return the name of the task folder in an archive. Blocks. Raises RemoteRunFailed unless this folder is the only
    entry at the top of the archive and contains `task.toml`."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            names = [PurePosixPath(name) for name in tar.getnames()]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise RemoteRunFailed(f"the task's files cannot be read: {error}") from error
    tops = sorted({name.parts[0] for name in names if name.parts})
    if len(tops) != 1 or PurePosixPath(tops[0], TASK_TOML) not in names:
        raise RemoteRunFailed(
            f"the task's files are no task folder: they need one folder with {TASK_TOML}, and have"
            f" {', '.join(tops[:5]) or 'nothing'}",
            hint='upload the folder: prepare = [{ upload = "my-task", to = "my-task" }]',
        )
    return tops[0]


def multipart(boundary: str, metadata: bytes, archive: bytes) -> bytes:
    """Return the body of a submission. The part `metadata` has no content type, so that servers read it as a form
    field."""
    parts = (
        ('name="metadata"', metadata),
        ('name="task_archive"; filename="task.tar.gz"\r\nContent-Type: application/gzip', archive),
    )
    lines: list[bytes] = []
    for named, content in parts:
        head = f"--{boundary}\r\nContent-Disposition: form-data; {named}\r\n\r\n"
        lines += [head.encode(), content, b"\r\n"]
    return b"".join((*lines, f"--{boundary}--\r\n".encode()))
