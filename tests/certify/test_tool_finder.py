"""Finding an agent's tools by their schemas, choosing the calls that may start a sub-agent, and reading prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.harnesses.presets import Certify, McpCall
from outrider.lab.certify.rows import MARK, READ_HELLO, SUBAGENT_MARK, WRITE_HELLO
from outrider.lab.certify.scripted_model import choose_call, read_prompt
from outrider.lab.certify.subagent_trial import (
    ALONE,
    HELPLESS,
    IDLE,
    KNOWN,
    NO_TEXT,
    NOT_REACHED,
    NOTHING,
    OPEN,
    STARTS,
    TOO_MANY,
    SubagentTrial,
    summary,
)
from outrider.lab.certify.tool_finder import describe, find_tools, find_waiter, marked_calls
from outrider.messages import ToolSpec

STRING = {"type": "string"}


def tool(name: str, properties: dict[str, Any], *required: str) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


READ = tool("read_file", {"path": STRING}, "path")
BASH = tool("bash", {"command": STRING, "description": STRING}, "command", "description")
EXEC = tool("exec_command", {"cmd": STRING, "wait": {"type": "boolean"}}, "cmd", "wait")
LOCAL = tool("shell", {"command": {"type": "array", "items": STRING}}, "command")
RISKY = tool("terminal", {"command": STRING, "risk": {"type": "string", "enum": ["LOW", "HIGH"]}}, "command", "risk")
MAYBE = tool("run", {"script": {"anyOf": [{"type": "null"}, STRING]}, "seconds": {"type": "integer"}}, "seconds")


@pytest.mark.parametrize(
    ("tools", "name", "arguments"),
    [
        ([READ, BASH], "bash", {"command": "ls", "description": "a step of the task"}),
        ([EXEC, READ], "exec_command", {"cmd": "ls", "wait": False}),
        ([LOCAL], "shell", {"command": ["bash", "-c", "ls"]}),
        ([RISKY], "terminal", {"command": "ls", "risk": "LOW"}),
        ([MAYBE], "run", {"script": "ls", "seconds": 60}),
        ([MAYBE, EXEC, RISKY, BASH], "bash", {"command": "ls", "description": "a step of the task"}),
    ],
)
def test_a_shell_is_found_and_called_with_all_it_wants(tools: list[ToolSpec], name: str, arguments: Any) -> None:
    found = find_tools(tools, Certify()).shell
    assert found is not None
    assert (found.name, found.call("ls")) == (name, arguments)


def says(name: str, description: str, properties: dict[str, Any], *required: str) -> ToolSpec:
    made = tool(name, properties, *required)
    made["function"]["description"] = description
    return made


LANGUAGE = {"type": "string", "enum": ["python", "shell", "html"]}
PROGRAM = {"command": STRING, "args": {"type": "array", "items": STRING}}
EDITOR = tool(
    "str_replace_editor",
    {"command": {"type": "string", "enum": ["view", "create", "str_replace"]}, "path": STRING, "file_text": STRING},
    "command",
    "path",
)
IPYTHON = says("ipython", "Execute Python code in a shell.", {"code": STRING}, "code")
SQL = says("run_query", "Run a command of the database.", {"query": STRING}, "query")
OUTPUT = tool("get_terminal_output", {"command": STRING}, "command")
KILL = tool("kill_shell", {"cmd": STRING}, "cmd")


@pytest.mark.parametrize(
    ("one", "arguments"),
    [
        (
            tool(
                "execute_bash", {"command": STRING, "timeout": {"type": "number", "maximum": 30}}, "command", "timeout"
            ),
            {"command": "ls", "timeout": 30},
        ),
        (
            tool("run_terminal", {"commandLine": STRING, "cwd": STRING}, "commandLine", "cwd"),
            {"commandLine": "ls", "cwd": "."},
        ),
        (tool("runInTerminal", {"line": STRING, "script": STRING}, "script"), {"script": "ls"}),
        (tool("process_exec", {"argv": {"type": "array", "items": STRING}}, "argv"), {"argv": ["bash", "-c", "ls"]}),
        (tool("run_process", PROGRAM, "command", "args"), {"command": "bash", "args": ["-c", "ls"]}),
        (tool("run_commands", {"commands": {"type": "array", "items": STRING}}, "commands"), {"commands": ["ls"]}),
        (
            tool("execute", {"language": LANGUAGE, "code": STRING}, "language", "code"),
            {"language": "shell", "code": "ls"},
        ),
        (says("zap", "Does it in a shell.", {"x": {"type": "string", "description": "The command"}}, "x"), {"x": "ls"}),
    ],
    ids=lambda value: value["function"]["name"] if "function" in value else "",
)
def test_a_shell_is_known_by_its_schema(one: ToolSpec, arguments: dict[str, Any]) -> None:
    found = find_tools([READ, IPYTHON, SQL, OUTPUT, KILL, EDITOR, one], Certify()).shell
    assert found is not None
    assert (found.name, found.call("ls")) == (one["function"]["name"], arguments)


@pytest.mark.parametrize("one", [IPYTHON, SQL, OUTPUT, KILL, EDITOR, says("run", "Run Python.", {"script": STRING})])
def test_what_runs_something_else_is_no_shell(one: ToolSpec) -> None:
    assert find_tools([one], Certify()).shell is None


WRITER = tool("write_file", {"file_path": STRING, "content": STRING}, "file_path", "content")
SAVE = says("put", "Creates a file.", {"filename": STRING, "text": STRING}, "filename", "text")


@pytest.mark.parametrize(
    ("tools", "writes", "reads"),
    [
        ([READ, WRITER], {"file_path": "a", "content": "b"}, {"path": "a"}),
        ([SAVE], {"filename": "a", "text": "b"}, None),
        ([EDITOR], {"command": "create", "path": "a", "file_text": "b"}, {"command": "view", "path": "a"}),
        ([tool("edit_file", {"path": STRING, "content": STRING}, "path")], None, None),
        ([tool("read_todo", {"path": STRING}, "path"), tool("list_files", {"path": STRING})], None, None),
    ],
)
def test_tools_that_write_and_read_files_are_known_by_their_schemas(
    tools: list[ToolSpec], writes: dict[str, str] | None, reads: dict[str, str] | None
) -> None:
    box = find_tools(tools, Certify())
    assert (box.writer.call("a", "b") if box.writer else None) == writes
    assert (box.reader.call("a") if box.reader else None) == reads


def test_a_tool_that_wants_absolute_paths_is_given_them() -> None:
    read = tool("read_file", {"path": {"type": "string", "description": "The absolute path of the file"}}, "path")
    reader = choose_call(READ_HELLO, find_tools([read], Certify()), "/work")
    assert reader is not None
    assert reader[1] == {"path": "/work/out.txt"}
    assert choose_call(WRITE_HELLO, find_tools([read], Certify()), "/work") is None


def test_what_is_offered_is_told_with_its_parameters() -> None:
    assert describe([LOCAL, READ]) == "read_file(path: string); shell(command: array)"
    assert describe([]) == "none"


def test_a_presets_hint_goes_before_the_likeliest_name() -> None:
    found = find_tools([BASH, tool("do", {"command": STRING}, "command")], Certify(shell="do")).shell
    assert found is not None
    assert found.name == "do"


@pytest.mark.parametrize("tools", [[], [READ], [tool("bash", {"path": STRING}), {"type": "custom", "function": {}}]])
def test_there_may_be_no_shell(tools: list[ToolSpec]) -> None:
    assert find_tools(tools, Certify()).shell is None


TEXTS = {"type": "array", "items": STRING}
PARTS = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "object", "properties": {"x": STRING}}}]}


@pytest.mark.parametrize(
    ("one", "arguments"),
    [
        (tool("a", {"prompt": STRING, "n": {"type": "integer"}, "m": STRING}, "prompt", "n"), {"prompt": "1", "n": 60}),
        (tool("b", {"zorp": STRING, "message": STRING}), {"message": "1"}),
        (tool("c", {"zorp": STRING, "quux": STRING}), {"quux": "1", "zorp": "2"}),
        (tool("d", {"parts": PARTS, "cwd": STRING, "all": TEXTS}, "parts", "cwd", "all"),
         {"parts": [{"x": "1"}], "cwd": ".", "all": ["2"]}),
        (tool("e", {"kind": STRING, "prompt": STRING}, "prompt"), {"prompt": "1", "kind": "general"}),
    ],
    ids=lambda value: value["function"]["name"] if "function" in value else "",
)  # fmt: skip
def test_every_free_text_of_a_call_is_another_one(one: ToolSpec, arguments: Any) -> None:
    numbers = map(str, range(1, 9))
    hint = Certify(subagent_arguments={"kind": "general", "other": 1})
    [call] = marked_calls([one], hint, lambda: next(numbers))
    assert call.arguments == arguments
    assert json.dumps(call.with_prompt("1", 'say "go"')).count(r'"say \"go\""') == 1
    assert "2" not in json.dumps(call.with_prompt("1", "go"))


async def test_a_trial_calls_the_tools_that_a_later_request_declares() -> None:
    """The first request is a side call with another tool."""
    trial = SubagentTrial(Certify())
    first = await trial.next_call("s-1", [tool("finish_plan", {"plan": STRING})], 0)
    second = await trial.next_call("s-1", [BASH, tool("zorp", {"x": STRING})], 0)
    assert [call[0] for call in (first, second) if call] == ["finish_plan", "zorp"]


async def test_a_mark_of_an_earlier_session_begins_nothing() -> None:
    tools = [tool("zorp", {"x": STRING}), tool("quux", {"x": STRING})]
    trial = SubagentTrial(Certify())
    first = await trial.next_call("s-1", tools, 0)
    await trial.next_call("s-2", tools, 0)
    assert first is not None
    trial.begins(first[1]["x"].removeprefix(SUBAGENT_MARK).split(":")[0], able=True, replies=1)
    assert trial.outcomes == {"zorp": OPEN, "quux": OPEN}


@pytest.mark.parametrize("name", ["open_agent", "view_task"])
async def test_a_tool_with_the_name_of_a_starter_is_called_even_if_it_could_read_files(name: str) -> None:
    trial = SubagentTrial(Certify())
    called = await trial.next_call("s-1", [BASH, tool(name, {"path": STRING, "prompt": STRING})], 0)
    assert called is not None
    assert called[0] == name


PART = {"type": "object", "properties": {"goal": STRING, "next": {"$ref": "#/$defs/Part"}}, "required": ["goal"]}
ENDLESS = {
    "type": "object",
    "properties": {f"next{n}": {"$ref": "#/$defs/Part"} for n in range(30)},
    "required": [f"next{n}" for n in range(30)],
}


@pytest.mark.parametrize(
    ("schema", "part", "value"),
    [
        ({"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 2}, PART, [{"goal": "1"}, {"goal": "2"}]),
        ({"allOf": [{"$ref": "#/$defs/Part"}], "description": "x"}, PART, {"goal": "1"}),
        ({"type": "array", "items": {"type": "array", "items": STRING}}, {}, [["1"]]),
        ({"description": "no type"}, {}, "1"),
    ],
)
def test_the_arguments_of_a_marked_call_follow_references(schema: Any, part: Any, value: Any) -> None:
    one = tool("zorp", {"work": schema}, "work")
    one["function"]["parameters"]["$defs"] = {"Part": part}
    numbers = map(str, range(1, 9))
    [call] = marked_calls([one], Certify(), lambda: next(numbers))
    assert call.arguments == {"work": value}


def test_a_schema_that_contains_itself_has_an_end() -> None:
    one = tool("zorp", {"x": STRING, "work": {"$ref": "#/$defs/Part"}}, "x", "work")
    for part in (ENDLESS, {"$ref": "#/$defs/Part"}, {"allOf": [{"$ref": "#/$defs/Part"}] * 2}):
        one["function"]["parameters"]["$defs"] = {"Part": part}
        [call] = marked_calls([one], Certify(), lambda: "t")
        assert call.arguments["x"] == "t"


def test_the_likeliest_tool_for_a_sub_agent_is_called_first() -> None:
    tools = [
        tool("zorp", {"x": STRING}),
        tool("none", {}),
        tool("task_list", {"y": STRING}),
        tool("task", {"prompt": STRING}),
    ]
    assert [call.name for call in marked_calls(tools, Certify(), lambda: "t")] == ["task", "task_list", "zorp"]


async def test_a_trial_calls_no_tool_twice_and_says_what_it_did_not_call() -> None:
    tools = [tool(f"do_{n:02}", {"x": STRING}, "x") for n in range(20)] + [tool("none", {}), BASH]
    trial = SubagentTrial(Certify())
    first = await trial.next_call("s-1", tools, 0)
    assert first == await trial.next_call("s-1", tools, 0), "a request that is sent again"
    second = await trial.next_call("s-1", tools, 1)
    assert trial.unfinished
    third = await trial.next_call("s-2", tools, 0)
    assert [call[0] for call in (first, second, third) if call] == ["do_00", "do_01", "do_02"]
    assert third is not None
    mark = third[1]["x"].removeprefix(SUBAGENT_MARK).split(":")[0]
    trial.begins("unknown", able=True, replies=1)
    for able, replies, outcome in ((False, 0, HELPLESS), (True, 0, IDLE), (True, 1, ALONE), (True, 0, ALONE)):
        trial.begins(mark, able=able, replies=replies)
        assert trial.outcomes["do_02"] == outcome
    assert await trial.next_call("s-2", tools, 1) is None
    assert trial.starter is not None
    said = dict(part.split(": ") for part in summary(trial.outcomes).split("; "))
    not_reached = ", ".join(f"do_{n:02}" for n in range(3, 16))
    assert {outcome: said[outcome] for outcome in (STARTS, NOTHING, OPEN)} == {
        STARTS: "do_02",
        NOTHING: "do_00",
        OPEN: "do_01",
    }
    assert (said[NO_TEXT], said[KNOWN], said[NOT_REACHED][: len(not_reached)]) == ("none", "bash", not_reached)
    assert said[TOO_MANY].endswith("do_19")


def test_a_tool_waits_for_a_sub_agent_if_the_preset_says_so() -> None:
    wait = tool("wait_agent", {"targets": {"type": "array", "items": STRING}, "seconds": STRING}, "targets")
    found = find_waiter([BASH, wait], Certify(wait="wait_agent"))
    assert found is not None
    assert found.call("agent-1") == {"targets": ["agent-1"]}
    assert find_waiter([BASH, wait], Certify()) is None


def prompt(*messages: tuple[str, str], tools: tuple[ToolSpec, ...] = ()) -> str:
    lines = "\n".join(map(json.dumps, tools))
    system = f"Be brief.\n\n# Tools\n<tools>\n{lines}\n</tools>\n\nFor each function call, say it.<|im_end|>\n"
    spoken = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"<|im_start|>system\n{system}{spoken}<|im_start|>assistant\n"


TASK = ("user", f"Notes first. Task {MARK}three-turns: do it")
REPLY = ("assistant", f'<tool_call>\n{{"x": "{SUBAGENT_MARK}sub-agent"}}\n</tool_call>')
RESULT = ("user", "<tool_response>\nok\n</tool_response>")


@pytest.mark.parametrize(
    ("messages", "said"),
    [((TASK,), 0), ((("assistant", "Hello."), TASK), 0), ((TASK, REPLY, RESULT), 1), ((TASK, REPLY, TASK, REPLY), 2)],
)
def test_a_prompt_says_how_far_its_task_is(messages: tuple[tuple[str, str], ...], said: int) -> None:
    state = read_prompt(prompt(*messages, tools=(BASH, READ)))
    assert (state.row, state.subagent, state.replies, state.tools) == ("three-turns", False, said, (BASH, READ))


def test_a_sub_agents_prompt_is_known_by_its_mark() -> None:
    state = read_prompt(prompt(("user", f"{SUBAGENT_MARK}sub-agent: go"), REPLY))
    assert (state.row, state.subagent, state.replies) == ("sub-agent", True, 1)
    told_in_system = f"<|im_start|>system\n{SUBAGENT_MARK}abc: go<|im_end|>\n<|im_start|>user\nBegin.<|im_end|>\n"
    state = read_prompt(f"{told_in_system}<|im_start|>assistant\n")
    assert (state.row, state.subagent, state.replies) == ("abc", True, 0)
    echoed = ("user", f"<tool_response>\n{SUBAGENT_MARK}abc\n</tool_response>")
    assert read_prompt(prompt(("user", "hello"), REPLY, echoed)).row is None


def test_a_prompt_says_which_sub_agent_was_started_last() -> None:
    started = ("user", '<tool_response>\n{"agent_id":"a-1","nickname":"Ada"}\n</tool_response>')
    assert read_prompt(prompt(TASK, REPLY, started)).agent_id == "a-1"
    assert read_prompt(prompt(TASK, REPLY, started, REPLY, RESULT)).agent_id is None


@pytest.mark.parametrize("text", ["", "no chat", prompt(("user", "hello"))])
def test_other_prompts_name_no_task(text: str) -> None:
    assert read_prompt(text).row is None


def test_a_servers_tool_is_called_in_a_program_that_the_model_writes() -> None:
    within = McpCall(tool="run", argument="code", text="return {server}.{tool}({arguments})")
    hint = Certify(mcp_call=within)
    assert find_tools([BASH], hint).noter is None
    found = find_tools([BASH, tool("run", {"code": STRING}, "code")], hint).noter
    assert found is not None
    assert found.call('a "b"') == {"code": 'return outrider_check.leave_note({"text": "a \\"b\\""})'}
