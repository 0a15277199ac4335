"""The evaluator of Harbor tasks: runs the task's test.sh in the sandbox and reads the rewards that test.sh writes.

The tests are in the evaluator's options, which agents cannot read. The rules are Harbor's:

- After the agent has ended, old rewards are removed and the tests are written.
- The exit code of test.sh does not matter.
- reward.json takes precedence over reward.txt. If neither exists, that is an error.

Invariant: every reward is a finite number.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from outrider.errors import EvaluatorError, RuntimeFailure
from outrider.evaluators.base import Outcome, not_kept
from outrider.evaluators.options import read_options
from outrider.evaluators.verdict import finite
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.spec import EnvName, EnvValue, EvaluatorSpec, SandboxPath, Spec, Text, Write
from outrider.trajectory import Verdict

LOGS = "/logs/verifier"
OUTPUT = f"{LOGS}/test-stdout.txt"
REWARD_JSON, REWARD_TEXT = f"{LOGS}/reward.json", f"{LOGS}/reward.txt"
TEST = "/tests/test.sh"
REWARD = "reward"
"""Key of the reward in reward.json, if this file has several values."""
MAX_REWARDS = 1 << 20
"""Maximum bytes of reward.json or reward.txt."""
STEP_SECONDS = 60.0
"""Time limit in seconds of every command except test.sh."""
BEFORE = f"rm -rf {REWARD_JSON} {REWARD_TEXT} {OUTPUT} && mkdir -p {LOGS}"
CLEAR = "mkdir -p /tests && find /tests -mindepth 1 -delete"
RUN = f"chmod +x {TEST} && ({TEST}) > {OUTPUT} 2>&1"
WHOLE = f"test -f {OUTPUT} && cat {OUTPUT}"
TAIL = f"tail -c 4000 {OUTPUT}"


class Without(Spec):
    """Files to remove from a folder in `evaluator.carry` before the tests run. `patterns` are written as for tar's
    --exclude."""

    folder: SandboxPath
    patterns: list[Text]


class HarborOptions(Spec):
    """Options of kind `harbor`.

    tests: the test files, in the form of the prepare step `write`.
    alone: true to empty the folder /tests before the test files are written to it.
    env: environment variables of test.sh.
    without: files to remove from folders in `evaluator.carry`.
    mean: true if the reward is the mean of all values, limited to the range from 0 to 1."""

    tests: Annotated[list[Write], Field(max_length=2048)] = Field(default_factory=list)
    alone: bool = False
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    without: list[Without] = Field(default_factory=list)
    mean: bool = False


class HarborEvaluator:
    """Runs test.sh (see `HarborOptions`). The values that test.sh writes become the metrics. The reward is the value
    named `reward`, or the only value. With the option `mean`, the reward is the mean of all values."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = read_options(HarborOptions, spec)
        self._seconds = spec.seconds

    async def evaluate(self, outcome: Outcome) -> Verdict:
        for one in self._options.without:
            await leave_out(outcome.runtime, one.folder, one.patterns)
        if self._options.alone:  # an agent may have written files there
            done = await outcome.runtime.exec(CLEAR, seconds=STEP_SECONDS)
            if done.exit_code != 0:
                raise EvaluatorError("/tests cannot be cleared", log_tail=done.log_tail(), inside=True)
        tests, env = self._options.tests, self._options.env
        rewards = await verify(outcome.runtime, tests, env, seconds=self._seconds, log=outcome.log)
        return mean_verdict(rewards) if self._options.mean else verdict_of(rewards)


async def verify(
    runtime: Runtime,
    tests: Sequence[Write],
    env: Mapping[str, str],
    *,
    seconds: float,
    log: Callable[[bytes], None] = not_kept,
) -> dict[str, float]:
    """Run test.sh, pass its output to `log`, and return its rewards by name. Raises EvaluatorError if the rewards are
    not valid."""
    done = await runtime.exec(BEFORE, seconds=STEP_SECONDS)
    if done.exit_code != 0:
        raise EvaluatorError(f"{LOGS} cannot be made ready", log_tail=done.log_tail(), inside=True)
    if tests:  # an agent may have put something here that cannot be overwritten
        await runtime.exec(["rm", "-rf", "--", *(file.to for file in tests)], seconds=STEP_SECONDS)
    for file in tests:
        await runtime.write(file.to, file.data(), executable=file.executable)
    done = await runtime.exec(RUN, env=env, seconds=seconds)
    with suppress(RuntimeFailure):  # the rewards may be readable even without this output; if not, reading them raises
        log((await runtime.exec(WHOLE, seconds=STEP_SECONDS)).stdout)
    if done.exit_code is None:
        raise EvaluatorError(f"test.sh did not end within {seconds:g} s", log_tail=await output(runtime, done))
    for path, parse in ((REWARD_JSON, parse_json), (REWARD_TEXT, parse_text)):
        try:
            text = await runtime.read(path, limit=MAX_REWARDS)
        except FileNotFoundError:
            continue
        except IsADirectoryError as error:
            raise await failure(runtime, done, f"{path} is a folder") from error
        except RuntimeFailure as error:  # the file is too large or is a pipe; in a broken sandbox, `failure` raises
            raise await failure(runtime, done, f"{path} cannot be read: {error.message}") from error
        try:
            return parse(text)
        except ValueError as error:
            raise await failure(runtime, done, f"{path} is no rewards: {error}") from error
    raise await failure(runtime, done, f"test.sh wrote neither {REWARD_JSON} nor {REWARD_TEXT}")


async def failure(runtime: Runtime, done: ExecResult, message: str) -> EvaluatorError:
    """Return the error for rewards that cannot be read. The error has `inside=True`, because an agent that used the
    same sandbox may be the cause."""
    return EvaluatorError(message, log_tail=await output(runtime, done), inside=True)


async def output(runtime: Runtime, done: ExecResult) -> str:
    """Return the end of test.sh's output, then the log tail of `done`, the command that ran it."""
    tail = await runtime.exec(TAIL, seconds=STEP_SECONDS)
    return "\n".join(filter(None, (tail.log_tail() if tail.exit_code == 0 else "", done.log_tail())))


async def leave_out(runtime: Runtime, folder: str, patterns: Sequence[str]) -> None:
    """In a folder, remove each path whose end matches a pattern. `*` also matches slashes, as in tar. Does nothing if
    the folder cannot be entered. Raises EvaluatorError if a path cannot be removed."""
    words = [word for pattern in patterns for word in ("-o", "-path", f"*/{pattern.rstrip('/')}")][1:]
    found = shlex.join(["find", ".", "-mindepth", "1", "-depth", "(", *words, ")", "-exec", "rm", "-rf", "{}", "+"])
    done = await runtime.exec(f"cd {shlex.quote(folder)} 2> /dev/null || exit 0; {found}", seconds=STEP_SECONDS)
    if done.exit_code != 0:
        raise EvaluatorError(f"the excluded files in {folder} cannot be removed", log_tail=done.log_tail(), inside=True)


def parse_json(text: bytes) -> dict[str, float]:
    """Return the values in reward.json by name. Raises ValueError."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not an object of numbers")
    return {name: number(value, name) for name, value in values.items()}


def parse_text(text: bytes) -> dict[str, float]:
    """Return the number in reward.txt, under the name `reward`. Raises ValueError."""
    return {REWARD: number(float(text.decode()), REWARD)}


def number(value: Any, name: str) -> float:
    """Return the value as a finite float. True and False count as 1 and 0, as in Harbor. Raises ValueError."""
    return finite(int(value) if isinstance(value, bool) else value, repr(name))


def verdict_of(rewards: Mapping[str, float]) -> Verdict:
    """Return a verdict whose reward is the value named `reward` or the only value. Raises EvaluatorError if there is
    neither."""
    if REWARD not in rewards and len(rewards) != 1:
        named = ", ".join(map(repr, sorted(rewards))) or "nothing"
        raise EvaluatorError(
            f"the tests reward {named}, and none of it is {REWARD!r}", hint=f"have test.sh write {REWARD!r} as well"
        )
    reward = rewards[REWARD] if REWARD in rewards else next(iter(rewards.values()))
    return Verdict(reward=reward, metrics=dict(rewards))


def mean_verdict(rewards: Mapping[str, float]) -> Verdict:
    """Return a verdict whose reward is the mean of the values, limited to the range from 0 to 1. Raises EvaluatorError
    if there are no values."""
    if not rewards:
        raise EvaluatorError("the tests reward nothing", hint="have test.sh write at least one number")
    return Verdict(reward=min(1.0, max(0.0, fmean(rewards.values()))), metrics=dict(rewards))
