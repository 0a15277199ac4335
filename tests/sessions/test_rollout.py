"""One attempt with fakes: an agent written by the test, a sandbox in memory, a scripted engine, and lists as the
store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.watchdog import Watchdog, Witness
from outrider.config import LanesConfig
from outrider.errors import (
    EngineUnavailable,
    EvaluatorError,
    OutriderError,
    RuntimeFailure,
    ServiceError,
)
from outrider.evaluators.base import Outcome
from outrider.evaluators.endpoints import Endpoints
from outrider.harnesses.base import HarnessContext, HarnessOutcome, ModelRefused, ProgramExit
from outrider.lab.fakes.memory_runtime.runtime import MemoryLedger, MemoryRuntime
from outrider.lifecycle import SessionState, StopReason
from outrider.messages import Message, Role
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandboxes
from outrider.sandbox.warm_pool import WarmLimits, WarmPool
from outrider.sessions.artifacts import ArtifactCollector
from outrider.sessions.attempt import Attempt, seconds_of_calls
from outrider.sessions.lanes import Lanes
from outrider.sessions.resources import Capacity, NodeResources
from outrider.sessions.rollout import NodeServices, Rollout
from outrider.sessions.timelines import Timelines
from outrider.spec import RuntimeSpec, TaskSpec
from outrider.store.rows import SessionRow
from outrider.timeline import TimelinePart
from outrider.trajectory import SessionResult, Turn, TurnTimings

from .world import World, a_world

Agent = Callable[["Script", HarnessContext], Awaitable[HarnessOutcome]]

AGENT = "sessions.test_rollout:ScriptedAgent"
RUNTIME = "sessions.test_rollout:Sandbox"
GRADER = "sessions.test_rollout:grade"


class Script:
    """The script of one attempt: its agent, the failures to inject, and the outcomes that were graded."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.ledger = MemoryLedger()
        self.carry_failure: OutriderError | None = None
        self.grading_failure: OutriderError | None = None
        self.graded: list[StopReason] = []
        self.stall = 0.0
        """Seconds for which the service is blocked while the agent runs."""


_script: ContextVar[Script] = ContextVar("script")


class ScriptedAgent:
    """An agent in this process that follows the script."""

    def __init__(self, options: object) -> None:
        self._script = _script.get()

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        return await self._script.agent(self._script, context)


class Sandbox(MemoryRuntime):
    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls.with_ledger(_script.get().ledger)(spec, context)

    async def snapshot(self, *args: Any, **kwargs: Any) -> None:
        if (failure := _script.get().carry_failure) is not None:
            raise failure
        await super().snapshot(*args, **kwargs)


async def grade(outcome: Outcome) -> float:
    script = _script.get()
    script.graded.append(outcome.stop_reason)
    if script.grading_failure is not None:
        raise script.grading_failure
    return 1.0


class Turns:
    """The store of the attempt's turns."""

    def __init__(self) -> None:
        self.turns_of_policy: list[Turn] = []
        self.states: list[SessionState] = []
        self.failure: OutriderError | None = None
        self.parts: list[TimelinePart] = []

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        self.states.append(state)

    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.turns_of_policy.append(turn)

    async def turns(self, session_id: str, attempt: int, *, images: bool = False) -> list[Turn]:
        return self.turns_of_policy

    async def frozen_turns(self, session_id: str, attempt: int) -> dict[str, list[Turn]]:
        return {}

    async def add_timeline(self, parts: Sequence[TimelinePart]) -> None:
        self.parts += parts


class Stalls(Watchdog):
    """A watchdog that reports the script's stall."""

    @contextmanager
    def witness(self) -> Iterator[Witness]:
        with super().witness() as witness:
            yield witness
            witness.longest = max(witness.longest, _script.get().stall)


class Bench:
    """`await bench.run(agent)` returns the result of one attempt."""

    def __init__(self, world: World, store: Turns, services: NodeServices) -> None:
        self.world = world
        self.store = store
        self.script: Script | None = None
        self._services = services

    async def run(
        self, agent: Agent, *, prepare: Callable[[Script], None] = lambda script: None, **task: Any
    ) -> SessionResult:
        self.script = script = Script(agent)
        prepare(script)
        _script.set(script)
        spec = TaskSpec.model_validate(
            {
                "instruction": "do it",
                "harness": {"agent": AGENT},
                "runtime": {"kind": RUNTIME},
                "evaluator": {"kind": "callable", "path": GRADER},
                "max_attempts": 1,
                **task,
            }
        )
        session = SessionRow(
            id="s-1",
            group_id="g-1",
            sample_index=0,
            state=SessionState.INITIALIZING,
            attempt=1,
            node="node",
            lease_until=None,
            priority=0,
            created=0.0,
            updated=0.0,
            last_error=None,
            result=None,
        )
        result = await Rollout(Attempt(session=session, task=spec), "key", self._services).run()
        assert script.ledger.balanced
        assert {lane.in_use for lane in self._services.lanes.stats()} == {0}
        return result


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "node").mkdir()
    store = Turns()
    async with (
        asyncio.timeout(30),
        a_world(tmp_path / "tokenizer", ["one<|im_end|>"] * 9) as world,
        Host(tmp_path / "node") as host,
        Chores(Failures()) as background,
        Stalls() as watchdog,
    ):
        paths = HostPaths.of(tmp_path / "files")
        sandboxes = Sandboxes(host=host, background=background, paths=paths, gateway_socket=tmp_path / "socket")
        async with WarmPool(sandboxes, WarmLimits()) as warm_pool:
            yield Bench(
                world,
                store,
                NodeServices(
                    model=world.conversation.backend,
                    store=store,
                    artifacts=ArtifactCollector(cast(Any, None)),
                    lanes=Lanes(LanesConfig(init=1, run=1, eval=1)),
                    resources=NodeResources(Capacity(cpus=1.0, memory_mb=1024)),
                    sandboxes=sandboxes,
                    warm_pool=warm_pool,
                    timelines=Timelines(store),
                    watchdog=watchdog,
                    endpoints=Endpoints(),
                ),
            )


QUESTION = [Message(role=Role.USER, content="what now?")]


async def works(script: Script, context: HarnessContext) -> HarnessOutcome:
    await context.model.chat(QUESTION)
    return HarnessOutcome(log_tail="done")


async def test_an_attempt_from_its_sandbox_to_its_verdict(bench: Bench) -> None:
    result = await bench.run(works)
    assert (result.stop_reason, result.error, result.turns) == (StopReason.COMPLETED, None, 1)
    assert result.verdict is not None
    assert result.verdict.reward == 1.0
    assert bench.store.states == [SessionState.READY, SessionState.RUNNING, SessionState.EVALUATING]


@pytest.mark.parametrize(
    ("task", "code", "field"),
    [
        (
            {"evaluator": {"run": "true", "carry": ["x"], "runtime": {"kind": "process", "image": "debian"}}},
            "runtime_unavailable",
            "task.evaluator.runtime.image",
        ),
        (
            {"evaluator": {"run": "true", "carry": ["x"], "runtime": {"prepare": [{"upload": "gone", "to": "x"}]}}},
            "runtime_failure",
            "task.evaluator.runtime.prepare.0.upload",
        ),
        (
            {
                "then": [
                    {
                        "instruction": "go on",
                        "evaluator": {"run": "true", "carry": ["x"], "runtime": {"kind": "process", "users": 2}},
                    }
                ]
            },
            "runtime_unavailable",
            "task.then.0.evaluator.runtime.users",
        ),
        (
            {
                "then": [
                    {
                        "instruction": "go on",
                        "evaluator": {"kind": "completed"},
                        "prepare": [{"run": "true"}, {"upload": "gone", "to": "x"}],
                    }
                ]
            },
            "runtime_failure",
            "task.then.0.prepare.1.upload",
        ),
    ],
)
async def test_what_this_machine_lacks_for_later_is_an_error_before_the_agent_begins(
    bench: Bench, task: dict[str, Any], code: str, field: str
) -> None:
    result = await bench.run(works, **task)
    assert result.error is not None
    assert (result.error.code, result.error.field, result.verdict) == (code, field, None)
    assert (result.turns, bench.store.states) == (0, [])
    assert bench.script is not None
    assert not bench.script.ledger.started


async def ends_at_once(script: Script, context: HarnessContext) -> HarnessOutcome:
    return HarnessOutcome(log_tail="nothing to do")


async def exits(script: Script, context: HarnessContext) -> HarnessOutcome:
    raise ProgramExit("it exited with 3", exit_code=3, hint="see the log", log_tail="it went wrong")


async def works_and_exits(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    return await exits(script, context)


async def works_without_end(script: Script, context: HarnessContext) -> HarnessOutcome:
    while True:
        await works(script, context)


async def waits(script: Script, context: HarnessContext) -> HarnessOutcome:
    await asyncio.sleep(3600)
    raise AssertionError


async def works_and_waits(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    return await waits(script, context)


async def swallows_a_failure(script: Script, context: HarnessContext) -> HarnessOutcome:
    with pytest.raises(OutriderError):
        await context.model.chat(QUESTION)
    return HarnessOutcome(log_tail="all is well")


async def is_refused(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise ModelRefused("the judge has no turns left")


async def lets_out_a_timeout(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise TimeoutError


async def raises_key_error(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise KeyError("no such name")


async def has_a_bug(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise ServiceError("it cannot go on")


async def breaks_its_sandbox(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise RuntimeFailure("the sandbox is gone", inside=True, log_tail="killed")


async def loses_its_sandbox(script: Script, context: HarnessContext) -> HarnessOutcome:
    await works(script, context)
    raise RuntimeFailure("the sandbox is gone")


@pytest.mark.parametrize(
    ("agent", "limits", "reason"),
    [
        (works_and_exits, {}, StopReason.NONZERO_EXIT),
        (works_without_end, {"turns": 2}, StopReason.MAX_TURNS),
        (works_and_waits, {"agent_seconds": 0.5}, StopReason.AGENT_TIMEOUT),
        (is_refused, {}, StopReason.NONZERO_EXIT),
        (breaks_its_sandbox, {}, StopReason.AGENT_EXCESS),
    ],
)
async def test_what_the_agent_causes_is_graded(bench: Bench, agent: Agent, limits: Any, reason: StopReason) -> None:
    result = await bench.run(agent, limits=limits)
    assert (result.stop_reason, result.error) == (reason, None)
    assert result.verdict is not None
    assert result.verdict.reward == 1.0


@pytest.mark.parametrize(
    ("agent", "limits", "code", "message"),
    [
        (ends_at_once, {}, "harness_error", "without a single model call"),
        (exits, {}, "harness_error", "it exited with 3"),
        (waits, {"agent_seconds": 0.2}, "harness_error", "the agent's time ran out before"),
        (lets_out_a_timeout, {}, "harness_error", "raised TimeoutError"),
        (has_a_bug, {}, "service_error", "it cannot go on"),
        (loses_its_sandbox, {}, "runtime_failure", "the sandbox is gone"),
        (loses_its_sandbox, {"turns": 1}, "runtime_failure", "the sandbox is gone"),
    ],
)
async def test_what_the_agent_does_not_cause_is_an_error(
    bench: Bench, agent: Agent, limits: Any, code: str, message: str
) -> None:
    result = await bench.run(agent, limits=limits)
    assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
    assert result.error is not None
    assert (result.error.code, message in result.error.message) == (code, True)
    assert bench.script is not None
    assert bench.script.graded == []


@pytest.mark.parametrize(
    "failure",
    [ProgramExit("it exited with 3", exit_code=3, hint="", log_tail=""), TimeoutError(), ValueError("a bug")],
)
@pytest.mark.parametrize(
    ("agent", "ended_with"), [(exits, "ProgramExit"), (raises_key_error, "KeyError: 'no such name'")]
)
async def test_a_failed_collection_is_an_error_and_the_log_has_how_the_run_ended(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    agent: Agent,
    ended_with: str,
) -> None:
    """No program of the agent runs during the collection, so the failure is not the agent's."""

    async def fails(*args: object) -> None:
        raise failure

    monkeypatch.setattr("outrider.sessions.rollout.collect", fails)
    result = await bench.run(agent)
    assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
    [earlier] = [record.message for record in caplog.records if "had ended before with" in record.message]
    assert ended_with in earlier
    assert bench.script is not None
    assert bench.script.graded == []


async def test_a_session_out_of_time_is_not_graded(bench: Bench) -> None:
    result = await bench.run(works_and_waits, limits={"session_seconds": 1.0})
    assert (result.stop_reason, result.verdict, result.error) == (StopReason.SESSION_TIMEOUT, None, None)


@pytest.mark.deep
async def test_a_failed_engine_is_the_error_however_the_agent_ended(bench: Bench) -> None:
    await bench.world.conversation.backend.pool.remove("scripted")
    result = await bench.run(swallows_a_failure)
    assert result.error is not None
    assert (result.error.code, result.error.log_tail) == (EngineUnavailable.code, "all is well")


async def test_an_attempt_whose_turn_is_not_stored_ends_at_once(bench: Bench) -> None:
    """Such an attempt can never be a sample, whatever its agent does later, so its slot is freed."""
    bench.store.failure = ServiceError("the disk is gone")

    async def goes_on(script: Script, context: HarnessContext) -> HarnessOutcome:
        with pytest.raises(ServiceError):
            await works(script, context)
        return await waits(script, context)

    result = await bench.run(goes_on)
    assert result.error is not None
    assert (result.error.code, result.error.message) == ("service_error", "the disk is gone")


async def test_a_stall_of_the_service_counts_if_the_run_ended_badly(bench: Bench) -> None:
    def stalled(script: Script) -> None:
        script.stall = 2.5

    well, badly = await bench.run(works, prepare=stalled), await bench.run(works_and_exits, prepare=stalled)
    assert (well.stop_reason, well.error) == (StopReason.COMPLETED, None)
    assert badly.error is not None
    assert (badly.error.code, "stood still for 2.5 s" in badly.error.message) == ("service_error", True)


async def test_a_grading_whose_files_cannot_be_carried_is_an_error(bench: Bench) -> None:
    def breaks(script: Script) -> None:
        script.carry_failure = RuntimeFailure("it cannot be read")

    result = await bench.run(works, prepare=breaks, evaluator={"kind": "callable", "path": GRADER, "carry": ["out"]})
    assert result.error is not None
    assert (result.error.code, result.run_reason) == ("runtime_failure", StopReason.COMPLETED)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_grading_that_fails_is_the_agents_only_if_it_works_without_the_agent(
    bench: Bench, inside: bool
) -> None:
    def fails(script: Script) -> None:
        script.grading_failure = EvaluatorError("no verdict", inside=inside)

    result = await bench.run(works, prepare=fails)
    assert result.error is not None  # the evaluation of an untouched sandbox fails, too
    assert (result.error.code, result.run_reason) == ("evaluator_error", StopReason.COMPLETED)


async def test_a_cancelled_attempt_leaves_nothing(bench: Bench) -> None:
    begun = asyncio.Event()

    async def is_cancelled(script: Script, context: HarnessContext) -> HarnessOutcome:
        await works(script, context)
        begun.set()
        return await waits(script, context)

    running = asyncio.create_task(bench.run(is_cancelled))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The session on the engine was released, and the next attempt finds every slot free.
    assert (await bench.run(works)).stop_reason is StopReason.COMPLETED


def test_model_calls_that_overlap_count_once() -> None:
    def call(received: float, finished: float) -> Turn:
        timings = TurnTimings(received=received, first_token=None, finished=finished)
        return cast(Turn, SimpleNamespace(timings=timings))

    assert seconds_of_calls([]) == 0.0
    assert seconds_of_calls([call(5, 6), call(1, 3), call(2, 4)]) == 4.0
    assert seconds_of_calls([call(1, 10), call(2, 3)]) == 9.0
    assert seconds_of_calls([call(4, 3)]) == 0.0  # the clock was set back
