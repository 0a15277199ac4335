import json
from typing import Any

import pytest

from outrider.errors import EngineUnavailable, HarnessError, RuntimeFailure
from outrider.harnesses.factory import make_harness
from outrider.harnesses.tool_agent import MAX_RESULT, TOOLS
from outrider.messages import Message, Role
from outrider.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import calls, context, results, says


def bash(command: str) -> tuple[str, str]:
    return ("bash", json.dumps({"command": command}))


def python(code: str) -> tuple[str, str]:
    return ("python", json.dumps({"code": code}))


async def run(sandbox: Runtime, *replies: Any, options: Any = None) -> Any:
    spec = HarnessSpec(agent="tools", options=options or {})
    given = context(sandbox, spec, *replies)
    harness = make_harness(spec)
    await harness.install(given)
    return await harness.run(given), given.model


def test_the_tools_as_the_model_sees_them() -> None:
    assert json.dumps(TOOLS["bash"]) == (
        '{"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": '
        '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}'
    )
    assert json.dumps(TOOLS["python"]) == (
        '{"type": "function", "function": {"name": "python", "description": "Run Python code.", "parameters": '
        '{"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}'
    )


async def test_it_calls_tools_until_it_answers(sandbox: Runtime) -> None:
    first = calls(bash("echo 42 > answer.txt; cat answer.txt"))
    outcome, model = await run(sandbox, first, says("42"), options={"system": "Be brief."})
    assert outcome.answer == "42"
    assert await sandbox.read("answer.txt") == b"42\n"
    assert model.tools == [["bash", "python"]] * 2
    assert model.asked[0] == [
        Message(role=Role.SYSTEM, content="Be brief."),
        Message(role=Role.USER, content="do it"),
    ]
    assert model.asked[1][2:] == [first, Message(role=Role.TOOL, content="42", tool_call_id="call_0")]


async def test_shells_keep_their_state_and_parallel_calls_run_in_order(sandbox: Runtime) -> None:
    _, model = await run(
        sandbox,
        calls(bash("x=1; cd /"), python("y = 20"), bash("echo $x $PWD"), python("print(y + 1)")),
        says("done"),
    )
    sent = results(model.asked[1])
    assert len(sent) == 4
    assert sent[2] == "1 /"
    assert sent[3] == "21"
    assert [message.tool_call_id for message in model.asked[1][2:]] == ["call_0", "call_1", "call_2", "call_3"]


@pytest.mark.deep
async def test_exit_codes_and_time_limits_are_told(sandbox: Runtime) -> None:
    _, model = await run(
        sandbox,
        calls(bash("echo a; echo b >&2; (exit 7)"), bash("(exit 2)"), bash("sleep 60"), bash("echo alive; echo")),
        says("done"),
        options={"tool_seconds": 2},
    )
    assert results(model.asked[1]) == [
        "a\nb\n[exit code 7]",
        "[exit code 2]",
        "[timed out after 2 s]",
        "alive\n",
    ]


async def test_malformed_and_unknown_calls_get_a_result_that_says_so(sandbox: Runtime) -> None:
    bad = ["", "{", "[]", '"ls"', '{"cmd": "ls"}', '{"command": 3}', '{"command": null}', r'{"command": "\ud83d"}']
    _, model = await run(
        sandbox,
        calls(*(("bash", arguments) for arguments in bad), ("perl", "{}"), python("print(1)")),
        says("done"),
        options={"tools": ["bash"]},
    )
    *malformed, unknown, refused = results(model.asked[1])
    assert malformed == ['malformed arguments: give a JSON object with a string "command"'] * len(bad)
    assert unknown == "unknown tool 'perl'; known: bash"
    assert refused == "unknown tool 'python'; known: bash"


async def test_a_shell_that_the_model_ends_is_replaced(sandbox: Runtime) -> None:
    _, model = await run(sandbox, calls(bash("exit 0"), bash("touch never"), bash("ls; echo again")), says("done"))
    assert results(model.asked[1])[1:] == ["[the bash session ended; the next call starts a new one]", "again"]


async def test_a_broken_sandbox_is_not_the_models_fault(sandbox: Runtime) -> None:
    await sandbox.stop()
    with pytest.raises(RuntimeFailure):
        await run(sandbox, calls(bash("true")), says("done"))


async def test_a_long_result_is_cut_in_the_middle(sandbox: Runtime) -> None:
    _, model = await run(sandbox, calls(bash("echo start; yes | head -c 100000; echo end")), says("done"))
    (sent,) = results(model.asked[1])
    assert sent.startswith("start\ny\n")
    assert sent.endswith("\nend")
    assert "characters cut ...]" in sent
    assert len(sent) < MAX_RESULT + 100


async def test_it_stops_at_max_turns_with_the_last_calls_run(sandbox: Runtime) -> None:
    outcome, model = await run(
        sandbox, calls(bash("touch a")), calls(bash("touch b")), says("never asked"), options={"max_turns": 2}
    )
    assert outcome.answer is None
    assert len(model.asked) == 2
    assert await sandbox.read("b") == b""


async def test_without_tools_it_only_answers(sandbox: Runtime) -> None:
    outcome, model = await run(sandbox, says("4"), options={"tools": []})
    assert outcome.answer == "4"
    assert model.tools == [[]]


async def test_a_failed_model_call_stays_what_it_is(sandbox: Runtime) -> None:
    with pytest.raises(EngineUnavailable):
        await run(sandbox, EngineUnavailable("gone"))


async def test_any_other_exception_is_the_harness_failing(sandbox: Runtime) -> None:
    with pytest.raises(HarnessError, match=r"ToolAgent\.run raised KeyError: 'x'") as caught:
        await run(sandbox, KeyError("x"))
    assert "Traceback" in (caught.value.log_tail or "")
