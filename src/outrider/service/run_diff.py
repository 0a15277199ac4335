"""Compares two runs task by task. A run is a list of sessions. The module uses neither the store nor a clock.

Invariant: a session without a reward is a failure with a cause, and does not count in a mean reward or in pass@k.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

from outrider.client.estimates import difference_interval, mean_interval, pass_at
from outrider.lifecycle import SessionState
from outrider.schemas import Estimate, Flip, RunDiff, RunSide
from outrider.store.run_index.lists import ComparedSession

MAX_FLIPS = 200
"""Maximum number of flips in a reply. A flip is a pair of sessions of which only one is solved."""

Rewards = Mapping[str, Sequence[float]]
"""For each task, the rewards of its graded sessions."""


def compare(
    a: Sequence[ComparedSession], b: Sequence[ComparedSession], *, names: tuple[str, str], passed: float = 1.0
) -> RunDiff:
    """Compare two runs. `a` and `b` are the sessions of the runs, in the order in which they were submitted. A session
    is solved if its reward is at least `passed`. `names` are the runs' selectors."""
    rewards = _rewards(a), _rewards(b)
    common = [task for task in rewards[0] if task in rewards[1]]
    flips = _flips(a, b, passed)
    return RunDiff(
        a=_side(names[0], a, rewards[0], passed),
        b=_side(names[1], b, rewards[1], passed),
        passed=passed,
        paired=len(common),
        reward=_difference(rewards, common, fmean),
        pass_at={
            k: found
            for k in _ks(*rewards)
            if (found := _difference(rewards, common, partial(_chance, k=k, passed=passed))) is not None
        },
        gained=sum(flip.b_reward >= passed for flip in flips),
        lost=sum(flip.a_reward >= passed for flip in flips),
        flips=tuple(flips[:MAX_FLIPS]),
    )


def _side(name: str, runs: Sequence[ComparedSession], rewards: Rewards, passed: float) -> RunSide:
    done = [run for run in runs if run.state == SessionState.DONE]
    graded = [run for run in done if run.reward is not None]
    failures = Counter(run.error_code or run.stop_reason or "unknown" for run in done if run.reward is None)
    chances: dict[int, Estimate] = {}
    for k in _ks(rewards):
        found = [chance for of_task in rewards.values() if (chance := _chance(of_task, k=k, passed=passed)) is not None]
        if found:
            chances[k] = _estimate(found)
    return RunSide(
        selector=name,
        groups=len({run.group_id for run in runs}),
        sessions=len(runs),
        done=len(done),
        graded=len(graded),
        tasks=len({_task(run) for run in runs}),
        solved=sum(run.reward is not None and run.reward >= passed for run in graded),
        reward=_estimate([fmean(of_task) for of_task in rewards.values()]) if rewards else None,
        pass_at=chances,
        turns=_mean(run.turns for run in done),
        tokens_sampled=_mean(run.tokens_sampled for run in done),
        tokens_trained=_mean(run.tokens_trained for run in done),
        seconds=_mean(run.seconds for run in done),
        model_seconds=_mean(run.model_seconds for run in done),
        failures=dict(failures.most_common()),
    )


def _task(run: ComparedSession) -> str:
    """Return the name of a session's task. If the name is unknown, the session's group counts as a separate task."""
    return run.task or f"group {run.group_id}"


def _rewards(runs: Sequence[ComparedSession]) -> dict[str, list[float]]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.reward is not None:
            found[_task(run)].append(run.reward)
    return dict(found)


def _ks(*sides: Rewards) -> list[int]:
    """Return the numbers k for which pass@k is computed: the powers of two up to the largest number of graded sessions
    of any task, and this largest number itself."""
    most = max((len(of_task) for rewards in sides for of_task in rewards.values()), default=0)
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def _chance(rewards: Sequence[float], *, k: int, passed: float) -> float | None:
    """Return pass@k of a task, or None if the task has fewer than k graded sessions."""
    if len(rewards) < k:
        return None
    return pass_at(k, sum(reward >= passed for reward in rewards), len(rewards))


def _difference(
    rewards: tuple[Rewards, Rewards], common: Sequence[str], figure: Callable[[Sequence[float]], float | None]
) -> Estimate | None:
    """Return how much `figure`, such as the mean reward, differs between two runs. Tasks that only one run has are
    ignored, unless the runs have no task in common."""
    if common:
        pairs = [(figure(rewards[0][task]), figure(rewards[1][task])) for task in common]
        gains = [second - first for first, second in pairs if first is not None and second is not None]
        return _estimate(gains) if gains else None
    first, second = [[value for of_task in side.values() if (value := figure(of_task)) is not None] for side in rewards]
    if not first or not second:
        return None
    low, high = difference_interval(first, second) or (None, None)
    return Estimate(value=fmean(second) - fmean(first), low=low, high=high)


def _flips(a: Sequence[ComparedSession], b: Sequence[ComparedSession], passed: float) -> list[Flip]:
    """Return the pairs of graded sessions of which only one is solved. The nth session of a task in `a` is paired with
    its nth session in `b`. Pairs whose session in `a` is solved come first."""
    first, second = _places(a), _places(b)
    found = []
    for place, run in first.items():
        other = second.get(place)
        if other is None or run.reward is None or other.reward is None:
            continue
        if (run.reward >= passed) != (other.reward >= passed):
            task, sample = place
            found.append(
                Flip(task=task, sample=sample, a=run.id, b=other.id, a_reward=run.reward, b_reward=other.reward)
            )
    return sorted(found, key=lambda flip: (flip.a_reward < passed, flip.task, flip.sample))


def _places(runs: Sequence[ComparedSession]) -> dict[tuple[str, int], ComparedSession]:
    """Return the sessions by task and number. The sessions of a task are numbered from 0 in the order of their
    submission."""
    counts: Counter[str] = Counter()
    found = {}
    for run in runs:
        task = _task(run)
        found[task, counts[task]] = run
        counts[task] += 1
    return found


def _estimate(values: Sequence[float]) -> Estimate:
    low, high = mean_interval(values) or (None, None)
    return Estimate(value=fmean(values), low=low, high=high)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
