"""Grades the outcome of an agent's run. If grading is impossible, decides whether the agent is to blame.

An outcome is graded in the agent's own sandbox. If the task carries files to the grading (`evaluator.carry`), the
outcome is graded in a new sandbox that no agent has touched. The new sandbox has the evaluator's runtime or, if there
is none, the agent's.

- If the task carries paths or a diff, the new sandbox gets nothing else of the agent's work, and may start while the
  agent still runs.
- If the task carries `all`, the new sandbox starts from all files that the agent wrote.

Invariants:

- With carried files, the evaluator begins after the agent's sandbox has stopped. The only exception is a step after
  which another step follows in the same sandbox.
- Every sandbox that this module starts is stopped.
- Two sandboxes of a session run at once only while the resources of both are set aside. There are two exceptions: a
  second sandbox that needs no resources, and a second sandbox that `Outcome.beside` opens.
- An agent is blamed only if the failure came from inside the sandbox, the model had replied by then, and the failed
  operation works in an untouched sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self, cast

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Chores
from outrider.destinations import Phase
from outrider.errors import (
    LOG_TAIL,
    EvaluatorError,
    HarnessError,
    OutriderError,
    RuntimeFailure,
    storable,
)
from outrider.evaluators.base import DecidesEarly, Evaluator, NothingKept, OffTheClock, Outcome
from outrider.evaluators.verdict import check_indexes, read_verdict
from outrider.plugins import plugin_code
from outrider.sandbox.network.door import Door
from outrider.sandbox.network.record import NetworkRecord
from outrider.sandbox.node_folder import remove_tree
from outrider.sandbox.runtimes.base import (
    NoShell,
    QueuesStarts,
    Runtime,
    SavesLayers,
    ShellKind,
    TellsCause,
)
from outrider.sandbox.sandbox import Sandbox, Sandboxes, collect
from outrider.sessions.artifacts import GradingLog
from outrider.sessions.attempt import Attempt
from outrider.sessions.blame import Blame, Facts, Stage, decide, end_of
from outrider.sessions.clock import Budget, PausableTimeout, Stopwatch
from outrider.sessions.lanes import Lane, Lanes
from outrider.sessions.patches import PatchBases, apply_patch, carried_paths, is_unchanged, make_patch, place_of
from outrider.sessions.priority_semaphore import Slot
from outrider.sessions.resources import NodeResources, required
from outrider.sessions.timelines import Timelines
from outrider.spec import RUNTIME, DiffSpec, Resources, RuntimeSpec
from outrider.store.artifacts import CARRIED, PATCH
from outrider.timeline import EntryKind, Timeline
from outrider.trajectory import Verdict

log = logging.getLogger("outrider.session")

EXCESS = "agent_excess"
"""Metric in the verdict on an agent that broke its sandbox or made grading impossible. The verdict's reason begins with
the same word."""

GRADING = "grading"
"""In the timeline, the name of sandboxes that are used for grading."""

TRIES_BEFORE_BLAME = 2
"""Number of evaluations that must fail before the agent can be blamed. Even an unreliable grader seldom fails twice."""

PROBE_SECONDS = 30.0
"""Time limit for running the command `true` in an untouched sandbox, as a test of the sandbox."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The result of grading an attempt. `excess` is True if the agent broke its sandbox or made the grading impossible
    (`agent_excess`). `patch` is the agent's change to a repository, if the task carries a diff."""

    verdict: Verdict
    excess: bool
    patch: bytes | None = None


class Origin(msgspec.Struct, frozen=True, eq=False):
    """The origin of a sandbox: the runtime, the task's field that contains the runtime, and the mounts."""

    runtime: RuntimeSpec
    field: str
    mounts: tuple[Path, ...]


class Grading:
    """Grades one step of a task. Within `async with Grading(...) as grading`, call `start_ahead` when the agent's run
    begins and `grade` once when the run has ended, or call only `grade_again`. Leaving the block stops all sandboxes
    that the grading has started.

    keep: stores a file of carried data as an artifact with the given name.
    log: receives the output of the evaluator.
    records: receives the network records of new sandboxes.
    numbers: yields a new number for each sandbox in which this session is graded.
    field: the evaluator's field in the task.
    goes_on: True if another step follows in the agent's sandbox. The agent's sandbox is then stopped only if the agent
        is to blame. The session's resources are enough for a second sandbox, in which the step is graded meanwhile.
    """

    def __init__(
        self,
        attempt: Attempt,
        evaluator: Evaluator,
        *,
        sandboxes: Sandboxes,
        lanes: Lanes,
        resources: NodeResources,
        mounts: tuple[Path, ...],
        stopwatch: Stopwatch,
        timeline: Timeline,
        timelines: Timelines,
        keep: Callable[[Path, str], Awaitable[None]],
        log: GradingLog,
        numbers: Iterator[int],
        field: str,
        goes_on: bool,
        records: list[NetworkRecord],
    ) -> None:
        self._attempt = attempt
        self._task = attempt.task
        self._evaluator = evaluator
        self._sandboxes = sandboxes
        self._lanes = lanes
        self._resources = resources
        self._agents = Origin(attempt.task.runtime, RUNTIME, mounts)
        """The origin of the agent's sandbox."""
        own = attempt.task.evaluator.runtime
        self._graders = self._agents if own is None else Origin(own, f"{field}.runtime", ())
        """The origin of the sandboxes for grading."""
        self._goes_on = goes_on
        self._stopwatch = stopwatch
        self._timeline = timeline
        self._timelines = timelines
        self._keep = keep
        self._log = log
        self._carry = attempt.task.evaluator.carry
        workdir = self._task.runtime.workdir
        self._repository = place_of(self._carry, workdir) if isinstance(self._carry, DiffSpec) else ""
        """Path of the carried repository in the sandbox, or "" if the task carries no diff."""
        self._folder = sandboxes.host.folder / f"{attempt.name}-graded"
        self._archive = self._folder / "carried"
        self._layer: Path | None = None
        self._paths = [posixpath.join(workdir, path) for path in self._carry] if isinstance(self._carry, list) else []
        """The paths in the archive of carried files. They are absolute, because the evaluator's runtime may have
        another working directory."""
        self._patch: bytes | None = None
        """The agent's changes to a carried repository. The patch is made in the first sandbox for grading, unless
        the agent has changed nothing."""
        self._decided: Verdict | None = None
        """The verdict on an agent that has changed nothing, if the evaluator needs no sandbox for it."""
        self._second_share: Slot | None = None
        """The resources of a sandbox for grading that starts while the agent's sandbox runs. They are released when
        the agent's sandbox has stopped, because the session's own resources then suffice."""
        self._ahead: GraderSandbox | None = None
        self._gpus: tuple[str, ...] = ()
        """The session's GPUs, set when the agent's sandbox has stopped. Later sandboxes use them one after another."""
        self._numbers = numbers
        self._records = records
        self._doors: list[Door] = []
        """The networks of the sandboxes in which the outcome is graded."""
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await shielded(self._undo.aclose)  # if one callback of the stack raises, the other callbacks still run

    def start_ahead(self) -> None:
        """Start the new sandbox for grading now, if it can start without the agent's files and if its resources are
        free.

        A sandbox that grades the last step and has GPUs cannot start ahead, because the agent uses the session's GPUs
        until the end of the run. A sandbox that grades an earlier step gets no GPUs, and its other resources are
        already set aside for the session.
        """
        needs = required(self._graders.runtime)
        if not isinstance(self._carry, list | DiffSpec) or (needs.gpus and not self._goes_on):
            return
        if not self._goes_on:
            self._second_share = self._resources.try_take(needs, self._attempt.tenant)
            if self._second_share is None:
                return
            self._undo.callback(self._second_share.release)
        self._ahead = self._start(self._graders)

    async def grade(
        self,
        sandbox: Sandbox,
        outcome: Outcome,
        *,
        failure: OutriderError | None,
        model_replied: bool,
        gpus: tuple[str, ...],
    ) -> Grade:
        """Grade the agent's work in `sandbox`. If files are carried to a new sandbox, `sandbox` is stopped first,
        unless another step follows in `sandbox`.

        If an error from inside the sandbox ended the agent's run, `failure` is that error. The work up to this failure
        is still graded if possible. `gpus` are the session's GPUs, which the agent uses until `sandbox` is stopped.
        Raises the failure of the run or of the grading if the agent is not to blame.
        """
        verdict: Verdict | None = None
        origin = self._agents
        """The origin of the sandbox in which a failure occurs."""
        try:
            if self._carry is not None:
                await self._decide_unchanged(sandbox.runtime, outcome)
                if self._decided is None:
                    async with mark_inside_failures(sandbox.runtime):
                        await self._take_out(sandbox.runtime)
                self._stopwatch.lap("eval")
                if not self._goes_on:
                    await self._stop(sandbox)
                    self._gpus = gpus
                origin = self._agents if failure else self._graders
            if self._carry is not None:
                verdict = await self._verdict(outcome)
            else:
                self._doors += [sandbox.door] if sandbox.door is not None else []
                async with sandbox.network(Phase.VERIFIER):
                    verdict = await self._verdict(outcome)
        except OutriderError as error:
            facts = Facts(stage=Stage.GRADE, end=end_of(error), inside=error.inside, replied=model_replied)
            if decide(facts).blame is not Blame.AGENT:
                raise
            failure = failure or error  # if the run failed, the failure of the run is the cause of `error`
        self._stopwatch.lap("eval")
        if failure is not None:
            await self._stop(sandbox)
            self._gpus = gpus
            try:
                confirmed = await self._confirm_excess(failure, outcome, origin)
            finally:
                del failure  # breaks a reference cycle: see `_confirm_excess`
            self._stopwatch.lap("eval")
            return Grade(verdict=verdict or confirmed, excess=True)
        assert verdict is not None
        return Grade(verdict=verdict, excess=False, patch=self._patch)

    async def grade_again(
        self, outcome: Outcome, fetch: Callable[[Path], Awaitable[None]] | None, *, gpus: tuple[str, ...]
    ) -> Grade:
        """Grade a run whose sandbox no longer exists. `gpus` are set aside for this grading. Raises the errors of
        `grade` and of `fetch`.

        `fetch` writes the run's carried data into a file. If no data was kept, `fetch` is None, and the evaluator gets
        only the agent's answer, the transcript and `Outcome.beside`."""
        self._gpus = gpus
        if fetch is None:
            self._carry = None
            return Grade(verdict=await self._verdict(outcome), excess=False)
        await self._make_folder()
        await fetch(self._archive)
        if self._carry == "all":
            self._layer = self._archive
        elif isinstance(self._carry, DiffSpec):
            self._patch = await asyncio.to_thread(self._archive.read_bytes)
            self._decided = self._decide(outcome, self._patch)
        try:
            return Grade(verdict=await self._verdict(outcome), excess=False, patch=self._patch)
        except OutriderError as error:
            replied = outcome.turns > 0
            facts = Facts(stage=Stage.GRADE, end=end_of(error), inside=error.inside, replied=replied)
            if decide(facts).blame is not Blame.AGENT:
                raise
            return Grade(verdict=await self._confirm_excess(error, outcome, self._graders), excess=True)

    async def _decide_unchanged(self, runtime: Runtime, outcome: Outcome) -> None:
        """Check whether the agent has changed nothing in the carried repository. If so, keep an empty patch and set the
        verdict. The check needs the repository's git tree, which an earlier grading may have stored (`PatchBases`).
        Does nothing if the tree is not stored, or if the evaluator needs a sandbox for the verdict."""
        host = self._sandboxes.host
        if not isinstance(self._carry, DiffSpec) or not isinstance(self._evaluator, DecidesEarly):
            return
        base = (await host.part(PatchBases)).find(self._graders.runtime, self._repository)
        decided = self._decide(outcome, b"") if base is not None else None
        if base is None or decided is None:
            return
        if await is_unchanged(runtime, self._carry, self._repository, base):
            await self._make_folder()
            await self._keep_patch(b"")
            self._decided = decided

    def _decide(self, outcome: Outcome, patch: bytes) -> Verdict | None:
        """Return the verdict on an outcome with this patch, or None if the evaluator needs a sandbox for it. Raises
        EvaluatorError."""
        if not isinstance(self._evaluator, DecidesEarly):
            return None
        outcome = msgspec.structs.replace(outcome, runtime=cast(Runtime, NothingKept()), patch=patch)
        try:
            with plugin_code():
                verdict = self._evaluator.decide(outcome)
        except OutriderError:
            raise
        except Exception as error:  # a plugin may raise anything
            raise _raised(error) from error
        return None if verdict is None else _read_verdict(verdict, outcome)

    async def _keep_patch(self, patch: bytes) -> None:
        self._patch = patch
        file = self._folder / "patch"
        await asyncio.to_thread(file.write_bytes, patch)
        await self._keep(file, PATCH)

    async def _stop(self, sandbox: Sandbox) -> None:
        await sandbox.stop()
        self._stopwatch.lap("stop")

    async def _take_out(self, runtime: Runtime) -> None:
        """Copy the graded files from the agent's sandbox to the host. Raises RuntimeFailure."""
        await self._make_folder()
        if self._carry == "all":  # see `check_carry`
            await cast(SavesLayers, runtime).save_layer(self._archive)
            self._layer = self._archive
        else:
            if isinstance(self._carry, DiffSpec):
                self._paths = await carried_paths(runtime, self._repository)
            # `alone` ends the programs that the agent left running, because they could change files during the copy. If
            # another step follows, the programs keep running, because the next step may need them.
            await runtime.snapshot(self._paths, self._archive, alone=not self._goes_on)
        if self._task.evaluator.keep and not isinstance(self._carry, DiffSpec):
            await self._keep(self._archive, CARRIED)

    async def _make_folder(self) -> None:
        self._undo.push_async_callback(asyncio.to_thread, remove_tree, self._folder)
        await asyncio.to_thread(self._folder.mkdir, mode=0o700)

    async def _verdict(self, outcome: Outcome) -> Verdict:
        """Evaluate the outcome. A failed evaluation is repeated, up to the task's `max_attempts` evaluations, so that
        one failure does not lose the agent's work.

        If the failure comes from inside the sandbox, at least TRIES_BEFORE_BLAME evaluations are made. With carried
        files, a retryable RuntimeFailure is repeated as well, because each evaluation has a new sandbox. Any other
        RuntimeFailure is raised at once.
        """
        if self._second_share is not None:  # not needed any more: the agent's sandbox has stopped
            self._second_share.release()
        if self._decided is not None:
            return self._decided
        failure: OutriderError = EvaluatorError("not evaluated")
        tries = 0
        while tries < self._task.max_attempts or (failure.inside and tries < TRIES_BEFORE_BLAME):
            tries += 1
            for door in self._doors:
                door.forget_failures()
            try:
                async with self._sandbox_for_evaluation(outcome.runtime) as runtime:
                    if self._patch is not None and (decided := self._decide(outcome, self._patch)) is not None:
                        return decided
                    placed = msgspec.structs.replace(outcome, runtime=runtime, patch=self._patch)
                    return await self._evaluate(placed)
            except EvaluatorError as error:
                failure = error
            except RuntimeFailure as error:
                if self._carry is None or not error.retryable:
                    raise
                failure = error
        try:
            raise failure
        finally:
            del failure  # breaks a reference cycle: see `_confirm_excess`

    @asynccontextmanager
    async def _sandbox_for_evaluation(self, agents: Runtime) -> AsyncIterator[Runtime]:
        """Yield the sandbox for one evaluation: the agent's sandbox, or a new one that contains the carried files."""
        if self._carry is None:
            async with mark_inside_failures(agents):
                yield agents
            return
        async with self._new_sandbox(self._layer) as runtime, mark_inside_failures(runtime):
            if isinstance(self._carry, list):
                await runtime.restore(self._archive, self._paths)
            elif isinstance(self._carry, DiffSpec):
                patch = self._patch
                if patch is None:
                    made = await make_patch(runtime, self._carry, self._repository, self._archive, self._paths)
                    bases = await self._sandboxes.host.part(PatchBases)
                    bases.remember(self._graders.runtime, self._repository, made.base)
                    patch = made.patch
                    await self._keep_patch(patch)
                await apply_patch(runtime, self._repository, patch)
            yield runtime

    async def _confirm_excess(self, failure: OutriderError, outcome: Outcome, origin: Origin) -> Verdict:
        """Return the verdict on an agent that broke its sandbox or made grading impossible. The agent's sandbox has
        been stopped. `failure` occurred in a sandbox made from `origin`.

        First, sandboxes in which no agent has worked are tested. They must start, accept a file, run a command, open a
        shell (if `failure` is NoShell), and carry the task's files. If a test fails, `failure` is raised.

        Then `outcome` is evaluated in a tested sandbox, as if the agent had done nothing. The reward is the lower of 0
        and the reward of this evaluation. If the evaluation raises EvaluatorError, the reward is 0, unless `failure` is
        an EvaluatorError, too. In that case, `failure` is raised. Any other error of the evaluation also raises
        `failure`.
        """
        reward, reason = 0.0, storable(f"{EXCESS}: {failure.message}")
        shell = failure.kind if isinstance(failure, NoShell) else None
        untouched = self._folder / "untouched"
        apart = self._graders is not self._agents
        try:
            if apart:
                async with started(self._start(self._agents, gpus=self._gpus)) as runtime:
                    await probe(runtime, shell if origin is self._agents else None)
                    await collect(runtime, self._task.collect)
                    await runtime.snapshot(self._paths, untouched)
            async with self._new_sandbox(layer=None) as runtime:  # without the agent's files
                await probe(runtime, shell if origin is self._graders else None)
                if apart:
                    await runtime.restore(untouched, self._paths)
                else:
                    await collect(runtime, self._task.collect)
                if isinstance(self._carry, DiffSpec):  # if this fails, too, the agent did not cause the failure
                    await carried_paths(runtime, self._repository)
                nothing = await self._evaluate(msgspec.structs.replace(outcome, runtime=runtime))
                reward = min(reward, nothing.reward)
        except Exception as error:  # a plugin may raise anything
            sandbox_failed = not isinstance(failure, EvaluatorError)
            facts = Facts(stage=Stage.CONFIRM, end=end_of(error), sandbox_failed=sandbox_failed)
            if decide(facts).blame is Blame.ERROR:
                raise failure from error
        finally:
            # The traceback of `failure` refers to this frame. Without the deletion, this reference cycle would keep the
            # session's tokens, perhaps megabytes, until the next garbage collection.
            del failure
        return Verdict(reward=reward, metrics={EXCESS: 1.0}, reason=reason)

    @asynccontextmanager
    async def _new_sandbox(self, layer: Path | None) -> AsyncIterator[Runtime]:
        """Yield the sandbox that was started ahead. If there is none, or if its start failed, yield a new sandbox. The
        sandbox is stopped when the block ends."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            try:
                await ahead.ready()
            except RuntimeFailure as error:
                log.warning("%s: a sandbox for grading failed, and is started again: %s", self._attempt.name, error)
                await shielded(ahead.close)
                ahead = None
        async with started(ahead or self._start(self._graders, layer, self._gpus)) as runtime:
            yield runtime

    @asynccontextmanager
    async def _beside(self, resources: Resources | None = None) -> AsyncIterator[Runtime]:
        """Open the second sandbox that `Outcome.beside` describes. The second sandbox starts without waiting for
        resources, and no resources are set aside for it, but its resource limits apply. It has no GPUs, because the
        graded sandbox uses the session's GPUs."""
        origin = self._graders
        if resources is not None:
            origin = msgspec.structs.replace(origin, runtime=origin.runtime.model_copy(update={"resources": resources}))
        async with started(self._start(origin)) as runtime:
            yield runtime

    def _start(self, origin: Origin, layer: Path | None = None, gpus: tuple[str, ...] = ()) -> GraderSandbox:
        gpus = gpus[: origin.runtime.resources.gpus]
        session = self._attempt.session
        name = f"{session.id}-g{next(self._numbers)}"

        async def make() -> Sandbox:
            made = await self._sandboxes.make(
                origin.runtime,
                name,
                session.attempt,
                mounts=origin.mounts,
                layer=layer,
                gpus=gpus,
                field=origin.field,
            )
            self._doors += [made.door] if made.door is not None else []
            self._records += made.records
            return made

        sandbox = GraderSandbox(
            make,
            timeline=self._timeline,
            timelines=self._timelines,
            owner=self._sandboxes.background,
            starts=self._lanes.grading,
            line=(self._attempt.priority, self._attempt.tenant),
            seconds=self._task.limits.session_seconds,
        )
        self._undo.push_async_callback(sandbox.close)
        return sandbox

    async def _evaluate(self, outcome: Outcome) -> Verdict:
        """Evaluate once. Raises EvaluatorError, or any OutriderError that the evaluator itself raises."""
        self._log.begin()
        seconds = self._task.evaluator.seconds
        timeout = PausableTimeout(seconds)
        off_the_clock = partial(_off_the_clock, timeout, outcome.off_the_clock)
        try:
            async with timeout.block:
                with plugin_code():
                    verdict = await self._evaluator.evaluate(
                        msgspec.structs.replace(
                            outcome, beside=self._beside, off_the_clock=off_the_clock, log=self._log.add
                        )
                    )
        except OutriderError:
            raise
        except Exception as error:  # a plugin may raise anything, including its own TimeoutError
            if isinstance(error, TimeoutError) and timeout.block.expired():
                raise EvaluatorError(f"evaluation took longer than {seconds:g} s") from error
            raise _raised(error) from error
        read = _read_verdict(verdict, outcome)
        failures = [failure for door in self._doors if (failure := door.broken(Phase.VERIFIER)) is not None]
        if failures and read.reward <= 0:
            raise EvaluatorError(
                f"the network failed while the outcome was graded, and the reward is not positive: {failures[0]}",
                hint="see the spans of kind network in the session's timeline, and docs/network.md",
            )
        return read


def _raised(error: Exception) -> EvaluatorError:
    """Return the error for an evaluator that raised an exception other than OutriderError."""
    log_tail = "".join(traceback.format_exception(error))[-LOG_TAIL:]
    return EvaluatorError(f"the evaluator raised {type(error).__name__}: {error}", log_tail=log_tail)


def _read_verdict(verdict: object, outcome: Outcome) -> Verdict:
    """Return the evaluator's return value as a verdict. Raises EvaluatorError if it is not a valid verdict."""
    try:
        read = read_verdict(verdict)
        check_indexes(read, outcome.calls)
    except ValueError as error:
        raise EvaluatorError(f"the evaluator returned no verdict: {error}") from error
    return read


@asynccontextmanager
async def _off_the_clock(timeout: PausableTimeout, off_the_clock: OffTheClock) -> AsyncIterator[None]:
    """Enter `off_the_clock()`, and pause the evaluation's time limit until the block ends."""
    with timeout.paused():
        async with off_the_clock():
            yield


@asynccontextmanager
async def started(sandbox: GraderSandbox) -> AsyncIterator[Runtime]:
    """Wait until the sandbox has started, and yield its runtime. The sandbox is stopped when the block ends."""
    try:
        yield await sandbox.ready()
    finally:
        await shielded(sandbox.close)


async def probe(runtime: Runtime, shell: ShellKind | None) -> None:
    """Test a sandbox. Raises RuntimeFailure unless the sandbox accepts a file, runs a command and, if `shell` is given,
    opens that shell."""
    await runtime.write(f"{runtime.scratch}/outrider-try", b"x")
    done = await runtime.exec("true", seconds=PROBE_SECONDS)
    if done.exit_code != 0:
        raise RuntimeFailure("a new sandbox runs no command", log_tail=done.log_tail())
    if shell is not None:
        await (await runtime.open_shell(shell)).close()


class GraderSandbox:
    """A sandbox for grading. It starts as soon as this object is created, in an asyncio task of `owner`.

    `starts` limits how many such sandboxes start at once. A start may take at most `seconds`. The wait for a slot of
    `starts` does not count, nor does the time for which a service such as E2B queues the start.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Sandbox]],
        *,
        timeline: Timeline,
        timelines: Timelines,
        owner: Chores,
        starts: Lane,
        line: tuple[int, str],
        seconds: float,
    ) -> None:
        self._sandbox: Sandbox | None = None
        self._failure: Exception | None = None
        self._timeline = timeline
        self._timelines = timelines
        self._noted = ExitStack()
        """Ends the recording of the sandbox's commands in the timeline."""
        self._task = owner.create_task(
            self._start(make, starts, line, seconds), name="start a sandbox for an evaluation"
        )

    async def ready(self) -> Runtime:
        """Wait until the sandbox has started. Raises RuntimeFailure, or any other error of a plugin. If this wait is
        cancelled, the start continues."""
        await asyncio.wait({self._task})
        if self._failure is not None:
            raise self._failure
        assert self._sandbox is not None
        return self._sandbox.runtime

    async def close(self) -> None:
        """Stop the sandbox, even if it has not started yet. Idempotent. The caller shields this call from
        cancellation."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._sandbox is not None:
            await self._timelines.list_processes_of(self._sandbox.runtime)
            await self._sandbox.stop()
        self._noted.close()

    async def _start(
        self, make: Callable[[], Awaitable[Sandbox]], starts: Lane, line: tuple[int, str], seconds: float
    ) -> None:
        queued: list[QueuesStarts] = []
        limit = Budget(seconds, lambda: sum(one.queued_seconds() for one in queued))
        try:
            async with await starts.take(*line), limit.spend():
                began = time.time()
                sandbox = await make()
                if isinstance(sandbox.runtime, QueuesStarts):
                    queued.append(sandbox.runtime)
                self._noted.enter_context(self._timelines.sandbox(self._timeline, sandbox, GRADING))
                await sandbox.ready()
                if sandbox.door is not None:
                    await sandbox.door.enter(Phase.VERIFIER)
                self._timeline.add(
                    EntryKind.SANDBOX, sandbox.kind or "", began, time.time(), sandbox=GRADING, warm=False
                )
                self._sandbox = sandbox
        # `ready` raises the error. If it were raised here, it would end the node's background tasks.
        except Exception as error:
            late = f"a sandbox for grading was not ready within {seconds:g} s"
            self._failure = RuntimeFailure(late) if limit.exhausted else error


@asynccontextmanager
async def mark_inside_failures(runtime: Runtime) -> AsyncIterator[None]:
    """If the block raises an OutriderError that came from inside the sandbox, set `inside` on the error.

    The block must not stop the sandbox. Other errors, such as an engine's error, are not changed.
    """
    try:
        yield
    except OutriderError as failure:
        if failure.inside or not await came_from_inside(runtime, failure):
            raise
        raise failure.replace(inside=True) from failure.__cause__


async def came_from_inside(runtime: Runtime, failure: OutriderError) -> bool:
    """Return True if `failure` came from inside the sandbox, which must still be running. Only failures of the sandbox,
    the agent's program or the evaluator can come from inside."""
    if not isinstance(failure, RuntimeFailure | HarnessError | EvaluatorError):
        return False
    return failure.inside or (isinstance(runtime, TellsCause) and await runtime.broken_inside())
