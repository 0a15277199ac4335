"""One attempt of a session (`Attempt`), the functions that build its result, and the protocol of a node (`Node`).

`rollout.py` runs an attempt. Invariant: every `SessionResult` is built in this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from outrider.counts import NodeCounts
from outrider.errors import ErrorRecord
from outrider.harnesses.base import SessionIds
from outrider.lifecycle import SessionState, StopReason
from outrider.logs import LoggedSession
from outrider.redaction import redacted, redacted_tail, secrets_in
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import NodeStats
from outrider.sessions.priority_semaphore import URGENT
from outrider.spec import PrepareCommand, RuntimeSpec, TaskSpec, runtimes_of, steps_of, tenant_of
from outrider.store.rows import SessionRow
from outrider.timeline import TimelinePart
from outrider.tokens.samples import count_session, policy_of
from outrider.trajectory import BranchPolicy, FrozenUse, HarnessExit, SessionResult, StageSeconds, Turn, Verdict

RESERVED_PRIORITY = URGENT
"""Priority of attempts on slots that are reserved for evaluations. It is above every priority of a group."""
MAX_ANSWER = 1 << 20
"""Maximum characters of the answer in a result. The service refuses a longer one from a node, and closes the node's
connection."""
LEASE_EXPIRED = "lease_expired"
"""Error code of a session whose service was lost while the session ran."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a session, as a node receives it.

    session: `session.attempt` is the number of this attempt, from 1.
    reserved: True if the attempt uses the slots reserved for evaluations.
    stored: the result of an earlier run, for an attempt that only grades this run and starts no agent. Otherwise None.
        The run belongs to an earlier session or, if the agent ran elsewhere, to this session.
    """

    session: SessionRow
    task: TaskSpec
    reserved: bool = False
    stored: SessionResult | None = None

    @property
    def name(self) -> str:
        """A name that is unique among all attempts of all sessions."""
        return f"{self.session.id}-{self.session.attempt}"

    @property
    def regrades(self) -> str | None:
        """Id of the earlier session whose run this attempt grades again. None if the run is this session's own."""
        return None if self.stored is None or self.stored.session_id == self.session.id else self.stored.session_id

    @property
    def ids(self) -> SessionIds:
        session = self.session
        return SessionIds(
            group_id=session.group_id,
            session_id=session.id,
            sample_index=session.sample_index,
            attempt=session.attempt,
        )

    @property
    def logged(self) -> LoggedSession:
        """The attempt's ids for log lines, and the secrets that no log line may contain."""
        session = self.session
        return LoggedSession(
            group=session.group_id, session=session.id, attempt=session.attempt, secrets=secrets_of(self.task)
        )

    @property
    def priority(self) -> int:
        """The priority in the node's queues. Attempts on reserved slots come before all other attempts."""
        return RESERVED_PRIORITY if self.reserved else self.session.priority

    @property
    def tenant(self) -> str:
        """The tenant of the session. Tenants take turns in the node's queues."""
        return tenant_of(self.session.bucket)


class AttemptStore(Protocol):
    """The store's methods for attempts. `set_state` and `add_turn` raise Conflict if the attempt has already ended.
    `add_timeline` stores timeline entries of any attempts of this node."""

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None: ...
    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None: ...
    async def turns(self, session_id: str, attempt: int, *, images: bool = False) -> list[Turn]: ...
    async def frozen_turns(self, session_id: str, attempt: int) -> dict[str, list[Turn]]: ...
    async def add_timeline(self, parts: Sequence[TimelinePart]) -> None: ...


def continues_turns(session: SessionRow, task: TaskSpec) -> bool:
    """Return True if the next attempt of an external session continues the turns of the earlier attempts. Only a remote
    agent may start from the beginning instead: after every failure except the loss of the service."""
    error = session.last_error
    return task.harness.remote is None or error is None or error.code == LEASE_EXPIRED


class NodeLost(Exception):
    """The node that ran the attempt is lost. Nothing more is stored for the attempt."""


class Node(Protocol):
    """A host that runs sessions. Nodes with the same `machine` share its resources and images.

    run: returns the result of an attempt, and raises only CancelledError and NodeLost.
    counts: returns the node's counts since the service's start.
    has_image: returns True if a sandbox can start without fetching the runtime's image first.
    pull_image: fetches an image from a registry. Raises OutriderError.
    """

    name: str
    machine: str

    def stats(self) -> NodeStats: ...
    def counts(self) -> NodeCounts: ...
    def has_image(self, runtime: RuntimeSpec) -> bool: ...
    async def pull_image(self, reference: str, name: str) -> RootImage: ...
    async def run(self, attempt: Attempt) -> SessionResult: ...


def secrets_of(task: TaskSpec) -> list[str]:
    """Return the secrets in the task's environment variables and MCP server settings."""
    runtimes = [steps_of(task)[-1].runtime, *(runtime for runtime, _ in runtimes_of(task))]
    runs = (step for runtime in runtimes for step in runtime.prepare if isinstance(step, PrepareCommand))
    given = (task.harness.env, *(runtime.env for runtime in runtimes), *(step.env for step in runs))
    variables = (variable for env in given for variable in env.items())
    return secrets_in((*variables, *(each for server in task.harness.mcp_servers for each in server.secrets())))


def without_secrets(result: SessionResult, task: TaskSpec) -> SessionResult:
    """Return the result without the secrets of the task's environment, which a failed program may have printed."""
    secrets = secrets_of(task)
    error, ended = result.error, result.harness_exit
    if error is not None:
        error = msgspec.structs.replace(
            error,
            message=redacted(error.message, secrets),
            hint=error.hint and redacted(error.hint, secrets),
            log_tail=error.log_tail and redacted_tail(error.log_tail, secrets),
        )
    if ended is not None:
        ended = msgspec.structs.replace(ended, log_tail=redacted_tail(ended.log_tail, secrets))
    return msgspec.structs.replace(result, error=error, harness_exit=ended)


def session_result(
    session: SessionRow,
    reason: StopReason,
    turns: Sequence[Turn],
    *,
    task: TaskSpec | None,
    verdict: Verdict | None = None,
    at_most: BranchPolicy = BranchPolicy.TRAIN,
    error: ErrorRecord | None = None,
    harness_exit: HarnessExit | None = None,
    forks: Mapping[str, int] = {},
    failed_calls: Mapping[str, int] = {},
    frozen: Mapping[str, Sequence[Turn]] = {},
    seconds: StageSeconds | None = None,
    artifact_bytes: int = 0,
    answer: str | None = None,
    carried: bool = False,
    run_reason: StopReason | None = None,
    regrades: str | None = None,
) -> SessionResult:
    """Build the result of `session`. `turns` are those of the attempt `session.attempt`, and all their tokens are
    counted. The other arguments are fields of `SessionResult`, except these:

    frozen: the attempt's turns of frozen models, by model.
    task: None if the stored task cannot be read. Then the default branch policy applies and there are no labels.
    at_most: an upper bound for the branch policy. With MASK, rows for which the task chose TRAIN are masked.
    answer: the agent's answer. Only its last MAX_ANSWER characters are kept, because programs print remarks before
        their answer.
    forks: the number of forks by cause, if it was counted while the attempt ran. It replaces the counts from `turns`.
    """
    policy = {} if task is None else policy_of(task.branches)
    order = list(BranchPolicy)  # ordered from TRAIN, which lets training use the most rows, to DROP
    policy = {kind: max(chosen, at_most, key=order.index) for kind, chosen in policy.items()}
    counts = count_session(turns, policy)
    return SessionResult(
        session_id=session.id,
        group_id=session.group_id,
        sample_index=session.sample_index,
        attempt=session.attempt,
        stop_reason=reason,
        verdict=verdict,
        error=error,
        harness_exit=harness_exit,
        turns=len(turns),
        forks=counts.forks | dict(forks),
        frozen={
            model: FrozenUse(turns=len(used), tokens=sum(len(turn.output_ids) // 4 for turn in used))
            for model, used in frozen.items()
        },
        tokens=counts.tokens,
        seconds=seconds or StageSeconds(),
        model_seconds=seconds_of_calls([*turns, *chain.from_iterable(frozen.values())]),
        samples=counts.samples,
        policy=policy,
        ignored=counts.ignored,
        failed_calls=dict(failed_calls),
        labels={} if task is None else task.labels,
        artifact_bytes=artifact_bytes,
        answer=answer and answer[-MAX_ANSWER:],
        carried=carried,
        run_reason=run_reason,
        regrades=regrades,
    )


def seconds_of_calls(turns: Iterable[Turn]) -> float:
    """Return the seconds during which at least one model call was running. Overlapping calls, such as those of
    sub-agents, count once."""
    total, end = 0.0, 0.0
    for timings in sorted((turn.timings for turn in turns), key=lambda timings: timings.received):
        total += max(0.0, timings.finished - max(timings.received, end))
        end = max(end, timings.finished)
    return total
