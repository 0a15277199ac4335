"""The built-in agent: its tools, its limits and failures, and agents with tools of their own."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from outrider.errors import EngineUnavailable, HarnessError, InvalidField, RuntimeFailure
from outrider.harnesses.base import HarnessContext
from outrider.harnesses.factory import make_harness
from outrider.harnesses.tool_agent import ToolAgent
from outrider.harnesses.toolbox import MAX_RESULT, TOOLS, Tool, tool_spec
from outrider.messages import Message, Role, ToolSpec
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import calls, context, results, says


def bash(command: str) -> tuple[str, str]:
    return ("bash", json.dumps({"command": command}))


def python(code: str) -> tuple[str, str]:
    return ("python", json.dumps({"code": code}))


def edit(path: str, old: str, new: str) -> tuple[str, str]:
    return ("edit", json.dumps({"path": path, "old": old, "new": new}))


async def run(sandbox: Runtime, *replies: Any, options: Any = None, agent: str = "tools") -> Any:
    spec = HarnessSpec(agent=agent, options=options or {})
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


EDITS: Any = {"tools": ["bash", "edit", "think"]}


async def test_files_are_written_and_changed(sandbox: Runtime) -> None:
    await sandbox.write("run.sh", b"echo one; echo two\n", executable=True)
    _, model = await run(
        sandbox,
        calls(
            edit("new/a.txt", "", "x = 1\nx = 1\n"),
            edit("run.sh", "one", "three"),
            bash("./run.sh"),
            edit("new/a.txt", "", ""),
        ),
        says("done"),
        options=EDITS,
    )
    assert results(model.asked[1]) == ["wrote new/a.txt", "changed run.sh", "three\ntwo", "wrote new/a.txt"]
    assert await sandbox.read("new/a.txt") == b""


async def test_a_change_that_cannot_be_made_changes_nothing(sandbox: Runtime) -> None:
    await sandbox.write("a.txt", b"x = 1\nx = 1\n")
    await sandbox.write("picture", b"\xff\xfe")
    bad = [
        ("a.txt", "y", ""),
        ("a.txt", "x", ""),
        ("no", "x", ""),
        (".", "x", ""),
        ("picture", "x", ""),
        ("", "x", ""),
        ("a.txt/b", "", "x"),
    ]
    _, model = await run(
        sandbox,
        calls(*(edit(*one) for one in bad), edit("a\0", "", "x"), edit("a" * 300_000, "", "x")),
        says("done"),
        options=EDITS,
    )
    *told, below, nul, long = results(model.asked[1])
    assert told == [
        "nothing was changed: `old` is 0 times in a.txt, not once",
        "nothing was changed: `old` is 2 times in a.txt, not once",
        "there is no file no",
        ". is no text file",
        "picture is no text file",
        "give the path of a file",
    ]
    assert "Not a directory" in below
    assert nul == long == "give the path of a file"
    assert await sandbox.read("a.txt") == b"x = 1\nx = 1\n"


async def test_an_edit_in_a_broken_sandbox_is_not_the_models_fault(sandbox: Runtime) -> None:
    await sandbox.stop()
    with pytest.raises(RuntimeFailure):
        await run(sandbox, calls(edit("a", "", "b")), says("done"), options=EDITS)


async def test_a_thought_is_noted(sandbox: Runtime) -> None:
    _, model = await run(
        sandbox,
        calls(("think", '{"thought": "first the units"}'), ("think", "{}"), ("edit", '{"path": "a", "old": ""}')),
        says("done"),
        options=EDITS,
    )
    assert results(model.asked[1]) == [
        "[noted]",
        'malformed arguments: give a JSON object with a string "thought"',
        'malformed arguments: give a JSON object with a string "path", a string "old", a string "new"',
    ]


SHELVES: dict[str, Any] = {"properties": {"count": {"type": "integer"}, "topic": {"type": "string"}}}


ANYTHING: dict[str, Any] = {"properties": {"value": True, "never": False}, "required": ["value"]}
"""A schema with truth values in place of schemas, as Rust's servers write it for a value of any type."""


class Collector(ToolAgent):
    """An agent with tools whose schemas name few or no types."""

    def __init__(self, options: Any) -> None:
        schemas: dict[str, dict[str, Any]] = {
            "anything": ANYTHING,
            "nulls": {"properties": None, "required": None},
            "open": {"properties": {"a": {}}, "additionalProperties": True},
            "either": {"type": "object", "oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        }
        specs: list[ToolSpec] = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()
        ]
        super().__init__(options, own=[Tool(one, self.collect) for one in specs])

    async def collect(self, context: HarnessContext, arguments: Mapping[str, Any]) -> str:
        return repr(arguments)


async def test_schemas_without_types_do_not_end_the_agent(sandbox: Runtime) -> None:
    asked = calls(("anything", '{"value": [1]}'), ("anything", "{}"), ("nulls", "{}"), ("nulls", "[]"))
    _, model = await run(sandbox, asked, says("done"), agent=f"{__name__}:Collector")
    assert results(model.asked[1]) == [
        "{'value': [1]}",
        'malformed arguments: give a JSON object with a value "value"',
        "{}",
        "malformed arguments: give a JSON object with the arguments of the tool",
    ]


async def test_arguments_that_a_schema_allows_without_naming_them_reach_the_tool(sandbox: Runtime) -> None:
    asked = calls(("open", '{"a": 1, "b": 2}'), ("either", '{"b": 2}'))
    _, model = await run(sandbox, asked, says("done"), agent=f"{__name__}:Collector")
    assert results(model.asked[1]) == ["{'a': 1, 'b': 2}", "{'b': 2}"]


class Librarian(ToolAgent):
    """An agent with three tools beside the built-in ones."""

    def __init__(self, options: Any) -> None:
        name = options.pop("name", "look_up")
        super().__init__(
            options,
            own=[
                Tool(tool_spec(name, "Look a word up.", "word"), self.look_up),
                Tool({"type": "function", "function": {"name": "shelves", "parameters": SHELVES}}, self.shelves),
                Tool({"type": "function", "function": {"name": "close"}}, self.shelves),
            ],
        )

    async def shelves(self, context: HarnessContext, arguments: Mapping[str, Any]) -> str:
        return repr(arguments)

    async def look_up(self, context: HarnessContext, arguments: Mapping[str, Any]) -> str:
        if arguments["word"] == "slow":
            await asyncio.Event().wait()
        return (await context.runtime.read(arguments["word"])).decode()


async def test_an_agent_has_a_tool_of_its_own(sandbox: Runtime) -> None:
    await sandbox.write("word", b"meaning")
    asked = [("look_up", json.dumps({"word": word})) for word in ("word", "slow")]
    agent = f"{__name__}:Librarian"
    _, model = await run(
        sandbox,
        calls(
            *asked,
            ("look_up", '{"word": 1}'),
            bash("echo hi"),
            ("shelves", '{"count": 2, "other": 3}'),
            ("shelves", '{"topic": 2}'),
            ("shelves", "[]"),
            ("close", "{}"),
            ("close", "3"),
        ),
        says("done"),
        options={"tools": ["bash"], "tool_seconds": 0.5},
        agent=agent,
    )
    assert model.tools == [["bash", "look_up", "shelves", "close"]] * 2
    assert results(model.asked[1]) == [
        "meaning",
        "[timed out after 0.5 s]",
        'malformed arguments: give a JSON object with a string "word"',
        "hi",
        "{'count': 2}",
        "malformed arguments: give a JSON object with the arguments of the tool",
        "malformed arguments: give a JSON object with the arguments of the tool",
        "{}",
        "malformed arguments: give a JSON object with the arguments of the tool",
    ]
    with pytest.raises(HarnessError, match=r"Librarian\.run raised FileNotFoundError"):
        await run(sandbox, calls(("look_up", '{"word": "none"}')), agent=agent)
    with pytest.raises(InvalidField, match="'edit' is a built-in tool"):
        make_harness(HarnessSpec(agent=agent, options={"name": "edit"}))
