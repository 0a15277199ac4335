"""The evaluator `callable`: sync and async callables, their exceptions, and callables that hang."""

import asyncio
import functools
import threading
from typing import Any

import pytest

from outrider.errors import EvaluatorError, RuntimeFailure
from outrider.evaluators.factory import make_evaluator
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

release = threading.Event()


def half(outcome: Any) -> Any:
    return 0.5


def option(outcome: Any) -> Any:
    return {"reward": outcome.task.evaluator.options["reward"], "reason": threading.current_thread().name}


async def counts_files(outcome: Any) -> Any:
    return Verdict(reward=float(len(await outcome.runtime.read("out.txt"))))


class Grader:
    async def __call__(self, outcome: Any) -> Any:
        return 0.75


grader = Grader()
partial = functools.partial(counts_files)


def crashes(outcome: Any) -> Any:
    return 1 / 0


def exits(outcome: Any) -> None:
    raise SystemExit(3)


def stops(outcome: Any) -> None:
    raise StopIteration


async def finds_the_sandbox_broken(outcome: Any) -> None:
    raise RuntimeFailure("sandbox gone")


def says_yes(outcome: Any) -> Any:
    return True


def is_not_a_number(outcome: Any) -> Any:
    return {"reward": float("nan")}


def hangs(outcome: Any) -> Any:
    release.wait(30)
    return 1.0


async def hangs_async(outcome: Any) -> None:
    await asyncio.Event().wait()


def times_out(outcome: Any) -> None:
    raise TimeoutError("the grader's own")


@pytest.fixture
def grade(outcome: Any) -> Any:
    async def of(name: str, **fields: Any) -> Verdict:
        spec = EvaluatorSpec(kind="callable", path=f"{__name__}:{name}", **fields)
        return await make_evaluator(spec).evaluate(outcome(spec))

    return of


async def test_sync_and_async_callables(grade: Any, sandbox: Runtime) -> None:
    await sandbox.write("out.txt", b"123")
    assert await grade("half") == Verdict(reward=0.5)
    assert await grade("option", options={"reward": 2}) == Verdict(reward=2.0, reason="outrider-evaluator")
    assert await grade("counts_files") == Verdict(reward=3.0)
    assert await grade("grader") == Verdict(reward=0.75)
    assert await grade("partial") == Verdict(reward=3.0)


@pytest.mark.parametrize(
    ("name", "message", "tail"),
    [
        ("crashes", "raised ZeroDivisionError: division by zero", "return 1 / 0"),
        ("exits", "SystemExit: 3", "RuntimeError"),
        ("stops", "StopIteration", "RuntimeError"),
        ("times_out", "raised TimeoutError: the grader's own", "times_out"),
    ],
)
async def test_an_exception_is_an_error_with_its_traceback(grade: Any, name: str, message: str, tail: Any) -> None:
    with pytest.raises(EvaluatorError, match=message) as caught:
        await grade(name)
    assert tail in (caught.value.log_tail or "")
    assert "in evaluate" not in (caught.value.log_tail or "")  # the traceback has only frames of the function
    assert "restart the service" in (caught.value.hint or "")


@pytest.mark.parametrize(("name", "message"), [("says_yes", "not bool"), ("is_not_a_number", "must be finite")])
async def test_what_is_no_verdict_is_refused(grade: Any, name: str, message: str) -> None:
    with pytest.raises(EvaluatorError, match=message):
        await grade(name)


async def test_a_broken_sandbox_stays_one(grade: Any) -> None:
    with pytest.raises(RuntimeFailure):
        await grade("finds_the_sandbox_broken")


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
async def test_a_grader_that_hangs_is_an_error(grade: Any, name: str) -> None:
    release.clear()
    try:
        with pytest.raises(EvaluatorError, match=r"did not end within 0\.2 s"):
            await grade(name, seconds=0.2)
    finally:
        release.set()
