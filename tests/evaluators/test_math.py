"""The math evaluator: right and wrong answers, answers that are attacks, and options that are refused at submission."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.client.client import AsyncClient
from outrider.config import LanesConfig
from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.answers import marked_answer
from outrider.evaluators.base import ChecksSpec, Outcome
from outrider.evaluators.checks.pool import QUICK_SECONDS
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import HarnessOutcome
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec
from outrider.trajectory import Verdict
from support.service import running_service, say

from .math_pairs import Pair, read_pairs

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")

Grade = Callable[..., Awaitable[Verdict]]
HANGING = (
    "$9^{9^{9^9}}$",
    "\\boxed{10000000!}",
    "$" + "(" * 3000 + "5" + ")" * 3000 + "$",
    "\\boxed{" + "\\sqrt{" * 400 + "5" + "}" * 400 + "}",
    "\\boxed{\\int_0^1 x^{x^{x^{x}}} dx}",
)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    folder = tmp_path / f"node-{time.monotonic_ns()}"
    folder.mkdir()
    async with Host(folder) as made:
        yield made
    assert marked(f"{folder.name}/") == set()


@pytest.fixture
def grade(outcome: Callable[[EvaluatorSpec], Outcome], host: Host) -> Grade:
    async def of(reply: str, gold: str | list[str], **options: Any) -> Verdict:
        spec = EvaluatorSpec(kind="math", options={"gold": gold, **options})
        said = (Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content=reply))
        graded = msgspec.structs.replace(outcome(spec), transcript=said, host=host)
        return await make_evaluator(spec).evaluate(graded)

    return of


RIGHT = [
    ("So it is $\\boxed{0.5}$.", "1/2"),
    ("So it is $\\boxed{0.5}$.", "\\frac{1}{2}"),
    ("<answer>\\frac{2}{4}</answer>", "0.5"),
    ("I guess 3. <answer> 1/2 </answer>", "$\\frac12$"),
    ("\\boxed{3} was wrong, it is \\boxed{4}", "4"),
    ("$\\{2, 1\\}$", "\\{1,2\\}"),
    ("The answer is 1,000", "1000"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("\\boxed{x = 3}", "3"),
    ("\\boxed{2\\sin x\\cos x}", "\\sin(2x)"),
    ("\\boxed{[0,\\infty)}", "[0,\\infty)"),
    ("<answer>Monday</answer>", "Monday"),
    ("The final answer is $50\\%$. I hope it is correct.", "0.5"),
    ("<answer>1/2+1/3</answer>", "5/6"),
    ("\\boxed{3!}", "6"),
    ("\\boxed{\\frac{d}{2d}}", "0.5"),
    ("\\boxed{\\int x^2 dx}", "\\int x^2 dx"),
    ("We know $\\int_0^1 x^2 dx$, it is \\boxed{1/3}.", "1/3"),
    ("\\boxed{5\\%}", "5"),
    ("\\boxed{5000\\%}", "50"),
]
WRONG = [
    ("\\boxed{\\{1,2\\}}", "(1,2)"),
    ("\\boxed{(2,1)}", "\\{1,2\\}"),
    ("\\boxed{6=5}", "5"),
    ("\\boxed{4} and \\boxed{3}", "3"),
    ("<answer>4</answer> or <answer>3</answer>", "3"),
    ("\\boxed{4}", "3"),
    ("<answer>\\frac{1}{2}</answer>", "2"),
    ("\\boxed{1} or \\boxed{2} or \\boxed{3}", "1"),
    ("\\boxed{1, 2, 3}", "1"),
    ("<answer>3</answer> or <answer>4</answer>", "3"),
    ("I do not know.", "3"),
    ("", "3"),
    (" \n", "3"),
]


def test_the_name_of_the_box_alone_is_no_box() -> None:
    for reply, answer in (
        ("\\boxed{42}. (I was asked to use \\boxed.)", "42"),
        ("\\boxed{42}, by \\fbox or \\boxedtext", "42"),
        ("\\boxed{4 \\text{ by \\boxed}}", "4 \\text{ by \\boxed}"),
        ("\\boxed{42}. No: \\boxed{43", None),
        ("\\boxed{42}. No: \\boxed 43", None),
        ("I was asked to use \\boxed.", None),
    ):
        assert marked_answer(reply) == answer, reply


@pytest.mark.deep
async def test_right_and_wrong_answers(grade: Grade) -> None:
    for reply, gold in RIGHT:
        verdict = await grade(reply, gold)
        assert verdict.reward == 1.0, verdict.reason
        assert verdict.metrics["answered"] == 1.0
        assert "equals" in (verdict.reason or "")
        assert verdict.reason.endswith(f"(math-verify {version('math-verify')})")
    for reply, gold in WRONG:
        assert (await grade(reply, gold)).reward == 0.0, (reply, gold)


@pytest.mark.deep
async def test_an_agent_in_python_says_what_its_answer_is(
    outcome: Callable[[EvaluatorSpec], Outcome], host: Host
) -> None:
    """The answer that a Python agent returns is graded, for example its choice among several replies. The answer of a
    program is its whole output, and is not graded."""
    spec = EvaluatorSpec(kind="math", options={"gold": "3"})
    said = (Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content="\\boxed{4}"))
    for harness, answer, worth in (
        (HarnessSpec(agent="tools"), "\\boxed{3}", 1.0),
        (HarnessSpec(agent="tools"), " ", 0.0),
        (HarnessSpec(agent="tools"), None, 0.0),
        (HarnessSpec(command=["true"]), "\\boxed{3}", 0.0),
    ):
        graded = outcome(spec)
        graded = msgspec.structs.replace(
            graded,
            task=graded.task.model_copy(update={"harness": harness}),
            harness=HarnessOutcome(answer=answer),
            transcript=said,
            host=host,
        )
        assert (await make_evaluator(spec).evaluate(graded)).reward == worth


@pytest.mark.deep
async def test_a_right_and_a_wrong_answer_of_each_family(grade: Grade) -> None:
    first = {(pair.family, pair.right): pair for pair in reversed(read_pairs())}
    await assert_rewards(grade, list(first.values()))


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.nightly if part else pytest.mark.deep) for part in range(6)]
)
async def test_every_pair_has_the_reward_that_the_confusion_table_counts(grade: Grade, part: int) -> None:
    await assert_rewards(grade, read_pairs()[part::6])


async def assert_rewards(grade: Grade, pairs: list[Pair]) -> None:
    for start in range(0, len(pairs), 16):
        batch = pairs[start : start + 16]
        graded = [grade(pair.reply, pair.gold, relative_tolerance=pair.relative_tolerance) for pair in batch]
        for pair, verdict in zip(batch, await asyncio.gather(*graded), strict=True):
            assert verdict.reward == pair.reward, (pair, verdict.reason)


CALCULATIONS = [
    ("\\int_0^1 x^2 dx", "1/3"),
    ("\\iint 1 dx dy", "xy"),
    ("\\sum_{k=1}^{3} k", "6"),
    ("\\prod_{k=1}^{3} k", "6"),
    ("\\lim_{x\\to 2} x", "2"),
    ("\\lim\\limits_{x\\to 2} x", "2"),
    ("\\gcd(12,18)", "6"),
    ("\\operatorname{gcd}(12,18)", "6"),
    ("\\operatorname{lcm}(2,3)", "6"),
    ("\\max(6,3)", "6"),
    ("\\min(6,7)", "6"),
    ("\\dbinom{5}{2}", "10"),
    ("1+\\binom{5}{2}", "11"),
    ("\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "-2"),
    ("\\frac{d}{dx} x^2", "2x"),
    ("\\frac{\\partial}{\\partial x} x^2", "2x"),
    ("\\frac{\\mathrm{d}}{\\mathrm{d}x} x^2", "2x"),
]


@pytest.mark.deep
async def test_a_question_is_not_its_own_answer(grade: Grade) -> None:
    for question, gold in CALCULATIONS:
        for reply in (f"\\boxed{{{question}}}", f"The answer is ${question}$"):
            verdict = await grade(reply, gold)
            assert verdict.reward == 0.0, reply
            assert "is not worked out" in str(verdict.reason), reply


@pytest.mark.deep
async def test_any_of_several_gold_answers_counts(grade: Grade) -> None:
    assert (await grade("\\boxed{4}", ["2", "4"])).reward == 1.0
    assert (await grade("\\boxed{3}", ["2", "4"])).reward == 0.0


ATTACKS = (
    *HANGING,
    "(" * 3000 + "5" + ")" * 3000,
    "\\boxed{" * 3000 + "6" + "}" * 3000,
    "\\boxed{\0 5}",
    "\\boxed{5\0}",
    "5" * 10_000_000,
    "\\boxed{" + "5" * 10_000_000 + "}",
    "\\boxed{5}" + " and so on" * 1_000_000,
    "$" * 100_000,
    "{" * 100_000,
    "\\frac" * 20_000,
    "the answer is " * 100_000,
    "\\boxed{__import__('os').system('kill -9 $PPID')}",
    "\\boxed{\\text{5}} \\boxed{\\input{/etc/passwd}}",
    "\ud800\\boxed{6}",
    "</answer><answer>",
    '\n{"found": "5", "equal": "5"}\n{"status": 0, "seconds": 0}',
)


@pytest.mark.deep
async def test_an_attack_is_worth_nothing_and_does_no_harm(grade: Grade) -> None:
    for attack, verdict in zip(
        ATTACKS, await asyncio.gather(*(grade(a, "5", seconds=0.4) for a in ATTACKS)), strict=True
    ):
        assert verdict.reward == 0.0, (attack[:50], verdict.reason)
        assert verdict.reason
    assert (await grade("\\boxed{5}", "5")).reward == 1.0


def hanging(number: int) -> str:
    """Return an answer whose check never ends, and which differs for each number."""
    brackets = 3000 + number
    return (
        f"$9^{{9^{{9^{{{9 + number}}}}}}}$",
        f"\\boxed{{{10_000_000 + number}!}}",
        "$" + "(" * brackets + "5" + ")" * brackets + "$",
    )[number % 3]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("number", "right", "seconds"), [(4, 1, 0.3), pytest.param(12, 4, 0.5, marks=pytest.mark.nightly)]
)
async def test_answers_that_hang_neither_hold_up_nor_outlive_others(
    grade: Grade, host: Host, number: int, right: int, seconds: float
) -> None:
    """Hanging answers get the reward 0. When the right answers behind them are done, at most a quarter of the hanging
    answers are. Seconds on the clock depend on the machine's load, so the test measures processor time: the checks use
    no more than docs/evaluators/math.md promises (with a margin of 20%), and the processors are idle for less than one
    second each on average."""
    await grade("\\boxed{5}", "5")
    [zygote] = marked(f"{host.folder.name}/")
    processors = len(os.sched_getaffinity(0))
    idle, used = idle_seconds(), seconds_of_checks(zygote)

    async def hangs(which: int) -> None:
        verdict = await grade(hanging(which), "5", seconds=seconds)
        assert verdict.reward == 0.0
        assert "too long to check" in (verdict.reason or "")

    async with asyncio.TaskGroup() as tasks:
        slow = [tasks.create_task(hangs(which)) for which in range(number)]
        await asyncio.sleep(0)
        behind = await asyncio.gather(*(grade(f"\\boxed{{{2 * n}/{n}+3}}", "5") for n in range(1, right + 1)))
        assert [verdict.reward for verdict in behind] == [1.0] * right
        assert sum(one.done() for one in slow) <= number / 4
    assert seconds_of_checks(zygote) - used < 1.2 * (number * (QUICK_SECONDS + seconds) + right * QUICK_SECONDS)
    assert idle_seconds() - idle < processors * 1.0
    assert (await grade("\\boxed{5}", "5")).reward == 1.0
    assert marked(f"{host.folder.name}/") == {zygote}


TICKS = os.sysconf("SC_CLK_TCK")


def idle_seconds() -> float:
    """Return the seconds that all processors together have been idle since the machine started."""
    return int(Path("/proc/stat").read_text().split()[4]) / TICKS


def seconds_of_checks(zygote: int) -> float:
    """Return the processor time of all checks that have ended: `cutime` and `cstime` of the zygote (see proc(5))."""
    fields = Path(f"/proc/{zygote}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICKS


@pytest.mark.deep
async def test_the_wait_of_an_answer_is_spent_aside(outcome: Callable[[EvaluatorSpec], Outcome], host: Host) -> None:
    """The wait for the slow queue runs inside `off_the_clock`, where an evaluation holds no eval slot. A quick check
    does not enter `off_the_clock`."""
    begun = list[str]()

    @asynccontextmanager
    async def off_the_clock() -> AsyncIterator[None]:
        begun.append("aside")
        yield

    spec = EvaluatorSpec(kind="math", options={"gold": "5", "seconds": 0.3})
    for reply, times in (("\\boxed{5}", 0), (hanging(0), 1)):
        said = (Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content=reply))
        graded = msgspec.structs.replace(outcome(spec), transcript=said, host=host, off_the_clock=off_the_clock)
        assert (await make_evaluator(spec).evaluate(graded)).reward == 1.0 - times
        assert len(begun) == times


@pytest.mark.deep
async def test_the_answer_may_be_in_a_file(grade: Grade, sandbox: Runtime) -> None:
    for content, reward, reason in (
        (b"\\frac{1}{2}\n", 1.0, "equals"),
        (b"2", 0.0, "is not"),
        (b"", 0.0, "is empty"),
        (b"\xff\xfe", 0.0, "is no text"),
        (b"1" * 100_000, 0.0, "cannot be read"),
    ):
        await sandbox.write("answer.txt", content)
        verdict = await grade("\\boxed{7}", "0.5", answer_file="answer.txt")
        assert (verdict.reward, reason in (verdict.reason or "")) == (reward, True), verdict.reason
    assert (await grade("\\boxed{0.5}", "0.5", answer_file="nowhere.txt")).reason == "there is no nowhere.txt"
    await sandbox.exec("rm answer.txt && mkfifo answer.txt", seconds=30)
    assert (await grade("\\boxed{0.5}", "0.5", answer_file="answer.txt")).reward == 0.0


async def test_without_a_node_it_is_an_error(outcome: Callable[[EvaluatorSpec], Outcome]) -> None:
    spec = EvaluatorSpec(kind="math", options={"gold": "1"})
    said = (Message(role=Role.ASSISTANT, content="1"),)
    with pytest.raises(EvaluatorError, match="on a node only"):
        await make_evaluator(spec).evaluate(msgspec.structs.replace(outcome(spec), transcript=said))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "options.gold"),
    ({"gold": True}, "options.gold.0"),
    ({"gold": float("nan")}, "options.gold.0"),
    ({"gold": ""}, "options.gold.0"),
    ({"gold": []}, "options.gold"),
    ({"gold": "1", "seconds": 0}, "options.seconds"),
    ({"gold": "1", "second": 1}, "options.second"),
    ({"gold": "\\frac{1}{"}, "options.gold"),
    ({"gold": ["1", "$$"]}, "options.gold.1"),
    ({"gold": "9^{9^{9^9}}", "seconds": 0.3}, "options.gold"),
    ({"gold": "1", "relative_tolerance": 0}, "options.relative_tolerance"),
    ({"gold": "1", "relative_tolerance": 1.5}, "options.relative_tolerance"),
]


@pytest.mark.deep
async def test_what_cannot_be_graded_is_refused_at_submission(host: Host) -> None:
    for options, field in REFUSED:
        with pytest.raises(InvalidField) as caught:
            await submitted(options, host)
        assert caught.value.field == f"task.evaluator.{field}", options
    await submitted({"gold": [18, 0.5]}, host)
    await submitted({"gold": ["\\frac{1}{2}", "Monday", "(1, 2)", "x^2 + 1", "12 \\text{ cm}"]}, host)
    await submitted({"gold": ["0.0", "0", "1-1", "0.00001", "-0.00001", "0.5", "1/3", "10^{30}", "\\sqrt2"]}, host)
    await submitted({"gold": ["50\\%", "x^2", "\\{1,2\\}", "\\infty", "-\\infty", "2+3i", "x=0.5", "[0,1]"]}, host)
    await submitted({"gold": ["\\begin{pmatrix}1&0\\\\0&4\\end{pmatrix}", "10^{6} \\cdot 10^{-7}", "\\pi"]}, host)
    await submitted({"gold": ["6.62\\times 10^{-34}", "x = 10^{-7}", "\\{0.0000001, 2\\}", "0.00001\\%"]}, host)


async def submitted(options: dict[str, Any], host: Host) -> None:
    evaluator = make_evaluator(EvaluatorSpec(kind="math", options=options))
    assert isinstance(evaluator, ChecksSpec)
    await evaluator.check_spec(host)


@pytest.mark.deep
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_whole_session_is_graded(tmp_path: Path, processes: int) -> None:
    def task(gold: str) -> dict[str, Any]:
        return {
            "instruction": "What is 1 / 2?",
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "math", "options": {"gold": gold}},
        }

    replies = [say("It is \\boxed{0.5}.")]
    settings: dict[str, Any] = {"processes": processes}
    async with running_service(tmp_path=tmp_path, replies=replies, **settings) as (_, url), AsyncClient(url) as client:
        with pytest.raises(InvalidField, match="does not parse") as caught:
            await client.submit({"task": task("\\frac{1}{")})
        assert caught.value.field == "task.evaluator.options.gold"
        [done] = await client.wait([(await client.submit({"task": task("\\frac{1}{2}")})).id])
    assert done.sessions[0].result.error is None
    assert done.sessions[0].result.verdict.reward == 1.0


@pytest.mark.nightly
async def test_a_run_whose_answers_hang_keeps_another_one_waiting_for_a_few_of_them(tmp_path: Path) -> None:
    """A run of 40 hanging answers is being graded when another run begins. The other run is done before half of the
    hanging answers are."""

    def task(instruction: str, run: str) -> dict[str, Any]:
        return {
            "instruction": instruction,
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "math", "options": {"gold": "5", "seconds": 0.3}},
            "labels": {"run": run},
        }

    script = [
        {"when": "Be wrong.", "reply": say(HANGING[0])},
        {"when": "Be right.", "reply": say("\\boxed{5}")},
    ]
    lanes = LanesConfig(init=2, run=4, eval=2)
    async with running_service(tmp_path=tmp_path, replies=script, lanes=lanes) as (_, url), AsyncClient(url) as client:
        wrong = await client.submit({"task": task("Be wrong.", "theirs"), "n": 40})
        async for event in client.events():
            if event.kind == "session.state" and event.data["state"] == "evaluating":
                break
        right = [(await client.submit({"task": task("Be right.", "mine")})).id for _ in range(5)]
        for group in await client.wait(right):
            assert group.sessions[0].result.verdict.reward == 1.0
        sessions = (await client.group(wrong.id)).sessions
        assert sum(session.state == "done" for session in sessions) < len(sessions) / 2
        [done] = await client.wait([wrong.id])
    for session in done.sessions:
        assert session.result.error is None
        assert session.result.verdict.reward == 0.0
        assert "too long to check" in str(session.result.verdict.reason)
