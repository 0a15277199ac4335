"""Runs each task of a dataset as a group, to collect rollouts for training. All groups of one such run share the run's
name.

    done = await roll_out(client, tasks, run="first", samples=4)

The same call continues a run that was interrupted. Invariant: a run submits each task only once, even if other rows of
the dataset are added, moved or removed before the next call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import msgspec

from outrider.client.client import AsyncClient, patiently
from outrider.errors import Conflict, InvalidField
from outrider.lifecycle import GroupState, SessionState
from outrider.schemas import GroupView

RUN_LABEL = "outrider.run"
"""The label that holds the name of a group's run. `outrider export --run` exports all groups of a run."""
WAITED_FOR = 16
"""Maximum number of groups that are polled at once. The polled groups are the first groups that are not done."""
WAIT_SECONDS = 1.0
"""Seconds that a poll waits for the first group to be done."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run: the number of all its sessions, of submitted sessions, and of ended sessions. `states`
    counts the sessions of the polled groups by state."""

    sessions: int
    submitted: int
    ended: int
    states: dict[SessionState, int]


class RolledOut(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    groups: the ids of the groups, in the order of the tasks.
    earlier: number of groups that an earlier call had already run.
    mean_reward: the mean over all graded sessions, or None if no session was graded.
    mixed: number of groups whose rewards are not all equal. Only such groups have a non-zero advantage in GRPO.
    failures: number of ungraded sessions by error code, or by stop reason if they have no error.
    failed: the id of a session that ended with an error, or None.
    trained: number of tokens to train on.
    after: the cursor just before the first of the groups, for `export --after`.
    """

    run: str
    groups: tuple[str, ...]
    earlier: int
    sessions: int
    graded: int
    mean_reward: float | None
    mixed: int
    failures: dict[str, int]
    failed: str | None
    turns: int
    sampled: int
    trained: int
    after: int


async def roll_out(
    client: AsyncClient,
    tasks: Sequence[Mapping[str, Any]],
    *,
    run: str,
    samples: int = 1,
    priority: int = 0,
    watch: Callable[[Progress], None] | None = None,
) -> RolledOut:
    """Run `samples` sessions of each task, and wait for all of them. While the service's queue is full, the remaining
    groups wait for their submission. `watch` is called with the progress after each submission, before each poll, and
    at the end.

    Groups that an earlier call submitted under the name `run` are used again. If the call is cancelled, running groups
    continue in the service. Raises InvalidField if the service refuses a task, or if the run has a task with another
    number of sessions or another priority. Raises ServiceError if the service cannot be reached.
    """
    if not tasks or samples < 1:
        raise InvalidField("a run needs a task and a session", field="n" if tasks else "source")
    groups: dict[str, GroupView] = {}

    def report(waited_for: Iterable[GroupView]) -> None:
        if watch is None:
            return
        states = Counter(session.state for group in waited_for for session in group.sessions)
        done = sum(group.n for group in groups.values() if group.state is GroupState.DONE)
        watch(
            Progress(
                sessions=len(tasks) * samples,
                submitted=len(groups) * samples,
                ended=done + states[SessionState.DONE],
                states=dict(states),
            )
        )

    for body in _bodies(tasks, run=run, samples=samples, priority=priority):
        try:
            submission = partial(client.submit, body, patience=math.inf)
            # If the first submission cannot reach the service, the address may be wrong, so the error is raised at
            # once. Later submissions are repeated, because the service may be restarting.
            group = await (patiently(submission) if groups else submission())
        except Conflict as error:
            raise InvalidField(
                f"the run {run!r} has this task with another number of sessions or another priority",
                field="resume",
                hint="give the options with which the run began, or begin another one",
            ) from error
        groups[group.id] = group
        report(())
    earlier = sum(group.state is GroupState.DONE for group in groups.values())
    while active := [group for group in groups.values() if group.state is not GroupState.DONE][:WAITED_FOR]:
        report(active)
        # Only the request for the first group waits, for up to WAIT_SECONDS. This wait is the pause between two polls.
        waits = [WAIT_SECONDS] + [0.0] * (len(active) - 1)
        calls = [partial(client.group, group.id, wait=wait) for group, wait in zip(active, waits, strict=True)]
        for group in await asyncio.gather(*map(patiently, calls)):
            groups[group.id] = group
    report(())
    return _rolled_out(run, list(groups.values()), earlier)


def _bodies(tasks: Sequence[Mapping[str, Any]], *, run: str, samples: int, priority: int) -> Iterator[dict[str, Any]]:
    """Yield the groups to submit. A group's idempotency key is made from the content of its task, not from the task's
    position. So a run can continue after rows were added, removed or moved. Equal tasks get different keys."""
    seen = Counter[str]()
    for task in tasks:
        body = {**task, "labels": {**(task.get("labels") or {}), RUN_LABEL: run}}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()[:32]
        seen[digest] += 1
        key = f"run/{run}/{digest}/{seen[digest]}"
        yield {"task": body, "n": samples, "priority": priority, "idempotency_key": key}


def _rolled_out(run: str, groups: Sequence[GroupView], earlier: int) -> RolledOut:
    results = [session.result for group in groups for session in group.sessions if session.result]
    rewards = [
        [session.result.verdict.reward for session in group.sessions if session.result and session.result.verdict]
        for group in groups
    ]
    graded = [reward for of_group in rewards for reward in of_group]
    ungraded = [result for result in results if result.verdict is None]
    with_error = (each.id for group in groups for each in group.sessions if each.result and each.result.error)
    return RolledOut(
        run=run,
        groups=tuple(group.id for group in groups),
        earlier=earlier,
        sessions=sum(group.n for group in groups),
        graded=len(graded),
        mean_reward=fmean(graded) if graded else None,
        mixed=sum(len(set(of_group)) > 1 for of_group in rewards),
        failures=dict(Counter(each.error.code if each.error else each.stop_reason.value for each in ungraded)),
        failed=next(with_error, None),
        turns=sum(result.turns for result in results),
        sampled=sum(result.tokens.sampled for result in results),
        trained=sum(result.tokens.trained for result in results),
        after=min(group.cursor for group in groups if group.cursor is not None) - 1,
    )
