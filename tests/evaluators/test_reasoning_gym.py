"""The reasoning-gym evaluator with the real library (`make test-real`): its scores, and answers that are code."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField
from outrider.evaluators.base import ChecksSpec, Outcome
from outrider.evaluators.checks.reasoning_sets import EVALUATED, UNUSABLE
from outrider.evaluators.factory import make_evaluator
from outrider.lab.certify.task_check import check_tasks
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec
from outrider.tasks.datasets import Example, one_of_each_reasoning_gym_set, reasoning_gym_examples
from outrider.trajectory import Verdict

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("default"),
    # `importorskip` would import the library, with matplotlib and sympy, in every worker that collects this file.
    pytest.mark.skipif(
        find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: see `make test-real`"
    ),
]

Grade = Callable[..., Awaitable[Verdict]]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    folder = tmp_path / f"node-{time.monotonic_ns()}"
    folder.mkdir()
    async with Host(folder) as made:
        yield made
    assert marked(f"{folder.name}/") == set()


@pytest.fixture
def grade(outcome: Callable[[EvaluatorSpec], Outcome], host: Host) -> Grade:
    async def of(reply: str, entry: Any, **options: Any) -> Verdict:
        spec = EvaluatorSpec(kind="reasoning-gym", options={"entry": entry, **options})
        said = (Message(role=Role.ASSISTANT, content=reply),)
        graded = msgspec.structs.replace(outcome(spec), transcript=said, host=host)
        return await make_evaluator(spec).evaluate(graded)

    return of


def one(name: str, **config: Any) -> dict[str, Any]:
    [example] = reasoning_gym_examples(name, size=1, seed=1, **config)
    return example.row


@pytest.mark.timeout(600)
async def test_every_data_set_pays_for_its_own_answer_and_not_for_another(grade: Grade, host: Host) -> None:
    from reasoning_gym.factory import DATASETS

    async def judged(name: str) -> None:
        entry = await asyncio.to_thread(one, name)
        await submitted(entry, host)
        right = await grade(f"I think <answer>{entry['answer']}</answer>", entry)
        assert (name, right.reward, right.metrics["solved"]) == (name, 1.0, 1.0)
        for other in ("wrong", "", "nan", "n a n", "0", entry["question"][:200]):
            if other != entry["answer"]:
                wrong = await grade(f"<answer>{other}</answer>", entry)
                assert wrong.reward < 1, (name, other, wrong.reason)

    assert UNUSABLE.keys() < DATASETS.keys()
    for name in sorted(DATASETS.keys() - UNUSABLE.keys()):
        await judged(name)


async def test_partial_scores_are_kept(grade: Grade) -> None:
    entry = one("countdown")
    numbers = entry["metadata"]["numbers"]
    verdict = await grade(f"<answer>{' + '.join(map(str, numbers))}</answer>", entry)
    assert verdict.reward == 0.05
    assert verdict.metrics["solved"] == 0.0
    assert "it scores 0.05 (reasoning-gym 0.1." in (verdict.reason or "")


async def test_without_a_marked_answer_there_is_all_or_nothing(grade: Grade) -> None:
    """The scorer of `emoji_mystery` gives 0.01 for any text."""
    entry = one("emoji_mystery")
    assert (await grade("<answer>I have done nothing.</answer>", entry)).reward > 0
    nothing = await grade("I have done nothing.", entry)
    assert (nothing.reward, nothing.metrics["answered"]) == (0.0, 0.0)
    assert "no answer is marked" in (nothing.reason or "")
    assert (await grade(entry["answer"], entry)).reward == 1.0


async def test_where_the_answer_is(grade: Grade) -> None:
    entry = one("chain_sum")
    gold = entry["answer"]
    for reply in (
        gold,
        f"\\boxed{{{gold}}}",
        f"\\boxed{{7}} <answer> {gold} </answer>",
        f"<answer>{gold}\n</answer> \\boxed{{7}}",
    ):
        assert (await grade(reply, entry)).reward == 1.0, reply
    assert (await grade("", entry)).reason == "there is no reply"


CODE = (
    "__import__('os').system('touch {path}')",
    "open('{path}', 'w').write('x')",
    "[open('{path}', 'w')]",
    "\x0bopen('{path}', 'w')",
    " \t\nopen('{path}', 'w')",
    "__import__('socket').create_connection(('127.0.0.1', 9))",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os')._exit(0)",
    "print('{{\"score\": 1}}')",
    '[__import__(\'os\').write(fd, b\'{{"score": 1}}\\n{{"status": 0, "seconds": 0}}\') for fd in range(9)]',
    "().__class__.__base__.__subclasses__()",
    "(lambda: 1)()",
    'f\'{{open("{path}", "w")}}\'',
    "S('__import__(\"os\")._exit(0)')",
    "Symbol.__init__.__globals__",
    "sin.__class__",
    "9**9**9**9",
    "factorial(10**9)",
    "'a' * 10**12",
    "[0] * 10**12",
    "(" * 3000 + "1" + ")" * 3000,
    "-" * 100_000 + "1",
    "1" * 10_000_000,
    "1\0",
    "Integral(x, x)",
)


async def test_an_answer_that_is_code_is_not_run(grade: Grade, tmp_path: Path) -> None:
    path = tmp_path / "written"
    for name in sorted({*EVALUATED, "number_sorting", "complex_arithmetic", "chain_sum"}):
        entry = one(name)
        answers = [code.format(path=path) for code in CODE]
        verdicts = await asyncio.gather(
            *(grade(f"<answer>{answer}</answer>", entry, seconds=0.5) for answer in answers)
        )
        for answer, verdict in zip(answers, verdicts, strict=True):
            assert verdict.reward < 0.2, (name, answer[:60], verdict.reason)
        assert (await grade(entry["answer"], entry)).reward == 1.0, name
    assert not path.exists()


async def test_a_sum_is_not_made_of_names(grade: Grade) -> None:
    entry = one("countdown")
    zero, one_ = "(log(E) - log(E))", "log(E)"
    numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
    trick = " + ".join(f"{number} * {zero}" for number in numbers) + f" + {one_}" * target
    verdict = await grade(f"<answer>{trick}</answer>", entry)
    assert verdict.reward == 0.0
    assert "not the plain expression" in (verdict.reason or "")


async def submitted(entry: Any, host: Host) -> None:
    evaluator = make_evaluator(EvaluatorSpec(kind="reasoning-gym", options={"entry": entry}))
    assert isinstance(evaluator, ChecksSpec)
    await evaluator.check_spec(host)


async def test_what_cannot_be_scored_is_refused_at_submission(host: Host) -> None:
    good = one("chain_sum")
    name = "entry.metadata.source_dataset"
    code = {**one("number_sorting"), "answer": "__import__('os')._exit(0)"}
    cases: list[tuple[Any, str, str]] = [
        *(({**good, "metadata": {"source_dataset": bad}}, name, why) for bad, why in UNUSABLE.items()),
        ({**good, "metadata": {}}, name, "the name of a data set"),
        ({**good, "metadata": {"source_dataset": "nosuch"}}, "entry", "no data set 'nosuch'"),
        ({**good, "answer": None}, "entry.answer", "own answer"),
        ({**good, "metadata": {"source_dataset": "countdown"}}, "entry", "not 1"),
        (code, "entry", "no plain expression"),
        ("x", "entry", "must be an object"),
    ]
    for entry, field, message in cases:
        with pytest.raises(InvalidField, match=message) as caught:
            await submitted(entry, host)
        assert caught.value.field == f"task.evaluator.options.{field}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.nightly)])
async def test_one_of_each_data_set_pays_for_its_solution_and_nothing_for_nothing(tmp_path: Path, step: int) -> None:
    """The check of tasks finds no problem in one task of every twelfth data set, and nightly of all 95.
    `test_every_data_set_pays_for_its_own_answer_and_not_for_another` covers all data sets in every run."""
    examples = one_of_each_reasoning_gym_set()
    assert len(examples) == 95
    reports = await check_tasks(examples[::step], folder=tmp_path, at_once=4)
    assert [(report.id, report.problems) for report in reports if report.problems] == []


def test_examples_are_the_same_for_the_same_seed() -> None:
    def made(**more: Any) -> list[Example]:
        return reasoning_gym_examples("intermediate_integration", size=6, seed=4, **more)

    assert made() == made()
    assert len(made()) == 6
    assert not any("Integral" in example.row["answer"] for example in made())
    first = made()[0]
    assert json.loads(json.dumps(first.task)) == first.task
    assert first.row["answer"] not in first.task["instruction"]
    with pytest.raises(InvalidField, match="refuses 'nosuch'"):
        reasoning_gym_examples("nosuch", size=1)
    with pytest.raises(InvalidField, match="pays in full"):
        reasoning_gym_examples("puzzle24", size=1)
    with pytest.raises(InvalidField, match="min_terms"):
        reasoning_gym_examples("chain_sum", size=1, min_terms=0)
