"""The cost of grading an outcome by kind of evaluator, warm: alone, and 32 at once, each compared with its floor.

The figures are milliseconds of wall clock and of processor time, from `evaluate` to its verdict, without a session. The
processor time includes this process and all its descendants. The floor of a kind is its indispensable work, done as
simply as possible: the library's own comparison in a process that has the library loaded, the bare program, or the bare
HTTP request to the same server, which replies from a script. Each concurrent verdict has a sandbox of its own, of kind
`namespace` if the machine can run it. Kinds whose library or sandbox is missing are left out, and listed in the result.
Answers differ from one verdict to the next, so that no cache helps.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson

from bench.floors import Receive, Scope, Send
from bench.processor_time import cpu_seconds
from outrider.config import GraderConfig
from outrider.errors import InvalidField
from outrider.evaluators.answers import marked_answer
from outrider.evaluators.base import Evaluator, Outcome
from outrider.evaluators.checks.pool import checks_of
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.maths import LIBRARY as MATH_VERIFY
from outrider.evaluators.reasoning import LIBRARY as REASONING_GYM
from outrider.evaluators.swebench.evaluator import CHECKS as LOG_CHECKS
from outrider.evaluators.swebench.evaluator import LIBRARY as SWEBENCH
from outrider.evaluators.swebench.evaluator import ROW
from outrider.evaluators.swebench.options import SwebenchOptions
from outrider.harnesses.base import HarnessOutcome
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import Runtime, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec
from outrider.trajectory import Verdict

CONCURRENCY = (1, 32)
WARM = max(CONCURRENCY)
COMMAND = ("bash", "-c", "true")
DOUBLE = "print(2 * int(input()))\n"
SOLUTION = "solution.py"
HARBOR_TEST = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
TESTS = 200
"""Number of tests in the log that is graded."""
MARK = re.compile(rb"GRADE (\w{12})")


class Plan(msgspec.Struct, frozen=True):
    """Number of verdicts of each kind, at each concurrency. `slow` is the number for kinds that start programs."""

    verdicts: int
    slow: int


FULL, QUICK = Plan(320, 96), Plan(64, 32)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A measured kind of evaluator: an evaluator, an endless supply of replies for it, and its `floor`, which is called
    with a reply. `beside` is the floor's name. The evaluator of a `slow` kind starts programs."""

    evaluator: Evaluator
    spec: EvaluatorSpec
    replies: Iterator[str]
    floor: Callable[[str], Awaitable[object]] | None = None
    beside: str = ""
    slow: bool = False


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        host = await held.enter_async_context(Host(folder))
        url = await held.enter_async_context(serving(grader))
        http = await held.enter_async_context(aiohttp.ClientSession())
        can = resolve("runtime", "namespace").available()
        runtime = "namespace" if can.ok else "process"
        sandboxes = [await held.enter_async_context(a_sandbox(host, runtime)) for _ in range(max(CONCURRENCY))]
        every, left_out = kinds(host, url, http, isolated=can.ok)
        for name, kind in every.items():
            verdicts = plan.slow if kind.slow else plan.verdicts

            async def grade(reply: str, place: int, kind: Kind = kind) -> object:
                return await kind.evaluator.evaluate(
                    Outcome(
                        task=TaskSpec(instruction="x", harness=HarnessSpec(command=["true"]), evaluator=kind.spec),
                        runtime=sandboxes[place],
                        stop_reason=StopReason.COMPLETED,
                        harness=HarnessOutcome(),
                        transcript=(Message(role=Role.ASSISTANT, content=reply),),
                        turns=1,
                        host=host,
                    )
                )

            async def floor(reply: str, place: int, kind: Kind = kind) -> object:
                assert kind.floor is not None
                return await kind.floor(reply)

            found[name] = {"beside": kind.beside}
            await _milliseconds(grade, kind.replies, WARM, WARM)
            for width in CONCURRENCY:
                figures: dict[str, Any] = await _milliseconds(grade, kind.replies, verdicts, width)
                if kind.floor is not None:
                    figures["floor"] = await _milliseconds(floor, kind.replies, verdicts, width)
                found[name][str(width)] = figures
    return {"verdicts": plan.verdicts, "slow": plan.slow, "runtime": runtime, "left_out": left_out, "kinds": found}


@asynccontextmanager
async def a_sandbox(host: Host, kind: str) -> AsyncIterator[Runtime]:
    """Run a sandbox with the program that kind `code` tests."""
    directory = Path(tempfile.mkdtemp(dir=host.folder))
    context = SandboxContext(
        session_id=directory.name,
        attempt=1,
        directory=directory,
        host=host,
        gateway_url="http://127.0.0.1:9",
        gateway_socket=host.folder / "gateway.sock",
    )
    context.gateway_socket.touch()
    runtime: Runtime = resolve("runtime", kind).create(RuntimeSpec(kind=kind), context)
    try:
        await runtime.start()
        await runtime.write(SOLUTION, DOUBLE.encode())
        yield runtime
    finally:
        await runtime.stop()


async def grader(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the judge and the external grader as an ASGI application. The judge approves every answer, the grader gives
    a reward of 1."""
    body, more = b"", True
    while more:
        message: MutableMapping[str, Any] = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer: dict[str, Any] = {"reward": 1.0}
    if mark := MARK.search(body):
        said = {"role": "assistant", "content": f"GRADE {mark[1].decode()}: C"}
        answer = {"choices": [{"message": said}], "usage": {"prompt_tokens": 100, "completion_tokens": 7}}
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": orjson.dumps(answer)})


def grade_nothing(outcome: Outcome) -> float:
    """Return a reward at once: the function that kind `callable` calls."""
    return 1.0


def kinds(
    host: Host, url: str, http: aiohttp.ClientSession, *, isolated: bool
) -> tuple[dict[str, Kind], dict[str, str]]:
    """Return the available kinds by name, and the reasons why the other kinds are missing."""
    made = {"callable": of_spec(EvaluatorSpec(kind="callable", path="bench.graders:grade_nothing"))}
    left_out: dict[str, str] = {}
    made |= of_programs() | outside(url, http)
    if not isolated:
        del made["harbor"]
        left_out["harbor"] = "this machine cannot run namespace sandboxes"
    for library, make in ((MATH_VERIFY, of_math), (REASONING_GYM, of_reasoning), (SWEBENCH, of_logs)):
        try:
            library.require()
        except InvalidField as error:
            left_out[library.distribution] = f"{error.message}: {error.hint}"
        else:
            check = importlib.import_module(library.checks).check
            made |= make(check, host)
    return made, left_out


def of_spec(spec: EvaluatorSpec, endpoints: Endpoints | None = None, **about: Any) -> Kind:
    replies = about.pop("replies", itertools.repeat("x"))
    return Kind(evaluator=make_evaluator(spec, endpoints), spec=spec, replies=replies, **about)


def counted(reply: Callable[[int], str]) -> Iterator[str]:
    return map(reply, itertools.count(3))


def outside(url: str, http: aiohttp.ClientSession) -> dict[str, Kind]:
    """Return the kinds that send requests to a server."""
    endpoints = Endpoints([GraderConfig(name="bench", url=url)])

    async def floor(reply: str) -> None:
        async with http.post(url, data=orjson.dumps({"answer": reply})) as answer:
            await answer.read()

    return {
        name: of_spec(
            EvaluatorSpec(kind=kind, options={"grader": "bench", **options}),
            endpoints,
            replies=counted(str),
            floor=floor,
            beside="a POST to the same server",
        )
        for name, kind, options in (
            ("http", "http", {}),
            ("judge, scripted", "judge", {"by": "reference", "reference": "42"}),
        )
    }


def of_programs() -> dict[str, Kind]:
    """Return the kinds that run programs in a sandbox."""

    def bare(*argv: str, given: bytes = b"", times: int = 1) -> Callable[[str], Awaitable[None]]:
        def run() -> None:  # asyncio's subprocess is not used, because it copies the page tables of this process
            for _ in range(times):
                subprocess.run(argv, input=given, stdout=subprocess.DEVNULL, check=True)

        async def floor(_: str) -> None:
            await asyncio.to_thread(run)

        return floor

    part = {"kind": "command", "run": "true"}
    cases = {"file": SOLUTION, "inputs": ["21\n"], "outputs": ["42\n"]}
    tests = [{"write": HARBOR_TEST, "to": "/tests/test.sh"}]
    found: dict[str, tuple[EvaluatorSpec, str, Callable[[str], Awaitable[None]]]] = {
        "command": (EvaluatorSpec(run="true"), "bash by itself", bare(*COMMAND)),
        "weighted: two commands": (
            EvaluatorSpec(kind="weighted", options={"parts": {"one": part, "two": part}}),
            "bash by itself, twice",
            bare(*COMMAND, times=2),
        ),
        "code: one case": (
            EvaluatorSpec(kind="code", options=cases),
            "Python by itself",
            bare(sys.executable, "-I", "-S", "-c", DOUBLE, given=b"21\n"),
        ),
        "harbor": (EvaluatorSpec(kind="harbor", options={"tests": tests}), "bash by itself", bare(*COMMAND)),
    }
    return {name: of_spec(spec, floor=floor, beside=beside, slow=True) for name, (spec, beside, floor) in found.items()}


Check = Callable[[dict[str, Any]], dict[str, Any]]
"""The function `check` of a module in outrider/evaluators/checks."""
IN_PROCESS = "the library, in one process"


def of_math(check: Check, _: Host) -> dict[str, Kind]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math_verify warns that its own time limits are off

    def kind(gold: str, answer: Callable[[int], str]) -> Kind:
        async def floor(reply: str) -> None:
            assert check({"golds": (gold,), "answer": marked_answer(reply), "whole": True})["equal"] == gold

        return of_spec(
            EvaluatorSpec(kind="math", options={"gold": gold}),
            replies=counted(lambda number: f"So it is $\\boxed{{{answer(number)}}}$."),
            floor=floor,
            beside=IN_PROCESS,
        )

    return {
        "math: fractions": kind("\\frac{1}{2}", lambda number: f"\\frac{{{number}}}{{{2 * number}}}"),
        "math: polynomials": kind("x^2-1", lambda number: f"(x-1)(x+1)+{number}-{number}"),
    }


def of_reasoning(check: Check, _: Host) -> dict[str, Kind]:
    def kind(entry: dict[str, Any], answer: Callable[[int], str]) -> Kind:
        async def floor(reply: str) -> None:
            assert "score" in check({"entry": entry, "answer": marked_answer(reply)})

        return of_spec(
            EvaluatorSpec(kind="reasoning-gym", options={"entry": entry}),
            replies=counted(lambda number: f"<answer>{answer(number)}</answer>"),
            floor=floor,
            beside=IN_PROCESS,
        )

    chain_sum = {"question": "How much is 2 + 3?", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
    countdown = {
        "question": "Make 30 of 12, 8 and 10.",
        "answer": "12 + 8 + 10",
        "metadata": {"source_dataset": "countdown", "numbers": [12, 8, 10], "target": 30},
    }
    return {
        "reasoning-gym: chain_sum": kind(chain_sum, str),
        "reasoning-gym: countdown": kind(countdown, lambda number: f"12 + 8 + 10 + {number} - {number}"),
    }


def of_logs(check: Check, host: Host) -> dict[str, Kind]:
    """Return the kinds that grade the log of a test run. Only the grading is measured, not the command that runs the
    tests."""
    names = [f"tests/test_shop.py::test_{number}" for number in range(TESTS)]
    options = SwebenchOptions(
        instance_id="shop__shop-1",
        fail_to_pass=tuple(names[:1]),
        pass_to_pass=tuple(names[1:]),
        test_command="pytest",
        test_patch="",
        log_parser="parse_log_pytest",
        pytest=False,
    )
    row = {**options.model_dump(include=ROW), "exit_code": 0, "records": "", "key": ""}

    class Logs:
        async def evaluate(self, outcome: Outcome) -> Verdict:
            checks = await checks_of(host, LOG_CHECKS)
            checked = await checks.check({**row, "log": outcome.transcript[-1].content}, seconds=60)
            assert checked.answer is not None
            return Verdict(reward=float(checked.answer["resolved"]))

    async def floor(reply: str) -> None:
        assert check({**row, "log": reply})["resolved"]

    passed = "".join(f"PASSED {name}\n" for name in names)
    logs = counted(lambda number: f"{passed}{'=' * 20} {TESTS} passed in {number}.00s {'=' * 20}\n")
    about: dict[str, Any] = {"replies": logs, "floor": floor, "beside": IN_PROCESS}
    return {f"swebench: a log of {TESTS} tests": Kind(evaluator=Logs(), spec=EvaluatorSpec(run="true"), **about)}


async def _milliseconds(
    work: Callable[[str, int], Awaitable[object]], replies: Iterator[str], times: int, width: int
) -> dict[str, float]:
    """Do the work `times` times, `width` at once, each in its own slot. Returns milliseconds."""
    spent: list[float] = []
    todo = iter(range(times))

    async def one_after_another(place: int) -> None:
        for _ in todo:
            reply = next(replies)
            begun = time.perf_counter()
            await work(reply, place)
            spent.append(time.perf_counter() - begun)

    begun, used = time.perf_counter(), cpu_seconds()
    async with asyncio.TaskGroup() as tasks:
        for place in range(width):
            tasks.create_task(one_after_another(place))
    seconds = time.perf_counter() - begun
    cuts = statistics.quantiles(spent, n=20, method="inclusive")
    return {
        "p50_ms": 1000 * statistics.median(spent),
        "p95_ms": 1000 * cuts[-1],
        "per_second": times / seconds,
        "cpu_ms": 1000 * (cpu_seconds() - used) / times,
    }
