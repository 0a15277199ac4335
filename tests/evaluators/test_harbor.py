"""Kind `harbor` in real sandboxes: Harbor's rules for the files that test.sh writes, and files that the agent left at
the same paths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from cli.test_examples import needs_namespaces
from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.factory import make_evaluator
from outrider.spec import EvaluatorSpec

from .bench import Bench, a_bench

pytestmark = needs_namespaces
TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with a_bench() as bench:
        yield bench


def spec(test: str, seconds: float = 20, **options: Any) -> EvaluatorSpec:
    tests = [{"write": test, "to": "/tests/test.sh"}, {"write": "AP8=", "encoding": "base64", "to": "/tests/d/bytes"}]
    return EvaluatorSpec(kind="harbor", seconds=seconds, options={"tests": tests, **options})


GRADED: dict[str, tuple[float, dict[str, float]]] = {
    f"echo ' 0.5' > {TEXT}; exit 7": (0.5, {"reward": 0.5}),
    f"#!/bin/sh\necho 1e0 > {TEXT}": (1.0, {"reward": 1.0}),
    f"""echo '{{"reward": -2, "speed": 3.5}}' > {JSON}; echo 9 > {TEXT}""": (-2.0, {"reward": -2.0, "speed": 3.5}),
    f"""echo '{{"passed": true}}' > {JSON}""": (1.0, {"passed": 1.0}),
    f'[ "$(pwd) $MODE" = "/work it\'s" ] && echo 1 > {TEXT}': (1.0, {"reward": 1.0}),
    f"[ $(wc -c < /tests/d/bytes) = 2 ] && echo 1 > {TEXT}": (1.0, {"reward": 1.0}),
}
ERRORS: dict[str, str] = {
    "echo said >&2": "wrote neither",
    f"echo > {TEXT}": "no rewards: could not convert",
    f"touch {JSON}; echo 1 > {TEXT}": "reward.json is no rewards",
    f"echo nan > {TEXT}": "must be finite",
    f"echo 1e999 > {TEXT}": "must be finite",
    f"echo '[1]' > {JSON}": "not an object",
    f"echo 1 > {JSON}": "not an object",
    f"""echo '{{"reward": NaN}}' > {JSON}""": "must be finite",
    f"""echo '{{"reward": 1e309}}' > {JSON}""": "must be finite",
    f"""echo '{{"reward": "1"}}' > {JSON}""": "must be a number",
    f"""echo '{{"reward": 1{"0" * 400}}}' > {JSON}""": "too large",
    f"""echo '{{"reward": 1, "x": null}}' > {JSON}""": "must be a number",
    f"""echo '{{"a": 1, "b": 2}}' > {JSON}""": "none of it is 'reward'",
    f"echo '{{}}' > {JSON}": "none of it is 'reward'",
    f"mkdir {JSON}": "is a folder",
    f"head -c 2000000 /dev/zero > {JSON}": "reward.json cannot be read: .* is larger than 1048576 bytes",
}


async def test_the_output_of_the_tests_is_logged(bench: Bench) -> None:
    """The output is also logged if the tests write no reward."""
    assert (await bench.grade(spec(f"echo looked; echo why >&2; echo 0 > {TEXT}"))).reward == 0.0
    assert bench.log == b"looked\nwhy\n"
    with pytest.raises(EvaluatorError, match="wrote neither"):
        await bench.grade(spec("echo again"))
    assert bench.log == b"looked\nwhy\nagain\n"


async def test_what_grades_and_what_does_not(bench: Bench) -> None:
    for test, (reward, metrics) in GRADED.items():
        verdict = await bench.grade(spec(test, env={"MODE": "it's"}))
        assert (verdict.reward, verdict.metrics) == (reward, metrics), test
    for test, message in ERRORS.items():
        with pytest.raises(EvaluatorError, match=message) as raised:
            await bench.grade(spec(test))
        assert raised.value.inside or "none of it" in message


async def test_a_failure_shows_what_the_tests_said(bench: Bench) -> None:
    with pytest.raises(EvaluatorError) as raised:
        await bench.grade(spec("echo out; echo err >&2; nosuch-program"))
    assert raised.value.log_tail is not None
    assert all(word in raised.value.log_tail for word in ("out", "err", "nosuch-program: command not found"))
    with pytest.raises(EvaluatorError, match=r"did not end within 0\.5 s") as raised:
        await bench.grade(spec("echo begun; sleep 60", seconds=0.5))
    assert "begun" in str(raised.value.log_tail)


@pytest.mark.parametrize(
    "before",
    [
        f"mkdir -p /logs/verifier && echo 1 > {TEXT}",
        f"mkdir -p {JSON}/x {TEXT}/y",
        f"mkdir -p /logs/verifier && ln -s /proc/version {JSON}",
        "mkdir -p /logs/verifier/test-stdout.txt",
        "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh && chmod 555 /tests/test.sh",
    ],
)
async def test_what_the_agent_left_there_is_not_read(bench: Bench, before: str) -> None:
    assert (await bench.sandbox.exec(before, seconds=10)).exit_code == 0
    with pytest.raises(EvaluatorError, match="wrote neither"):
        await bench.grade(spec("true"))
    assert (await bench.grade(spec(f"echo 0 > {TEXT}"))).reward == 0.0


async def test_excluded_files_are_taken_out_as_tar_leaves_them_out(bench: Bench) -> None:
    """The same patterns, given to tar and to the evaluator, leave the same files."""
    made = "cd /x && mkdir -p a/b/c 'sp ace' && touch top.o a/k.o a/b/c/keep a/b/gone a/b/c/x.pyc 'sp ace/y' '*'"
    patterns = ["*.o", "b/gone", "c/*.pyc", "sp ace/", "[*]"]
    told = " ".join(f"--exclude='{pattern.rstrip('/')}'" for pattern in patterns)
    await bench.sandbox.exec(f"mkdir /x && {made} && mkdir /by-tar && tar c {told} . | tar x -C /by-tar", seconds=10)
    listed = f"cd /x && find . | sort > /ours; cd /by-tar && find . | sort | cmp - /ours && echo 1 > {TEXT}"
    without = [{"folder": "/x", "patterns": patterns}, {"folder": "/nowhere", "patterns": ["x"]}]
    assert (await bench.grade(spec(listed, without=without))).reward == 1.0
    assert (await bench.sandbox.exec("find /x -type f", seconds=10)).stdout.splitlines() == [b"/x/a/b/c/keep"]


@pytest.mark.parametrize(("values", "reward"), [("1, 0.5, 0.75", 0.75), ("1, 9", 1.0), ("-3, 1", 0.0), ("0.25", 0.25)])
async def test_the_mean_of_all_values_is_between_0_and_1(bench: Bench, values: str, reward: float) -> None:
    named = ", ".join(f'"{number}": {value}' for number, value in enumerate(values.split(", ")))
    verdict = await bench.grade(spec(f"echo '{{{named}}}' > /logs/verifier/reward.json", mean=True))
    assert verdict.reward == reward
    assert list(verdict.metrics.values()) == [float(value) for value in values.split(", ")]


async def test_no_value_has_no_mean(bench: Bench) -> None:
    with pytest.raises(EvaluatorError, match="reward nothing"):
        await bench.grade(spec("echo '{}' > /logs/verifier/reward.json", mean=True))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"test": []}, "options.test"), ({"tests": [{"write": "x"}]}, "options.tests.0.to"), ({"env": {"1": ""}}, "env")],
)
def test_wrong_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        make_evaluator(EvaluatorSpec(kind="harbor", options=options))
    assert field in str(raised.value.field)
