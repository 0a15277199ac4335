"""The agent services that the operator has configured: programs that run agents outside of Outrider.

A service uses either Outrider's own protocol (`remote_runs.py`) or that of a Harbor run server (`harbor_remote.py`).
Invariant: no other module depends on which protocol a service uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.config import AgentServiceConfig
from outrider.errors import InvalidField
from outrider.harnesses.base import ModelEndpoint
from outrider.harnesses.endpoint_variables import endpoint_environment
from outrider.sessions.attempt import Attempt
from outrider.sessions.harbor_remote import HarborRemoteRun, check_harbor_task
from outrider.sessions.remote_runs import RemoteRun, RunRequest, has_files
from outrider.spec import RemoteSpec, TaskSpec

FollowedRun = RemoteRun | HarborRemoteRun


class RunStore(Protocol):
    """The store's methods for runs on agent services."""

    def credential_of(self, session_id: str) -> str: ...
    async def keep_remote_run(self, session_id: str, attempt: int, name: str, run: str) -> None: ...
    async def remote_run(self, session_id: str, name: str) -> str | None: ...


class AgentServices:
    """The configured agent services, by name."""

    def __init__(self, services: Sequence[AgentServiceConfig] = ()) -> None:
        self._services = {service.name: service for service in services}

    def named(self, name: str, *, field: str = "task.harness.remote.service") -> AgentServiceConfig:
        """Return the service with this name. If there is none, raises InvalidField with a hint that lists all names."""
        if name not in self._services:
            known = ", ".join(sorted(self._services)) or "none"
            hint = f"the operator's setting agents has: {known}"
            raise InvalidField(f"there is no agent service {name!r}", field=field, hint=hint)
        return self._services[name]

    def check(self, task: TaskSpec, remote: RemoteSpec) -> None:
        """Raise InvalidField if the agent service of a task cannot run the task."""
        if self.named(remote.service).kind == "harbor":
            check_harbor_task(task, remote)

    def run_of(
        self,
        attempt: Attempt,
        remote: RemoteSpec,
        store: RunStore,
        *,
        model: str,
        address: Callable[[str | None], str],
    ) -> FollowedRun:
        """Return the run of an attempt on its agent service. The run is not started yet. `address(network)` returns the
        base URL at which agents in the service's network reach Outrider. Raises InvalidField for an unknown agent
        service."""
        session, task = attempt.session, attempt.task
        service = self.named(remote.service)
        credential = store.credential_of(session.id)
        base_url = f"{address(service.network)}/s/{credential}"
        number = session.attempt - session.recovered
        name = f"{session.id}-{number}"
        if service.kind == "harbor":
            return HarborRemoteRun(
                service,
                task,
                remote,
                name=name,
                group_id=session.group_id,
                model=model,
                base_url=base_url,
                known=partial(store.remote_run, session.id, name),
                keep=partial(store.keep_remote_run, session.id, session.attempt, name),
            )
        endpoint = ModelEndpoint(base_url=base_url, api_key=credential, model=model)
        return RemoteRun(
            service,
            RunRequest(
                run_id=name,
                session=attempt.ids,
                instruction=task.instruction,
                model=model,
                base_url=base_url,
                key=credential,
                variables=endpoint_environment(endpoint, task.instruction, attempt.ids),
                options=remote.options,
                labels=task.labels,
                seconds=task.limits.session_seconds,
                files=has_files(task),
            ),
            earlier=[f"{session.id}-{run}" for run in range(1, number)],
        )
