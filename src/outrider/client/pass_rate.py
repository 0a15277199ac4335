"""Evaluates a policy on the same tasks with the same seeds each time. Groups for training can run at the same time.

    if step % 20 == 0:
        found = await evaluate(client, held_out, samples=4, seed=0)
        print(found.reward.mean, found.reward.pass_at[4], found.failures)

Invariant: a session that was not graded is counted in `failures` and in no mean.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

import msgspec

from outrider.client.client import AsyncClient, Watch, patiently
from outrider.client.estimates import bootstrap_interval, pass_at
from outrider.concurrency.cancellation import shielded
from outrider.errors import InvalidField, OutriderError, ServiceError
from outrider.schemas import GroupView
from outrider.spec import EVALUATION_LABEL, TaskSpec

PRIORITY = 100
"""The default priority of an evaluation's groups. It is higher than the priority of training groups, because a trainer
may wait for the result."""
LARGEST_SEED = (1 << 63) - 1
SUBMISSION_GRACE = 5.0
"""How long a cancelled evaluation waits for the reply to its last submission, in seconds. Without the reply, it does
not know the id of the group, and so cannot cancel it."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the reward or of a metric.

    mean: the mean of the tasks' means, with equal weights. A task's mean is over its graded samples.
    standard_error: the standard error of `mean`, from the spread between tasks. None with fewer than two tasks.
    interval: the 95 % confidence interval of `mean`, by bootstrap over tasks (RESAMPLES resamples from a fixed seed).
        None with fewer than two tasks.
    pass_at: for each k, the unbiased estimate of the probability that at least one of k samples of a task passes (Chen
        et al. 2021, section 2.1). It is the mean over the tasks with at least k graded samples.
    tasks, samples: the numbers of tasks and samples with a value.
    """

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    pass_at: dict[int, float]
    tasks: int
    samples: int


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation.

    failures: number of ungraded sessions by error code, or by stop reason if they have no error.
    versions: the policy versions before and after the evaluation.
    groups: the groups without their samples, in the order of the tasks.
    """

    name: str
    reward: Score
    metrics: dict[str, Score]
    graded: int
    failures: dict[str, int]
    versions: tuple[int, int]
    seconds: float
    groups: tuple[GroupView, ...]

    def figures(self) -> dict[str, float]:
        """Return the statistics for a logger of training metrics. The keys are names such as
        `evaluation/reward/pass@4`."""
        found: dict[str, float] = {}
        for name, score in {"reward": self.reward, **self.metrics}.items():
            found[f"{name}/mean"] = score.mean
            if score.standard_error is not None:
                found[f"{name}/standard_error"] = score.standard_error
            found |= {f"{name}/pass@{k}": value for k, value in score.pass_at.items()}
        found |= {"graded": float(self.graded), "failed": float(sum(self.failures.values()))}
        return {f"{self.name}/{key}": value for key, value in found.items()}


async def evaluate(
    client: AsyncClient,
    tasks: Sequence[TaskSpec | Mapping[str, Any]],
    *,
    samples: int = 1,
    seed: int | None = 0,
    priority: int = PRIORITY,
    policy_version: int | None = None,
    passed: float = 1.0,
    name: str = "evaluation",
    run: str | None = None,
    watch: Watch | None = None,
) -> Evaluation:
    """Run `samples` sessions of each task, and wait for all of them.

    seed: task i gets the seed `seed` + i in place of the task's own seed, so that a deterministic engine samples the
        same tokens in every evaluation. If None, the tasks keep their own seeds.
    policy_version: if given, the version that the policy must have from the beginning to the end.
    passed: a sample passes if its reward, or the value of a metric, is at least this number.
    name: the value of the label `outrider.evaluation` that the groups get.
    run: a name for the evaluation. Groups already submitted under this name are used, so the same call after an
        interruption submits only the missing groups.
    watch: see `AsyncClient.wait`.

    Raises InvalidField if the service refuses a task or the policy does not have `policy_version`. Raises Conflict if
    `run` was used with other tasks, and Busy if the service stays busy. Raises ServiceError if the service cannot be
    reached, the policy no longer has `policy_version` at the end, or no session was graded. After an error, running
    groups are cancelled, unless `run` is given or the service cannot be reached.
    """
    if not tasks or samples < 1:
        raise InvalidField("an evaluation needs a task and a sample", field="samples" if tasks else "tasks")
    began = asyncio.get_running_loop().time()
    before = (await patiently(client.policy)).version
    if policy_version not in (None, before):
        raise InvalidField(
            f"the policy has version {before}, not {policy_version}",
            field="policy_version",
            hint="evaluate when update_policy has returned",
        )
    key = run or secrets.token_hex(8)
    ids: list[str] = []

    async def submit(body: dict[str, Any]) -> None:
        ids.append((await patiently(partial(client.submit, body))).id)

    try:
        for number, task in enumerate(tasks):
            body = {
                "task": evaluation_task(task, name, seed=None if seed is None else (seed + number) % LARGEST_SEED),
                "n": samples,
                "priority": priority,
                "idempotency_key": f"evaluation/{key}/{number}",
            }
            await shielded(partial(submit, body), grace=SUBMISSION_GRACE)
        groups = await patiently(partial(client.wait, ids, watch))
    except BaseException:
        if run is None:
            await _cancel(client, ids)
        raise
    after = (await patiently(client.policy)).version
    if policy_version not in (None, after):
        raise ServiceError(
            f"the policy changed from version {before} to {after} while it was evaluated",
            hint="hold the trainer's updates back until the evaluation is done, or leave policy_version out",
        )
    seconds = asyncio.get_running_loop().time() - began
    return _evaluation(name, groups, samples, passed, (before, after), seconds)


async def _cancel(client: AsyncClient, group_ids: Sequence[str]) -> None:
    """Cancel groups. Errors are ignored, because the error that ended the evaluation is raised. After a ServiceError,
    the other groups are not cancelled: each call would wait for the service once more."""
    for group_id in group_ids:
        try:
            await shielded(partial(client.cancel, group_id))
        except ServiceError:
            return
        except OutriderError:  # for example, the group was removed meanwhile
            continue


def evaluation_task(
    task: TaskSpec | Mapping[str, Any], name: str = "evaluation", *, seed: int | None = None
) -> dict[str, Any]:
    """Return the task's fields with the label that marks evaluations. Exports for training skip groups with this
    label."""
    body = task.model_dump(mode="json") if isinstance(task, TaskSpec) else dict(task)
    body["labels"] = {**(body.get("labels") or {}), EVALUATION_LABEL: name}
    if seed is not None:
        body["sampling"] = {**(body.get("sampling") or {}), "seed": seed}
    return body


def _evaluation(
    name: str,
    groups: Sequence[GroupView],
    samples: int,
    passed: float,
    versions: tuple[int, int],
    seconds: float,
) -> Evaluation:
    results = [[session.result for session in group.sessions if session.result] for group in groups]
    verdicts = [[result.verdict for result in of_task if result.verdict] for of_task in results]
    ungraded = [result for of_task in results for result in of_task if result.verdict is None]
    failures = Counter(result.error.code if result.error else result.stop_reason.value for result in ungraded)
    if not any(verdicts):
        why = next((result.error.message for result in ungraded if result.error), "see the failures' stop reasons")
        counts = ", ".join(f"{count} {reason}" for reason, count in failures.items())
        raise ServiceError(f"none of the {len(ungraded)} sessions of the evaluation was graded ({counts}): {why}")
    names = sorted({metric for of_task in verdicts for verdict in of_task for metric in verdict.metrics})
    return Evaluation(
        name=name,
        reward=_score([[verdict.reward for verdict in of_task] for of_task in verdicts], samples, passed),
        metrics={
            metric: _score(
                [[verdict.metrics[metric] for verdict in of_task if metric in verdict.metrics] for of_task in verdicts],
                samples,
                passed,
            )
            for metric in names
        },
        graded=sum(map(len, verdicts)),
        failures=dict(failures),
        versions=versions,
        seconds=seconds,
        groups=tuple(groups),
    )


def _score(values: Sequence[Sequence[float]], samples: int, passed: float) -> Score:
    """Compute the statistics of the reward or of one metric. `values` has a list of values for each task. At least one
    of these lists must not be empty."""
    graded = [of_task for of_task in values if of_task]
    means = [fmean(of_task) for of_task in graded]
    chances: dict[int, float] = {}
    for k in sorted({samples, *(1 << power for power in range(samples.bit_length()))}):
        if full := [of_task for of_task in graded if len(of_task) >= k]:
            chances[k] = fmean(pass_at(k, sum(value >= passed for value in of_task), len(of_task)) for of_task in full)
    return Score(
        mean=fmean(means),
        standard_error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        interval=bootstrap_interval(means),
        pass_at=chances,
        tasks=len(graded),
        samples=sum(map(len, graded)),
    )
