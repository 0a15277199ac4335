"""Agents, sandboxes and evaluators that tests control.

A test opens a `Stage` before its service. Everything that the service starts finds the stage through a context
variable, so tests share nothing. An agent is a script of steps (see `Actor`), given in the task's harness options.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Self

from outrider.errors import EngineError, EvaluatorError, RequestError, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lab.fakes.memory_runtime.runtime import MemoryLedger, MemoryRuntime
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.spec import EvaluatorSpec, RuntimeSpec
from outrider.trajectory import Verdict
from support.clock import pass_time

ACTOR = "service.stage:Actor"
SANDBOX = "service.stage:StagedRuntime"
GRADER = "service.stage:grade"
RAW_GRADER = "service.stage:RawGrader"
ODD_GRADER = "service.stage:OddGrader"

ODD: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "cancelled": asyncio.CancelledError(),
    "half a character": ValueError("caf\udce9"),
    "no text": EvaluatorError(KeyError("x")),  # type: ignore[arg-type]  # the mistake of a plugin
}
GIVEN: dict[str, Any] = {
    "nothing": None,
    "a number": 0.5,
    "not a number": Verdict(reward=math.nan),
    "odd text": Verdict(reward=0.5, metrics={"m\udce9": 1.0}, reason="caf\udce9"),
}


class Stage:
    """The shared state of one test. `arrived[name]` is set when an agent, a sandbox or an evaluator reaches the place
    `name`, where it waits until `open[name]` is set."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.open: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.count: Counter[str] = Counter()
        self.order: list[str] = []

    async def wait_at(self, place: str) -> None:
        self.arrived[place].set()
        await self.open[place].wait()


_stage: ContextVar[Stage] = ContextVar("stage")


@contextmanager
def a_stage() -> Iterator[Stage]:
    stage = Stage()
    token = _stage.set(stage)
    try:
        yield stage
    finally:
        _stage.reset(token)


class Actor:
    """An agent that carries out the steps in `init`, then the steps in `do`.

    - ask: make a model call. `ask quietly` ignores its errors.
    - consult MODEL: call a frozen model. `consult MODEL quietly` ignores its errors.
    - leave: begin a model call and go on while it is under way.
    - wait PLACE: wait until the test opens the place.
    - admit COUNT: the first COUNT attempts go on, the others wait for ever.
    - crash: raise an error. `crash at COUNT` does so only the first COUNT times.
    - oddly HOW: raise the entry HOW of ODD.
    - break: stop the sandbox and report that it is gone.
    - freeze SECONDS: block the event loop.
    - sleep SECONDS: sleep.
    - pass SECONDS: advance the event loop's clock without waiting.
    - run COMMAND: run a command in the sandbox; the step fails if the command fails.
    - note NAME: append NAME to the stage's `order`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._init: list[str] = options.get("init", [])
        self._do: list[str] = options.get("do", ["ask"])
        self._messages: list[Message] = []

    async def init(self, context: HarnessContext) -> None:
        for step in self._init:
            await self._step(step, context)

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        self._messages = [Message(role=Role.USER, content=context.task.instruction)]
        for step in self._do:
            await self._step(step, context)
        return HarnessOutcome(log_tail="left in good order")

    async def _step(self, step: str, context: HarnessContext) -> None:
        verb, _, rest = step.partition(" ")
        stage = _stage.get()
        match verb:
            case "ask":
                await self._ask(context, quietly=rest == "quietly")
            case "consult":
                model, _, how = rest.partition(" ")
                with suppress(*((EngineError, RequestError) if how == "quietly" else ())):
                    await context.model.chat([Message(role=Role.USER, content="what is it worth?")], model=model)
            case "leave":
                self._left = asyncio.create_task(context.model.chat(self._messages))
                self._left.add_done_callback(lambda call: call.cancelled() or call.exception())
                await asyncio.sleep(0.1)
            case "wait":
                await stage.wait_at(rest)
            case "admit":
                stage.count["admit"] += 1
                if stage.count["admit"] > int(rest):
                    await stage.wait_at("never opened")
            case "crash":
                stage.count["crash"] += 1
                if not rest or stage.count["crash"] <= int(rest.removeprefix("at ")):
                    raise ValueError("the agent crashed, as it was told to")
            case "oddly":
                raise ODD[rest]
            case "break":
                await context.runtime.stop()
                raise RuntimeFailure("the sandbox is gone")
            case "freeze":  # blocks the whole service, because the actor runs on its event loop
                time.sleep(float(rest))  # noqa: ASYNC251
            case "sleep":
                await asyncio.sleep(float(rest))
            case "pass":
                await pass_time(float(rest))
            case "run":
                result = await context.runtime.exec(rest, seconds=60)
                assert result.exit_code == 0, result
            case "note":
                stage.order.append(rest)
            case _:
                raise AssertionError(f"no such step: {step}")

    async def _ask(self, context: HarnessContext, *, quietly: bool) -> None:
        try:
            reply = await context.model.chat(self._messages)
        except (EngineError, RequestError):
            if not quietly:
                raise
        else:
            self._messages += [reply, Message(role=Role.USER, content="go on")]


class StagedRuntime(MemoryRuntime):
    """The memory runtime with the stage's ledger. The spec's variable HANG lists operations, for example `exec`, that
    wait at the place with the operation's name."""

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Self:
        return cls.with_ledger(_stage.get().ledger)(spec, context)

    async def start(self) -> None:
        await super().start()
        await self._perhaps_hang("start")

    async def exec(self, *args: Any, **kwargs: Any) -> Any:
        await self._perhaps_hang("exec")
        return await super().exec(*args, **kwargs)

    async def _perhaps_hang(self, operation: str) -> None:
        if operation in self._spec.env.get("HANG", "").split(","):
            await _stage.get().wait_at(operation)


async def grade(outcome: Outcome) -> Any:
    """Carry out the next of the options' `verdicts`; the last one is repeated. A verdict is a reward, `fail` (raise an
    error), or `wait PLACE` (wait, then return 1)."""
    stage = _stage.get()
    verdicts = outcome.task.evaluator.options.get("verdicts", [1.0])
    verdict = verdicts[min(stage.count["graded"], len(verdicts) - 1)]
    stage.count["graded"] += 1
    stage.count[f"graded {outcome.stop_reason}"] += 1
    if not isinstance(verdict, str):
        return verdict
    if verdict.startswith("wait "):
        await stage.wait_at(verdict.removeprefix("wait "))
        return 1.0
    raise ValueError("the grader failed, as it was told to")


class RawGrader:
    """An evaluator class whose first `fails` evaluations raise errors that are not Outrider's."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._after = int(spec.options.get("fails", 0))
        self._error = TimeoutError if spec.options.get("times_out") else LookupError

    async def evaluate(self, outcome: Outcome) -> Verdict:
        stage = _stage.get()
        stage.count["graded"] += 1
        if stage.count["graded"] <= self._after:
            raise self._error("nothing here to grade")
        return Verdict(reward=1.0)


class OddGrader:
    """An evaluator class that always returns the entry `how` of GIVEN or raises the entry `how` of ODD."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._how = str(spec.options["how"])

    async def evaluate(self, outcome: Outcome) -> Any:
        _stage.get().count["graded"] += 1
        if self._how in ODD:
            raise ODD[self._how]
        return GIVEN[self._how]


class BrokenRuntime(StagedRuntime):
    """A runtime whose start raises an error that the contract does not allow."""

    async def start(self) -> None:
        await super().start()
        raise OSError("not a failure of ours")


class OnceOnly(Actor):
    """An agent that can be made at submission, but not a second time."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        _stage.get().count["made"] += 1
        if _stage.get().count["made"] > 1:
            raise ValueError("no more of these")
