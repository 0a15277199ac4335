"""Makes batches of rollouts for a trainer, without the groups that teach nothing (the dynamic sampling of DAPO).

If all samples of a group have the same reward, every advantage is 0, and so is the gradient. The sampler drops such
groups and replaces them at once. All other groups are called informative. The sampler runs groups concurrently, and
returns a batch as soon as it has enough informative groups. If a group fails, its prompt (its task) is submitted again
a few times. Without this repetition, tasks whose sandboxes fail more often would be missing from the data.

    async with AsyncClient() as client, DynamicSampler(client, tasks, n=8, target=32) as sampler:
        async for batch in sampler:
            await sampler.set_version(train_on(batch))

Invariant: `state()` has every prompt that was taken from the source and is not delivered or dropped yet. Each drop is
counted in `Counts`.

`max_age` limits the age of tokens without dropping groups. The sampler submits only as many groups as the trainer can
train on before these groups are too old. It delivers the oldest groups first. A batch waits for slow groups that would
be too old for the next batch. If old groups were dropped instead, their prompts would be sampled again. Slow groups
would be dropped more often than fast groups, so the data would have too many fast groups.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

import msgspec

from outrider.client.client import LONG_POLL, check_known, patiently
from outrider.concurrency.events import Broadcast, wait_for_event
from outrider.errors import InvalidField, ServiceError
from outrider.lifecycle import GroupState
from outrider.schemas import GroupView, ResultsPage, ServiceStatus
from outrider.spec import TaskSpec
from outrider.trajectory import Sample

log = logging.getLogger("outrider.client.sampling")

T = TypeVar("T")
Task = TaskSpec | Mapping[str, Any]
Source = Sequence[Task] | Callable[[int], Task]
Refill = Literal["asynchronous", "synchronous", "static"]
Surplus = Literal["carry", "cancel"]
Overdue = Literal["wait", "train"]
Choice = bool | Literal["again"]
"""The decision about a finished group. True keeps the group. False drops its prompt. "again" submits its prompt
again."""

SAME = 1e-9
"""Two rewards count as equal if their difference is at most this number."""
FAILED_IN_A_ROW = 16
"""The sampler fails if the first groups of this many prompts fail in a row, with no graded group in between. The cause
then probably affects all prompts."""
HELD_SECONDS = 600.0
"""A warning is logged when a full batch has been held back for this many seconds. It is repeated each time the duration
has doubled."""
FRUITLESS_BATCHES = 20
"""The sampler fails if a batch is still not full after FRUITLESS_BATCHES times `target` graded groups. The tasks are
then too hard or too easy for the policy."""
SOURCES = (
    "give a sequence of tasks, or a function that returns the same task for the same number and raises IndexError after"
    " the last one"
)


class RolloutService(Protocol):
    """The methods of a service that the sampler calls. `client.AsyncClient` implements them."""

    async def submit(self, group: Mapping[str, Any]) -> GroupView: ...
    async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView: ...
    async def cancel(self, group_id: str) -> GroupView: ...
    async def results(
        self, *, after: int = 0, wait: float = 0.0, limit: int = 100, samples: bool = False
    ) -> ResultsPage: ...
    async def status(self) -> ServiceStatus: ...


class Counts(msgspec.Struct, kw_only=True):
    """The number of groups with each outcome since the previous batch. Every group is counted in `submitted`. When a
    group no longer runs or waits, it is also counted in exactly one of the outcomes. A group may be counted as
    submitted in one batch, and with its outcome in a later batch. The outcomes are `informative`, `uninformative`,
    `retried`, `given_up`, `stale` and `stopped`.

    informative: groups that were delivered in a batch.
    overdue: informative groups with a trained token older than `max_age`.
    uninformative: groups that teach nothing. Their prompts were dropped.
    retried, given_up: failed groups. In `retried`, the group's prompt was submitted again. In `given_up`, the prompt
        was dropped after the last retry.
    reasons: the groups in `retried` and `given_up`, by the most frequent error code of each group's sessions.
    stale: groups that are too old, because the version rose faster than expected. Their prompts are submitted again.
    stopped: groups that were cancelled by a user, or because their batch was full. Their prompts are submitted again.
    """

    submitted: int = 0
    informative: int = 0
    overdue: int = 0
    uninformative: int = 0
    retried: int = 0
    given_up: int = 0
    stale: int = 0
    stopped: int = 0
    reasons: dict[str, int] = {}

    def flat(self) -> dict[str, int]:
        """Return all counts by name. The counts in `reasons` get names of the form `reason_CODE`."""
        counts: dict[str, int] = msgspec.structs.asdict(self)
        del counts["reasons"]
        return counts | {f"reason_{code}": count for code, count in self.reasons.items()}


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one training step, with samples, in the order in which they finished. With `max_age`, groups of
    older versions come first.

    prompts: the number of each group's prompt.
    version: the policy version when the batch was delivered.
    waited: seconds for which the trainer waited for the batch.
    held: the part of `waited` in which the batch was full, but waited for slow groups that would become too old.
    counts: the outcomes of groups since the previous batch.
    """

    number: int
    groups: tuple[GroupView, ...]
    prompts: tuple[int, ...]
    version: int
    waited: float
    held: float
    counts: Counts

    @property
    def samples(self) -> list[Sample]:
        """The training rows of all groups."""
        return [sample for group in self.groups for sample in group.samples or ()]


class PendingPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that is neither delivered nor dropped yet.

    number: the number of the prompt.
    attempt: the number of its newest group.
    failures: how many of its groups have failed.
    version: the policy version under which the newest group was submitted, or None before the submission.
    """

    number: int
    attempt: int = 0
    failures: int = 0
    version: int | None = None


class SamplerState(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler's state between two batches, for a checkpoint. `delivered` is the number of delivered groups that the
    trainer has not trained on yet. Each time the version rises by one, `groups_per_version` groups count as trained."""

    run: str
    next: int
    pending: tuple[PendingPrompt, ...]
    version: int
    batches: int
    delivered: int = 0


class _Prompt(msgspec.Struct):
    """A prompt in progress. `version` is the policy version under which its group was submitted, or None before the
    submission.

    `protected` is True if the prompt was submitted before. The new group of such a prompt is not stopped when a batch
    is full. Without this protection, a slow task might be stopped again and again, and never be delivered.
    """

    number: int
    attempt: int = 0
    failures: int = 0
    version: int | None = None
    protected: bool = False
    stopping: Literal["stopped", "stale"] | None = None


class _Ready(msgspec.Struct, frozen=True):
    prompt: _Prompt
    group: GroupView


def rewards_of(group: GroupView) -> list[float]:
    """Return the rewards of the graded sessions, in sample order."""
    results = (session.result for session in group.sessions)
    return [result.verdict.reward for result in results if result is not None and result.verdict is not None]


def rewards_differ(group: GroupView) -> bool:
    """Return True if the rewards of the group's samples differ by more than SAME (the filter of DAPO)."""
    rewards = rewards_of(group)
    return max(rewards) - min(rewards) > SAME


def group_advantages(
    rewards: Sequence[float], kind: Literal["grpo", "mean", "leave_one_out"] = "grpo", *, epsilon: float = 1e-4
) -> list[float]:
    """Return the advantage of each sample of a group, for trainers that do not compute advantages.

    "grpo": (reward - mean) / (standard deviation + epsilon), with the population standard deviation.
    "mean": reward - mean (Dr. GRPO).
    "leave_one_out": reward - mean of the other samples' rewards (RLOO); 0 for a single sample.
    """
    mean = fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "grpo":
        scale = pstdev(rewards, mean) + epsilon
        return [value / scale for value in centred]
    if kind == "leave_one_out":
        others = len(rewards) - 1
        return [value * len(rewards) / others if others else 0.0 for value in centred]
    return centred


class DynamicSampler:
    """Yields batches of informative groups: `async with DynamicSampler(client, source, n=8, target=32) as sampler`.

    source: the tasks. A sequence is repeated without end. A function returns the task of prompt number 0, 1, 2, ... and
        raises IndexError after the last prompt. For the same number, it must return the same task.
    n: number of samples for each prompt.
    target: number of groups in a batch.
    inflight: number of groups that run at once, by default twice the target.
    informative: decides whether to keep a group, if at least two of its sessions were graded (one if `n` is 1). If
        `informative` returns "again", or if fewer sessions were graded, the prompt is submitted again.
    retries: how often a prompt is submitted again for one of these two reasons, before it is given up.
    refill: "asynchronous" replaces a group as soon as it is done. "synchronous" waits for all running groups before it
        submits `inflight` new groups, as DAPO did at first. "static" submits one batch, waits for all of its groups,
        and filters nothing. "synchronous" and "static" are for comparison.
    surplus: what happens to groups that still run when a batch is full. "carry" keeps them running for a later batch.
        "cancel" stops them, and submits nothing before the next batch is requested. The bias of "cancel" is described
        below.
    max_age: the maximum age of a trained token: the number of policy versions from the version that sampled the token
        to the version that is trained with it. None sets no limit. At most (`max_age` + 1) * `groups_per_version`
        groups run or wait for a batch, so that a finished group is never too old. With 0, nothing runs while the
        trainer trains.
    groups_per_version: the number of groups that the trainer trains on before it raises the version by one, by default
        `target`.
    overdue: what happens to running groups that the next version would make too old. "wait" holds a full batch back
        until these groups are done (`Batch.held`). "train" keeps them running and uses them when they are done. With
        "train", `max_age` limits only the number of groups, and tokens of slow groups may be older than `max_age`
        (`Counts.overdue`).
    min_usable, expires_seconds: fields of the submitted groups (`spec.GroupSpec`). With `min_usable` below `n`, the
        slowest sessions of a group are left out, which biases rewards that depend on the duration. If `n` is above 1,
        `min_usable` must be at least 2, because a group with one graded session is not kept.
    state: the `state()` of an earlier sampler, which this sampler continues. The new sampler finds the earlier groups
        by their idempotency keys. So groups that have finished meanwhile are used, and no group is delivered twice.

    With `surplus` "cancel", the prompt of a stopped group is submitted again before any new prompt. The prompt's new
    group is not stopped when a batch is full, so slow tasks are not left out. But slow groups are stopped more often
    than fast groups, and their prompts are then sampled again. So slow outcomes are rarer in the batches than among all
    rollouts. This biases the rewards.
    """

    def __init__(
        self,
        client: RolloutService,
        source: Source,
        *,
        n: int,
        target: int,
        inflight: int | None = None,
        informative: Callable[[GroupView], Choice] = rewards_differ,
        retries: int = 2,
        refill: Refill = "asynchronous",
        surplus: Surplus = "carry",
        max_age: int | None = None,
        overdue: Overdue = "wait",
        groups_per_version: int | None = None,
        priority: int = 0,
        min_usable: int | None = None,
        expires_seconds: float | None = None,
        state: SamplerState | None = None,
    ) -> None:
        inflight = 2 * target if inflight is None else inflight
        groups_per_version = target if groups_per_version is None else groups_per_version
        _check_at_least(1, n=n, target=target, inflight=inflight, groups_per_version=groups_per_version)
        _check_at_least(0, retries=retries, max_age=0 if max_age is None else max_age)
        _check_at_least(min(n, 2), min_usable=n if min_usable is None else min_usable)
        _check_one_of(Refill, refill=refill)
        _check_one_of(Surplus, surplus=surplus)
        _check_one_of(Overdue, overdue=overdue)
        self._client = client
        self._task = _task_by_number(source)
        self._n = n
        self._target = target
        self._inflight = target if refill == "static" else inflight
        self._informative = informative
        self._retries = retries
        self._refill = refill
        self._surplus = surplus
        self._max_age = max_age
        self._overdue = overdue
        self._groups_per_version = groups_per_version
        self._group_fields = {
            "n": n,
            "priority": priority,
            "min_usable": min_usable,
            "expires_seconds": expires_seconds,
        }
        state = state or SamplerState(run=secrets.token_hex(8), next=0, pending=(), version=0, batches=0)
        self._run = state.run
        self._next = state.next
        self._batches = state.batches
        # Prompts with the oldest versions are submitted first. Otherwise newer groups could fill a batch before the
        # sampler finds the older groups in the service.
        self._waiting = deque(
            _Prompt(each.number, each.attempt, each.failures, each.version, protected=True)
            for each in sorted(state.pending, key=lambda each: math.inf if each.version is None else each.version)
        )
        self._submitting: _Prompt | None = None
        self._early: dict[str, GroupView] = {}
        """Groups by id that finish while a submission waits for its reply. They are collected, because the submitted
        group may be one of them. Others may belong to other clients."""
        self._running: dict[str, _Prompt] = {}
        self._ready: deque[_Ready] = deque()
        self._version = state.version
        self._delivered = state.delivered
        """Number of delivered groups that the trainer has not trained on yet, judging by the calls of `set_version`."""
        self._counts = Counts()
        self._graded = 0
        self._rewards: list[float] = []
        """Rewards of the sessions of this batch's graded groups."""
        self._failed_in_a_row = 0
        self._last_failed = ("", "")
        """The id of the group that failed last, and the reason."""
        self._one_batch = asyncio.Lock()
        self._wanted = False
        self._resting = True
        """True while the sampler submits nothing. At first, this lasts until the first batch is requested. After
        `stop`, or after too many uninformative groups, it lasts until the next batch is requested."""
        self._exhausted = False
        self._is_open = False
        """True inside the `async with` block. Outside of it, `_failure` is not None."""
        self._failure: Exception | None = ServiceError(
            "the sampler is not open", hint="use it inside: async with DynamicSampler(...) as sampler"
        )
        self._changed = Broadcast()
        self._tasks = asyncio.TaskGroup()
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        cursor = (await patiently(self._client.status)).cursor
        await self._tasks.__aenter__()
        self._is_open, self._failure = True, None
        for work in (self._submit_prompts, partial(self._follow_results, cursor)):
            self._workers.append(self._tasks.create_task(self._guarded(work), name="sampler"))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop following the service's results. Running groups continue in the service, and a sampler that continues
        from `state()` finds them."""
        self._is_open = False
        self._end(ServiceError("the sampler was closed", hint="a new sampler continues from its state()"))
        for worker in self._workers:
            worker.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while (batch := await self.batch()) is not None:
            yield batch

    @property
    def version(self) -> int:
        """The policy version that the engines serve, as last recorded by `set_version`."""
        return self._version

    @property
    def counts(self) -> Counts:
        """The outcomes of groups since the previous batch. The outcomes after the last batch are only in this value,
        not in a batch."""
        return self._counts

    def state(self) -> SamplerState:
        """Return the state to store in a checkpoint after a training step. Batches that were delivered count as
        trained. Call this method on the sampler's event loop, because the state changes there all the time."""
        prompts = [ready.prompt for ready in self._ready]
        prompts += self._running.values()
        prompts += [self._submitting] if self._submitting else []
        prompts += self._waiting
        return SamplerState(
            run=self._run,
            next=self._next,
            # The prompt of a group that is being stopped gets a new group in the sampler that continues from this
            # state.
            pending=tuple(
                PendingPrompt(prompt.number, prompt.attempt, prompt.failures, prompt.version)
                if prompt.stopping is None
                else PendingPrompt(prompt.number, prompt.attempt + 1, prompt.failures)
                for prompt in prompts
            ),
            version=self._version,
            batches=self._batches,
            delivered=self._delivered,
        )

    async def batch(self) -> Batch | None:
        """Return the next batch, once it is full. When the source has ended, the last batch may have fewer groups.
        Returns None after the last batch. Concurrent calls get different batches.

        Raises ServiceError in these cases:
        - The service cannot be reached.
        - Groups keep failing (FAILED_IN_A_ROW).
        - Too few groups are informative (FRUITLESS_BATCHES).
        - The sampler is not open, or is stopped or closed during the call. In this case, a batch that is already full
          stays in `state()`.

        Also raises any error that a submission, the source or `informative` raises. No prompt is lost after an error or
        a cancellation.
        """
        began = _now()
        self._resting = False
        async with self._one_batch:
            self._graded, self._rewards = 0, []
            while True:
                held = await self._fill()
                if self._surplus == "cancel":
                    await self._stop([key for key, prompt in self._running.items() if not prompt.protected], "stopped")
                # meanwhile, `set_version` may have dropped groups, or the sampler may have been closed
                if (self._is_full() or self._has_ended()) and self._is_open:
                    break
            if not self._ready:
                if self._failed_in_a_row and not self._batches:
                    raise self._all_failed()
                return None
            return self._deliver(began, held)

    async def _fill(self) -> float:
        """Wait until a batch can be delivered. Returns the number of seconds for which the batch was full, but was held
        back for running groups of older versions."""
        full_since: float | None = None
        patience = HELD_SECONDS
        self._wanted = True
        self._changed.send()
        try:
            while not self._has_ended() or self._failure is not None:
                if not self._is_full():
                    full_since = None
                elif full_since is None:
                    full_since, patience = _now(), HELD_SECONDS
                if full_since is not None and not self._must_wait() and self._is_open:
                    break
                if self._failure is not None:
                    raise self._failure
                if self._resting:
                    raise ServiceError(
                        "the sampler was stopped while a batch was awaited", hint="call batch() again to go on"
                    )
                if full_since is None and self._graded >= FRUITLESS_BATCHES * self._target:
                    self._resting = True
                    raise self._fruitless()
                changed = self._changed.next()
                if full_since is None:
                    await changed.wait()
                else:
                    await wait_for_event(changed, full_since + patience - _now())
                if full_since is not None and _now() >= full_since + patience:
                    # `_running` is empty if the only slow group is still being submitted
                    slow = next(iter(self._running), "GROUP")
                    log.warning(
                        "a full batch is held for slow groups (%d run): outrider show %s", len(self._running), slow
                    )
                    patience *= 2
        finally:
            self._wanted = False
        return _now() - full_since if full_since is not None else 0.0

    def _is_full(self) -> bool:
        idle = not (self._running or self._submitting)
        return len(self._ready) >= self._target and (idle or self._refill != "static")

    def _has_ended(self) -> bool:
        """Return True if the source has ended and every prompt's group is ready, delivered or dropped."""
        return self._exhausted and not (self._running or self._submitting or self._waiting)

    def _deliver(self, began: float, held: float) -> Batch:
        taken = self._take()
        self._counts.informative += len(taken)
        self._delivered += len(taken)
        if self._max_age is not None:
            oldest = self._version - self._max_age
            self._counts.overdue += sum(_oldest_version(each.prompt, each.group) < oldest for each in taken)
        counts, self._counts = self._counts, Counts()
        self._batches += 1
        self._changed.send()
        return Batch(
            number=self._batches - 1,
            groups=tuple(each.group for each in taken),
            prompts=tuple(each.prompt.number for each in taken),
            version=self._version,
            waited=_now() - began,
            held=held,
            counts=counts,
        )

    async def stop(self) -> None:
        """Cancel all running groups, and submit no more until another batch is requested. A waiting call of `batch`
        raises ServiceError."""
        self._resting = True
        self._changed.send()
        await self._stop(list(self._running), "stopped")
        while self._submitting is not None:
            await self._changed.next().wait()
        await self._stop(list(self._running), "stopped")

    async def set_version(self, version: int) -> None:
        """Record that the engines now serve the policy version `version`. Groups that are now too old are stopped or
        dropped, and their prompts are submitted again."""
        if version < self._version:
            raise InvalidField(f"version {version} is older than {self._version}", field="version")
        self._delivered = max(0, self._delivered - (version - self._version) * self._groups_per_version)
        self._version = version
        ready, self._ready = self._ready, deque()
        for each in ready:
            if self._is_stale(each.prompt, each.group):
                self._submit_again(each.prompt, "stale")
            else:
                self._ready.append(each)
        self._changed.send()
        await self._stop([key for key, prompt in self._running.items() if self._is_stale(prompt)], "stale")

    def _take(self) -> list[_Ready]:
        """Remove the groups of the next batch from the ready groups, and return them. With `max_age`, groups of older
        versions are taken first."""
        ready = list(self._ready)
        if self._max_age is not None:
            ready.sort(key=lambda each: each.prompt.version or 0)
        self._ready = deque(ready[self._target :])
        return ready[: self._target]

    def _must_wait(self) -> bool:
        """Return True if a full batch must wait for running groups, because one of the running groups could be too old
        in a later batch."""
        if self._max_age is None or self._overdue == "train":
            return False
        running = [*self._running.values(), *([self._submitting] if self._submitting else [])]
        # After this batch, `left` more groups are delivered until the version has risen by `steps`. All groups with a
        # version below `oldest` must be among these `left` groups. If the trainer takes batches without raising the
        # version, `left` falls to 0, and a batch waits for all running groups.
        for steps in range(1, self._max_age + 2):
            oldest = self._version + steps - self._max_age
            left = max(0, steps * self._groups_per_version - self._delivered - self._target)
            late = sum((prompt.version or 0) < oldest for prompt in running)
            ready = sum((each.prompt.version or 0) < oldest for each in self._ready)
            if late and late + max(0, ready - self._target) > left:
                return True
        return False

    def _room(self) -> int:
        """Return the number of groups to submit now. A negative number means none."""
        running, ready = len(self._running), len(self._ready)
        if self._refill == "static":
            return self._target - running - ready if self._wanted else 0
        allowed = self._inflight
        if self._surplus == "cancel":
            # For each ready group, the batch needs one running group fewer. Any more running groups would be cancelled
            # when the batch is full.
            allowed = max(self._inflight - ready, min(self._inflight, self._target - ready))
        if self._max_age is not None:
            trainable = (self._max_age + 1) * self._groups_per_version - self._delivered
            trainable = max(trainable, self._target) if self._wanted else trainable
            allowed = min(allowed, trainable - ready)
        elif ready >= self._target:  # at most one batch is made while the trainer is busy
            allowed = 0
        if self._refill == "synchronous":
            return allowed if not running and self._wanted and ready < self._target else 0
        return allowed - running

    def _may_submit(self) -> bool:
        if self._resting or self._failure is not None or (self._exhausted and not self._waiting):
            return False
        return self._wanted or self._surplus != "cancel"

    async def _submit_prompts(self) -> None:
        while True:
            changed = self._changed.next()
            for _ in range(self._room()):
                if not self._may_submit():
                    break
                await self._submit(self._waiting.popleft() if self._waiting else _Prompt(self._next))
            await changed.wait()

    async def _submit(self, prompt: _Prompt) -> None:
        self._submitting = prompt
        try:
            try:
                task = self._task(prompt.number)
            except IndexError:
                self._exhausted = True
                return
            except StopIteration as error:
                raise InvalidField(
                    f"the source has raised StopIteration for the prompt {prompt.number}", field="source", hint=SOURCES
                ) from error
            self._next = max(self._next, prompt.number + 1)
            prompt.version = self._version if prompt.version is None else prompt.version
            group = await self._submit_group(prompt, task)
            # For this idempotency key, the service may return a group of an earlier sampler. If that group was
            # cancelled after `state()` was saved, the prompt needs a new group.
            while group.cancelled:
                prompt.attempt += 1
                prompt.version = self._version
                group = await self._submit_group(prompt, task)
            self._counts.submitted += 1
            self._running[group.id] = prompt
            group = self._early.get(group.id, group)
        except BaseException:  # includes a cancellation at the end of the block: `state()` must keep the prompt
            if prompt.number < self._next:
                self._waiting.appendleft(prompt)
            raise
        finally:
            self._submitting = None
            self._early.clear()
            self._changed.send()
        if group.state is GroupState.DONE:  # the group ended at once, or an earlier sampler had submitted it
            await self._settle(group)
        elif self._is_stale(prompt):  # the version has risen since the submission began
            await self._stop([group.id], "stale")
        elif self._surplus == "cancel" and not self._wanted and not prompt.protected:
            await self._stop([group.id], "stopped")

    async def _submit_group(self, prompt: _Prompt, task: Task) -> GroupView:
        body = {
            **self._group_fields,
            "task": task.model_dump(mode="json") if isinstance(task, TaskSpec) else task,
            "idempotency_key": f"{self._run}/{prompt.number}/{prompt.attempt}",
        }
        return await patiently(partial(self._client.submit, body))

    async def _follow_results(self, cursor: int) -> None:
        check_at = _now() + LONG_POLL
        while True:
            page = await patiently(partial(self._client.results, after=cursor, wait=LONG_POLL))
            for group in page.groups:
                await self._settle(group)
            cursor = page.cursor
            if self._running and _now() >= check_at:
                # Check the oldest group even if the page is not empty, because other clients' results may arrive all
                # the time.
                check_at = _now() + LONG_POLL
                oldest = await check_known(self._client.group, next(iter(self._running)))
                if oldest.id in self._running and oldest.cursor is not None:
                    # Go back to the group's result. If the service restarts without its old data, its cursors start
                    # from the beginning, and the cursor of the group's result may be lower than the sampler's cursor.
                    cursor = min(cursor, oldest.cursor - 1)

    async def _settle(self, group: GroupView) -> None:
        """Keep a finished group for a batch, or drop it. Depending on the reason, a dropped group's prompt is submitted
        again."""
        prompt = self._running.get(group.id)
        if prompt is None:  # another client's group, a group already handled, or a group being submitted
            if self._submitting is not None:
                self._early[group.id] = group
            return
        rewards = rewards_of(group)
        # Only `group.cancelled` shows whether the group was stopped. A group that the sampler has ordered to stop may
        # have ended earlier, and any other group may have been cancelled by a user or by an update of the policy.
        stopped = (prompt.stopping or "stopped") if group.cancelled else None
        choice: Choice = False
        if len(rewards) < min(self._n, 2):
            choice = "again"
        elif stopped is None:
            choice = self._refill == "static" or self._informative(group)
            choice = choice if choice == "again" else bool(choice)  # `informative` may return NumPy's bool
        kept = None
        if choice is True:
            kept = await patiently(partial(self._client.group, group.id, samples=True))
        if self._running.pop(group.id, None) is None:  # another call has handled the group meanwhile
            return
        if kept is not None and self._is_stale(prompt, kept):
            self._submit_again(prompt, "stale")
        elif kept is not None:
            prompt.stopping = None
            self._ready.append(_Ready(prompt, kept))
        elif stopped is not None:
            self._submit_again(prompt, stopped)
        elif choice == "again":
            self._note_failure(prompt, group)
        else:
            self._counts.uninformative += 1
        self._graded += bool(rewards)
        self._rewards += rewards
        self._failed_in_a_row = 0 if rewards else self._failed_in_a_row
        self._changed.send()

    def _note_failure(self, prompt: _Prompt, group: GroupView) -> None:
        """Submit the prompt of a failed group again, or give it up after the last retry."""
        errors = [session.result.error for session in group.sessions if session.result and session.result.error]
        why = errors[0].message if errors else "no session failed, but too few have a reward"
        codes = Counter(error.code for error in errors) or Counter(["no_reward"])
        [(code, _)] = codes.most_common(1)
        self._counts.reasons[code] = self._counts.reasons.get(code, 0) + 1
        if prompt.failures < self._retries:
            self._counts.retried += 1
            self._waiting.append(_Prompt(prompt.number, prompt.attempt + 1, prompt.failures + 1, protected=True))
            log.warning("group %s has failed and its prompt is submitted again: %s", group.id, why)
        else:
            self._counts.given_up += 1
            log.warning("group %s has failed and its prompt is given up: %s", group.id, why)
        self._failed_in_a_row += prompt.failures == 0
        self._last_failed = (group.id, why)
        if self._failed_in_a_row >= FAILED_IN_A_ROW:
            self._end(self._all_failed())

    def _all_failed(self) -> ServiceError:
        group_id, why = self._last_failed
        return ServiceError(
            f"{self._failed_in_a_row} prompts in a row have failed, the last one with: {why}",
            hint=f"look at it: outrider show {group_id}",
        )

    def _fruitless(self) -> ServiceError:
        stale = self._counts.stale
        return ServiceError(
            f"{self._graded} groups were graded for a batch of {self._target}, and {len(self._ready)} of them are"
            f" informative; the mean of their rewards is {fmean(self._rewards):.3g}"
            + (f", and {stale} of them were too old" if stale else ""),
            hint="the engines serve an older version than set_version() was given, or versions rise too fast"
            if stale > self._graded / 2
            else "the tasks are all too hard or too easy for the policy: change them, n or the filter",
        )

    def _submit_again(self, prompt: _Prompt, reason: Literal["stopped", "stale"]) -> None:
        setattr(self._counts, reason, getattr(self._counts, reason) + 1)
        self._waiting.append(_Prompt(prompt.number, prompt.attempt + 1, prompt.failures, protected=True))

    def _is_stale(self, prompt: _Prompt, group: GroupView | None = None) -> bool:
        """Return True if the prompt's group is too old. This happens only if another program raises the version, or if
        the version rises after fewer than `groups_per_version` groups."""
        if self._max_age is None or self._overdue == "train":
            return False
        return _oldest_version(prompt, group) < self._version - self._max_age

    async def _stop(self, group_ids: Iterable[str], reason: Literal["stopped", "stale"]) -> None:
        for group_id in group_ids:
            prompt = self._running.get(group_id)
            if prompt is not None and prompt.stopping is None:
                prompt.stopping = reason
                try:
                    await patiently(partial(self._client.cancel, group_id))
                except BaseException:  # the group may still run, so a later call must stop it
                    prompt.stopping = None
                    raise

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run background work. If it fails, store the error for `batch` to raise."""
        try:
            await work()
        except Exception as error:  # any error, because the trainer would otherwise wait forever
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Submit no more groups, and make `batch` raise `error`, unless there is an earlier error."""
        self._failure = self._failure or error
        self._changed.send()


def _oldest_version(prompt: _Prompt, group: GroupView | None = None) -> int:
    """Return the lowest policy version of the tokens in the group's samples. Without samples, return the version under
    which the group was submitted."""
    samples = (group.samples if group is not None else None) or ()
    return min((sample.min_version for sample in samples if sample.min_version >= 0), default=prompt.version or 0)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _task_by_number(source: Source) -> Callable[[int], Task]:
    """Return a function that returns the task for a prompt's number. Raises InvalidField if `source` is neither a
    sequence nor a function."""
    if callable(source):
        return source
    if isinstance(source, Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise InvalidField(f"the tasks are given as {type(source).__name__}", field="source", hint=SOURCES)
    if not len(source):
        raise InvalidField("there are no tasks", field="source", hint="give at least one task")
    return lambda number: source[number % len(source)]


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise InvalidField(f"{name} is {value}; it must be at least {least}", field=name)


def _check_one_of(kind: Any, **values: str) -> None:
    for name, value in values.items():
        if value not in get_args(kind):
            raise InvalidField(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}", field=name)
