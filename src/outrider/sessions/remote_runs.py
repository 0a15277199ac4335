"""Runs agents on the operator's agent services, and follows these runs.

An agent service handles four requests below its URL (docs/external.md): PUT the files of a run, PUT the run, GET its
state, and DELETE it. A run's id consists of the session's id and the number of failed attempts. So a repeated request
starts no second run, and after a restart Outrider follows the same run.

Invariants: a run is started once, however often it is requested; a run that is lost or fails is an error, never a
reward.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from outrider.config import AgentServiceConfig
from outrider.errors import OutriderError
from outrider.harnesses.base import SessionIds
from outrider.sandbox.host_paths import HostPaths
from outrider.sessions.agent_service_calls import RemoteRunFailed, ServiceCalls
from outrider.spec import ReportSpec, TaskSpec, Upload, Write

FILES_SECONDS = 600.0
CANCEL_SECONDS = 10.0


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `PUT /runs/{run_id}`.

    seconds: the time limit of the run.
    variables: environment variables for the agent programs of several vendors.
    files: True if an archive was sent to `/runs/{run_id}/files` before."""

    run_id: str
    session: SessionIds
    instruction: str
    model: str
    base_url: str
    key: str
    variables: dict[str, str]
    options: dict[str, object]
    labels: dict[str, str]
    seconds: float
    files: bool


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to `GET /runs/{run_id}`. `report` has the fields of a `ReportSpec` if the run is completed. `error` is
    set if the run failed."""

    status: Literal["running", "completed", "failed"]
    report: Annotated[dict[str, object], msgspec.Meta(description="fields of a report")] = {}
    error: str = ""


class RemoteRun:
    """One run on an agent service."""

    def __init__(self, service: AgentServiceConfig, request: RunRequest, *, earlier: Sequence[str] = ()) -> None:
        """`earlier` are the ids of the session's runs before this one."""
        self._service = service
        self._request = request
        self._earlier = earlier
        self._calls = self._calls_of(request.run_id)

    def _calls_of(self, run_id: str) -> ServiceCalls:
        return ServiceCalls(self._service, f"{self._service.url.rstrip('/')}/runs/{run_id}", run_id)

    async def end_earlier(self) -> None:
        """Have the service end the session's earlier runs, which may go on although they count as lost. All runs have
        the session's key, so an earlier agent's calls would be mixed with the calls of this run. Any answer that is not
        TRANSIENT is accepted, because a service may have forgotten a run that has ended. Raises RemoteRunFailed if the
        service cannot be reached."""
        # all of them, because the service may have been out of reach in the attempt that followed a lost run
        for run_id in self._earlier:
            async with self._calls_of(run_id) as calls:
                await calls.ask("DELETE", "", any_answer=True)

    async def follow(self, archive: bytes | None) -> ReportSpec:
        """Start the run, unless it was started before, and wait until it ends. `archive` contains the task's files.
        Raises RemoteRunFailed."""
        calls = self._calls
        async with calls:
            if archive is not None:
                await calls.ask("PUT", "/files", archive, "application/gzip", seconds=FILES_SECONDS)
            await calls.ask("PUT", "", msgspec.json.encode(self._request), "application/json")
            while True:
                state = calls.state(await calls.ask("GET", ""), RunState)
                if state.status == "failed":
                    raise RemoteRunFailed(f"agent service {self._service.name!r}: {state.error or 'the run failed'}")
                if state.status == "completed":
                    return self._report(state)
                await asyncio.sleep(self._service.poll_seconds)

    async def cancel(self) -> None:
        """Have the service end the run. Does nothing if the service cannot be reached."""
        try:
            async with asyncio.timeout(CANCEL_SECONDS), self._calls as calls:
                await calls.once("DELETE", "", seconds=CANCEL_SECONDS)
        except (OutriderError, OSError):  # OSError includes TimeoutError
            return

    def _report(self, state: RunState) -> ReportSpec:
        try:
            return ReportSpec.model_validate_json(msgspec.json.encode(state.report))
        except ValueError as error:  # a ValidationError of pydantic
            raise RemoteRunFailed(f"the report of agent service {self._service.name!r}: {error}") from error


def has_files(task: TaskSpec) -> bool:
    return any(isinstance(step, Upload | Write) for step in task.runtime.prepare)


def archive_of(task: TaskSpec, paths: HostPaths) -> bytes | None:
    """Return the files of the task's prepare steps as a tar.gz archive, or None if there are none. The name of a file
    is the `to` of its step, without the leading slash. Blocks. Raises RuntimeFailure if a file to be uploaded cannot be
    read."""
    if not has_files(task):
        return None
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz", compresslevel=1) as archive:
        for number, step in enumerate(task.runtime.prepare):
            match step:
                case Write():
                    data = step.data()
                    entry = tarfile.TarInfo(step.to.lstrip("/"))
                    entry.size, entry.mode = len(data), 0o755 if step.executable else 0o644
                    archive.addfile(entry, io.BytesIO(data))
                case Upload():
                    source = paths.upload_now(step.upload, field=f"task.runtime.prepare.{number}.upload")
                    archive.add(source, step.to.lstrip("/"), filter=_plain)
    return written.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner and group from an archive entry."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
