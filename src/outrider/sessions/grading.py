"""Where an attempt's outcome is graded: in the agent's sandbox, or in a new one that no agent has touched.

A new one is given the paths that the task carries, and is started while the agent runs if there is room for both; or
it starts from everything that was written. It knows no lane of the session's own and no token. Invariant: when files
are carried, the evaluator begins after the agent's sandbox has been stopped; every sandbox begun here is stopped,
whatever happens; and two are alive at once only while there is room set aside for the second.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.errors import EvaluatorError, OutriderError, RuntimeFailure
from outrider.evaluators.base import Evaluator, Outcome
from outrider.evaluators.verdict import read_verdict
from outrider.plugins import contained
from outrider.runtimes.base import LOG_TAIL, Layered, Runtime
from outrider.sandboxes.node_folder import remove_tree
from outrider.sandboxes.sandbox import Sandbox
from outrider.sessions.blame import blamed, excess_verdict, try_out
from outrider.sessions.shares import Slot
from outrider.sessions.slots import Lane
from outrider.spec import TaskSpec
from outrider.trajectory import Verdict

log = logging.getLogger("outrider.session")

CARRIED = "carried"
BLAMED_AFTER = 2
"""Failed tries, at least, for which an agent can be blamed: a grader that fails now and then seldom does so twice."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What grading needs of its node. `sandbox` makes the n-th new sandbox of the attempt, from a layer if there is
    one; `second` sets aside what a sandbox beside the agent's takes, if it is free; `starts` bounds how many are
    started at once, apart from those for agents; `folder` is the attempt's own, to be made and removed here; `owner`
    has the tasks."""

    sandbox: Callable[[int, Path | None], Sandbox]
    second: Callable[[], Slot | None]
    starts: Lane
    priority: int
    folder: Path
    owner: asyncio.TaskGroup


class Grading:
    """`begin` when the agent's run begins, `carry` when it has ended, `verdict` then, `confirm` when that fails, and
    `close` in any case."""

    def __init__(self, task: TaskSpec, evaluator: Evaluator, bench: Bench) -> None:
        self._task = task
        self._evaluator = evaluator
        self._bench = bench
        self._carry = task.evaluator.carry
        self._layer: Path | None = None
        self._second: Slot | None = None
        self._ahead: Fresh | None = None
        self._fresh: list[Fresh] = []

    @property
    def carries(self) -> bool:
        """Whether the agent's sandbox is to be stopped before `verdict`, after `carry`."""
        return self._carry is not None

    def begin(self) -> None:
        """Start the new sandbox, if it needs nothing of the agent's to be started, and there is room beside that."""
        if isinstance(self._carry, list) and (second := self._bench.second()) is not None:
            self._second = second
            self._ahead = self._start()

    async def carry(self, runtime: Runtime) -> None:
        """Take what is graded out of the agent's sandbox. Raises RuntimeFailure."""
        await asyncio.to_thread(self._bench.folder.mkdir, mode=0o700)
        file = self._bench.folder / CARRIED
        if isinstance(self._carry, list):
            await runtime.snapshot(self._carry, file, alone=True)
        else:
            await cast(Layered, runtime).save_layer(file)
            self._layer = file

    async def verdict(self, outcome: Outcome) -> Verdict:
        """Evaluate, again on failure, up to the task's attempts, or until it has failed often enough to blame the agent
        for it: the agent's work is not thrown away. What was carried is evaluated in another new sandbox each time, so
        that its failure too is worth another try."""
        self._one_is_left()
        failure: OutriderError = EvaluatorError("not evaluated")
        tries = 0
        while tries < self._task.max_attempts or (failure.inside and tries < BLAMED_AFTER):
            tries += 1
            try:
                async with self._place(outcome.runtime) as runtime:
                    return await self._evaluated(msgspec.structs.replace(outcome, runtime=runtime))
            except EvaluatorError as error:
                failure = error
            except RuntimeFailure as error:
                if not (self.carries and error.retryable):
                    raise
                failure = error
        raise failure

    async def confirm(self, failure: OutriderError, outcome: Outcome) -> Verdict:
        """The verdict on an agent that cannot be graded for a failure that came from inside its sandbox, which has been
        stopped since. Raises `failure` where a sandbox that no agent has touched fails too; in the evaluation of
        `outcome`, only if it was the evaluator that had failed. It pays no better than to have done nothing."""
        self._layer = None
        reward = 0.0
        fresh = await self._taken_ahead() or self._start()
        try:
            runtime = await fresh.ready()
            await try_out(runtime, failure)
            untouched = await self._evaluated(msgspec.structs.replace(outcome, runtime=runtime))
            reward = min(reward, untouched.reward)
        except EvaluatorError as error:
            if isinstance(failure, EvaluatorError):
                raise failure from error
        except Exception as error:  # a plugin may raise anything
            raise failure from error
        finally:
            await shielded(fresh.close)
        return excess_verdict(failure, reward)

    async def close(self) -> None:
        """Stop what is left of new sandboxes, and remove what was carried."""
        await shielded(self._close)

    async def _close(self) -> None:
        """Whatever one part of it raises, the others are done."""
        async with AsyncExitStack() as undo:
            if self.carries:
                undo.push_async_callback(asyncio.to_thread, remove_tree, self._bench.folder)
            undo.callback(self._one_is_left)
            for fresh in self._fresh:
                undo.push_async_callback(fresh.close)

    def _one_is_left(self) -> None:
        """Of the session's sandboxes; it has the session's own share of the room."""
        if self._second is not None:
            self._second.release()

    @asynccontextmanager
    async def _place(self, agents: Runtime) -> AsyncIterator[Runtime]:
        if not self.carries:
            async with blamed(agents):
                yield agents
            return
        fresh = await self._taken_ahead() or self._start()
        try:
            runtime = await fresh.ready()
            async with blamed(runtime):
                if isinstance(self._carry, list):
                    await runtime.restore(self._bench.folder / CARRIED, self._carry)
                yield runtime
        finally:
            await shielded(fresh.close)

    async def _taken_ahead(self) -> Fresh | None:
        """The sandbox that was started while the agent ran, if that went well; if not, it is worth another try."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        try:
            await ahead.ready()
        except RuntimeFailure as error:
            log.warning("%s: a sandbox for grading failed, and is started again: %s", self._bench.folder.name, error)
            await shielded(ahead.close)
            return None
        return ahead

    async def _evaluated(self, outcome: Outcome) -> Verdict:
        """One try. Raises EvaluatorError, and what else of ours the evaluator raises."""
        seconds = self._task.evaluator.seconds
        try:
            async with asyncio.timeout(seconds):
                with contained():
                    verdict = await self._evaluator.evaluate(outcome)
        except TimeoutError as error:
            raise EvaluatorError(f"evaluation took longer than {seconds:g} s") from error
        except OutriderError:
            raise
        except Exception as error:  # a plugin may raise anything
            raise EvaluatorError(
                f"the evaluator raised {type(error).__name__}: {error}", log_tail=end_of(error)
            ) from error
        try:
            return read_verdict(verdict)
        except ValueError as error:
            raise EvaluatorError(f"the evaluator returned no verdict: {error}") from error

    def _start(self) -> Fresh:
        fresh = Fresh(self._bench, len(self._fresh), self._layer, self._task.limits.session_seconds)
        self._fresh.append(fresh)
        return fresh


class Fresh:
    """A new sandbox, made ready by a task of its own from the moment that this is constructed."""

    def __init__(self, bench: Bench, number: int, layer: Path | None, seconds: float) -> None:
        self._bench = bench
        self._number = number
        self._layer = layer
        self._seconds = seconds
        self._sandbox: Sandbox | None = None
        self._failure: Exception | None = None
        self._task = bench.owner.create_task(self._start(), name="start a sandbox for an evaluation")

    async def ready(self) -> Runtime:
        """Raises RuntimeFailure, or what else making it came to. To be cancelled while it waits stops nothing."""
        await asyncio.wait({self._task})
        if self._failure is not None:
            raise self._failure
        assert self._sandbox is not None
        return self._sandbox.runtime

    async def close(self) -> None:
        """Stop it, at whatever point it is. Idempotent; to be run to its end."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._sandbox is not None:
            await self._sandbox.stop()

    async def _start(self) -> None:
        limit = asyncio.timeout(self._seconds)
        try:
            async with await self._bench.starts.take(self._bench.priority), limit:
                self._sandbox = self._bench.sandbox(self._number, self._layer)
                await self._sandbox.ready()
        except Exception as error:  # told to the one who needs the sandbox, and not to the owner's other tasks
            late = f"a sandbox for grading was not ready within {self._seconds:g} s"
            self._failure = RuntimeFailure(late) if limit.expired() else error


def end_of(error: BaseException) -> str:
    """The end of an exception's traceback."""
    return "".join(traceback.format_exception(error))[-LOG_TAIL:]
