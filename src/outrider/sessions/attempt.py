"""One attempt of a session: what a node is given, what it returns, and the protocol of a node.

It knows neither how an attempt runs nor why it ended. Invariant: every `SessionResult` is built here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import SessionState, StopReason
from outrider.redaction import redacted, secrets_in
from outrider.rootfs.store import Image
from outrider.schemas import NodeStats
from outrider.sessions.priority_semaphore import URGENT
from outrider.spec import Run, RuntimeSpec, TaskSpec, runtimes_of, steps_of, tenant_of
from outrider.store.rows import SessionRow
from outrider.tokens.samples import count_session, policy_of
from outrider.trajectory import (
    BranchPolicy,
    FrozenUse,
    HarnessExit,
    SessionResult,
    StageSeconds,
    StoredRun,
    Turn,
    Verdict,
)

RESERVED_PRIORITY = URGENT
"""Above every priority that a group can have."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is to run. `session.attempt` is the number of this attempt, from 1. `reserved`: it runs in the share
    of the slots that is reserved for evaluations. `stored`: the run that is graded, in place of one of an agent.
    `goes_on`: it goes on with the run of the attempt before, which has outlived the last node (`Node.outlived`)."""

    session: SessionRow
    task: TaskSpec
    reserved: bool = False
    stored: StoredRun | None = None
    goes_on: bool = False

    @property
    def name(self) -> str:
        """Unique among all attempts of all sessions."""
        return f"{self.session.id}-{self.session.attempt}"

    @property
    def priority(self) -> int:
        """Its place in the lines of the node. What has a share of its own waits behind nobody else."""
        return RESERVED_PRIORITY if self.reserved else self.session.priority

    @property
    def tenant(self) -> str:
        """Whose it is: in the lines of the node, tenants take turns."""
        return tenant_of(self.session.bucket)


class AttemptStore(Protocol):
    """What an attempt needs of the store, whose methods these are. They raise Conflict for an attempt that is not under
    way any more."""

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None: ...
    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None: ...
    async def turns(self, session_id: str, attempt: int, *, images: bool = False) -> list[Turn]: ...
    async def frozen_turns(self, session_id: str, attempt: int) -> dict[str, list[Turn]]: ...


class NodeLost(Exception):
    """The node has died, and the attempt with it; or the attempt was to go on where a dead node had left it, and that
    did not end well. Nothing is stored for the attempt any more."""


class Node(Protocol):
    """Where sessions run. `run` returns how the attempt ended; it raises nothing but CancelledError and NodeLost.
    `has_image` tells whether a sandbox of this kind can start without getting its image first; `pull_image` gets one
    from a registry, and raises OutriderError. Nodes on one `machine` share its resources and its images.

    `outlived` are the attempts, by session, whose sandboxes and agents have outlived the last node of this name: each
    is to be run with `goes_on`, or ended with `end_outlived`."""

    name: str
    machine: str

    def stats(self) -> NodeStats: ...
    def has_image(self, runtime: RuntimeSpec) -> bool: ...
    async def pull_image(self, reference: str, name: str) -> Image: ...
    async def run(self, attempt: Attempt) -> SessionResult: ...
    def outlived(self) -> Mapping[str, int]: ...
    def end_outlived(self, session_id: str) -> None: ...


def without_secrets(result: SessionResult, task: TaskSpec) -> SessionResult:
    """The result without the secrets in the task's environment, which a program that failed may have printed."""
    runtimes = [steps_of(task)[-1].runtime, *(runtime for runtime, _ in runtimes_of(task))]
    runs = (step for runtime in runtimes for step in runtime.prepare if isinstance(step, Run))
    given = (task.harness.env, *(runtime.env for runtime in runtimes), *(step.env for step in runs))
    secrets = secrets_in(variable for env in given for variable in env.items())
    error, ended = result.error, result.harness_exit
    if error is not None:
        error = msgspec.structs.replace(
            error,
            message=redacted(error.message, secrets),
            log_tail=error.log_tail and redacted(error.log_tail, secrets),
        )
    if ended is not None:
        ended = msgspec.structs.replace(ended, log_tail=redacted(ended.log_tail, secrets))
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
    frozen: Mapping[str, Sequence[Turn]] = {},
    seconds: StageSeconds | None = None,
    artifact_bytes: int = 0,
    answer: str | None = None,
    carried: bool = False,
    run_reason: StopReason | None = None,
    regrades: str | None = None,
) -> SessionResult:
    """How `session` ended, with every token of `turns` counted; `turns` are those of attempt `session.attempt`, and
    `frozen` are its turns of frozen models.

    `task` is None if the stored task cannot be read: then the default branch policy applies and there are no labels.
    `at_most` is the most that is done with rows of any kind. `forks` are counted by cause while the attempt runs, and
    take precedence over those counted from `turns`.
    """
    policy = {} if task is None else policy_of(task.branches)
    order = list(BranchPolicy)  # from what uses most of a session to what uses least
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
        samples=counts.samples,
        policy=policy,
        ignored=counts.ignored,
        labels={} if task is None else task.labels,
        artifact_bytes=artifact_bytes,
        answer=answer,
        carried=carried,
        run_reason=run_reason,
        regrades=regrades,
    )
