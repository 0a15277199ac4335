"""The evaluator `command`: exit codes, the files for the verdict and the turns, and failures of graders and
sandboxes."""

import os
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from outrider.errors import EvaluatorError, RuntimeFailure
from outrider.evaluators.factory import make_evaluator
from outrider.messages import Message, Role, Text, image_from_bytes
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import EvaluatorSpec
from outrider.trajectory import BranchKind, GradedTurn, Verdict


@pytest.fixture
def grade(outcome: Any) -> Any:
    async def of(run: str, seconds: float = 20) -> Verdict:
        spec = EvaluatorSpec(run=run, seconds=seconds)
        return await make_evaluator(spec).evaluate(outcome(spec))

    return of


@pytest.mark.parametrize(
    ("run", "reward"),
    [
        ("true", 1.0),
        ("exit 1", 0.0),
        ("test -f out.txt", 1.0),
        ("test -f nothing.txt", 0.0),
        ('echo 0.25 > "$OUTRIDER_VERDICT"', 0.25),
        ('echo 0.25 > "$OUTRIDER_VERDICT"; exit 1', 0.25),
        ('printf %s -3 > "$OUTRIDER_VERDICT"; echo noise; echo noise >&2', -3.0),
        ('echo 0.25 >> "$OUTRIDER_VERDICT"', 0.25),
        ('echo 0.25 > new; mv new "$OUTRIDER_VERDICT"', 0.25),
        ('printf 0.25 | dd of="$OUTRIDER_VERDICT" conv=notrunc', 0.25),
        ("cat", 1.0),
    ],
)
async def test_exit_codes_and_written_numbers(grade: Any, sandbox: Runtime, run: str, reward: float) -> None:
    await sandbox.write("out.txt", b"")
    assert await grade(run) == Verdict(reward=reward)


async def test_turns_are_listed_in_a_file_for_a_command_that_names_it(outcome: Any, sandbox: Runtime) -> None:
    picture = image_from_bytes("image/png", b"bytes")
    asked = Message(role=Role.USER, content="look", parts=(Text("look"), picture))
    first = GradedTurn(
        index=0,
        parent=None,
        kind=BranchKind.MAIN,
        label="",
        depth=0,
        row=0,
        messages=(asked,),
        reply=Message(role=Role.ASSISTANT, content="a cat"),
    )
    title = replace(first, index=1, kind=BranchKind.AUXILIARY, label="title", row=None, messages=(), reply=None)
    run = """
        cp "$OUTRIDER_TURNS" copy; test "$(wc -l < copy)" = 2 || exit 2
        echo '{"reward": 1, "turns": {"0": 0.5}, "rows": {"0": 2}}' > "$OUTRIDER_VERDICT"
    """
    spec = EvaluatorSpec(run=run, seconds=20)
    graded = await make_evaluator(spec).evaluate(replace(outcome(spec), calls=(first, title)))
    assert graded == Verdict(reward=1.0, turns={0: 0.5}, rows={0: 2.0})
    lines = (await sandbox.read("copy")).splitlines()
    shown = replace(first, messages=(replace(asked, parts=(Text("look"), replace(picture, data=b""))),))
    assert [msgspec.json.decode(line, type=GradedTurn) for line in lines] == [shown, title]
    assert (await sandbox.exec(f"ls {sandbox.scratch}", seconds=5)).stdout == b""


async def test_a_json_verdict(grade: Any) -> None:
    verdict = await grade(
        """echo '{"reward": 0.5, "metrics": {"passed": 2}, "reason": "half"}' > "$OUTRIDER_VERDICT" """
    )
    assert verdict == Verdict(reward=0.5, metrics={"passed": 2.0}, reason="half")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("echo why >&2; exit 2", "exited with code 2"),
        ("echo why; no-such-program", "exited with code 127"),
        ('echo why; echo 1 > "$OUTRIDER_VERDICT"; exit 3', "exited with code 3"),
        ("echo why; kill -9 $$", "exited with code 137"),
        ('echo why; echo NaN > "$OUTRIDER_VERDICT"', "NaN is not a number"),
        ('echo why; echo 1e999 > "$OUTRIDER_VERDICT"', "must be finite"),
        ('echo why; echo true > "$OUTRIDER_VERDICT"', "must be a number, not bool"),
        ('echo why; echo passed > "$OUTRIDER_VERDICT"', "neither a number nor JSON"),
        ('echo why; false > "$OUTRIDER_VERDICT"', "the verdict is empty"),
        ('echo why; : > "$OUTRIDER_VERDICT"; exit 1', "the verdict is empty"),
        ('echo why; truncate -s 7 "$OUTRIDER_VERDICT"', "the verdict is empty"),
        ('echo why; rm -f "$OUTRIDER_VERDICT"', "removed the file for the verdict"),
        ('echo why; rm -f "$OUTRIDER_VERDICT"; exit 1', "removed the file for the verdict"),
        ('echo why; head -c 2000000 /dev/zero > "$OUTRIDER_VERDICT"', "larger than"),
    ],
)
async def test_a_grader_that_fails_is_an_error_with_its_output(grade: Any, run: str, message: str) -> None:
    with pytest.raises(EvaluatorError, match=message) as caught:
        await grade(run)
    assert "why" in (caught.value.log_tail or "")


async def test_the_error_of_another_exit_code_says_how_to_answer_no(grade: Any) -> None:
    with pytest.raises(EvaluatorError, match="exited with code 2") as caught:
        await grade("grep -qx hello out.txt")
    assert "`|| exit 1`" in str(caught.value.hint)
    assert (await grade("grep -qx hello out.txt || exit 1")).reward == 0.0
    with pytest.raises(EvaluatorError, match="exited with code 127") as caught:
        await grade("no-such-program")
    assert "`|| exit 1`" not in str(caught.value.hint)


async def test_a_grader_that_hangs_is_an_error(grade: Any) -> None:
    with pytest.raises(EvaluatorError, match=r"did not end within 0\.3 s"):
        await grade("sleep 60", seconds=0.3)


async def test_the_verdict_file_is_fresh_and_outside_of_the_working_directory(grade: Any, sandbox: Runtime) -> None:
    run = 'test -f "$OUTRIDER_VERDICT" || exit 8; case "$OUTRIDER_VERDICT" in "$PWD"*) exit 9;; esac'
    run += '; echo "$OUTRIDER_VERDICT" >> paths'
    await grade(run)
    await grade(run)
    first, second = (await sandbox.read("paths")).split()
    assert first != second
    for path in (first, second):
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path.decode())


async def test_a_sandbox_that_breaks_after_grading_does_not_take_the_verdict_back(
    outcome: Any, sandbox: Runtime
) -> None:
    class Breaking:
        """The sandbox, which stops when the evaluator removes its files."""

        read, write, scratch = sandbox.read, sandbox.write, sandbox.scratch

        async def exec(self, command: Any, **options: Any) -> Any:
            if not isinstance(command, str):
                await sandbox.stop()
                os.unlink(command[-1])
            return await sandbox.exec(command, **options)

    spec = EvaluatorSpec(run="echo 0.5 > $OUTRIDER_VERDICT")
    graded = msgspec.structs.replace(outcome(spec), runtime=Breaking())
    assert await make_evaluator(spec).evaluate(graded) == Verdict(reward=0.5)


async def test_a_sandbox_that_breaks_before_its_verdict_is_read_is_no_fault_of_the_grader(
    outcome: Any, sandbox: Runtime
) -> None:
    class Breaking:
        """The sandbox, which stops when the grader has ended."""

        read, write, scratch = sandbox.read, sandbox.write, sandbox.scratch

        async def exec(self, command: Any, **options: Any) -> Any:
            result = await sandbox.exec(command, **options)
            await sandbox.stop()
            return result

    spec = EvaluatorSpec(run="true")
    with pytest.raises(RuntimeFailure):
        await make_evaluator(spec).evaluate(msgspec.structs.replace(outcome(spec), runtime=Breaking()))


async def test_a_sandbox_that_is_broken_before_grading_is_no_fault_of_the_grader(grade: Any, sandbox: Runtime) -> None:
    await sandbox.stop()
    with pytest.raises(RuntimeFailure):
        await grade("true")


async def test_no_place_for_a_verdict_is_an_error(grade: Any, sandbox: Runtime) -> None:
    await sandbox.exec(["rm", "-r", sandbox.scratch], seconds=20)
    await sandbox.exec(["touch", sandbox.scratch], seconds=20)
    with pytest.raises(EvaluatorError, match="the file for the verdict cannot be created"):
        await grade("true")
