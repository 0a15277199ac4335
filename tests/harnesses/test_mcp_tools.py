"""MCP servers and skills of in-process agents: the servers run in the sandbox, the client in this process."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from outrider.errors import HarnessError, InvalidField
from outrider.harnesses.base import HarnessContext, HarnessOutcome, ModelRefused
from outrider.harnesses.factory import make_harness
from outrider.harnesses.mcp_tools import mcp_tools
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec, McpServer

from .conftest import calls, context, results, says

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = r"""
import json, os, sys
DONE = {"type": "text", "text": "done"}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        sys.stdout.write("a line that is no message\n")
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}}
        names = ["repeat", "env", "fail"] if "cursor" not in params else ["picture", "end", "hang"]
        result = {"tools": [{"name": name, "description": "It is " + name, "inputSchema": schema} for name in names]}
        if "cursor" not in params:
            result["nextCursor"] = "2"
    else:
        name, given = params["name"], params["arguments"]
        if name == "end":
            sys.exit(3)
        if name == "hang":
            continue
        text = {"repeat": given.get("text", "") * given.get("times", 1), "env": os.environ.get("SECRET", "")}
        if given.get("text") == "half a character":
            text["repeat"] = "a \U0001f600 and \ud83d"
        result = {"content": [{"type": "text", "text": text.get(name, "no luck")}]}
        if name == "fail":
            result["isError"] = True
        if name == "picture":
            result = {"content": [DONE, {"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
    sys.stdout.flush()
"""


def server(**fields: Any) -> McpServer:
    given = {"name": "s", "transport": "stdio", "command": "python3", "args": ["-c", SERVER], **fields}
    return McpServer.model_validate(given)


def spec(**fields: Any) -> HarnessSpec:
    return HarnessSpec(agent="tools", mcp_servers=[server()], **fields)


async def run(sandbox: Runtime, given: HarnessContext) -> HarnessOutcome:
    harness = make_harness(given.task.harness)
    await harness.install(given)
    return await harness.run(given)


async def test_the_model_gets_the_servers_tools_beside_the_agents_own(sandbox: Runtime) -> None:
    given = context(sandbox, spec(), calls(("mcp__s__repeat", json.dumps({"text": "ab ü ", "times": 2}))), says("ok"))
    assert (await run(sandbox, given)).answer == "ok"
    model: Any = given.model
    served = [f"mcp__s__{name}" for name in ("repeat", "env", "fail", "picture", "end", "hang")]
    assert model.tools[0] == ["bash", "python", *served]
    assert results(model.asked[1]) == ["ab ü ab ü "]


async def test_large_results_and_arguments_come_through(sandbox: Runtime) -> None:
    async with mcp_tools(context(sandbox, spec())) as tools:
        repeat = tools[0]
        text = "x'\"$(true)\\ü" * 20_000
        assert await repeat.run(context(sandbox, spec()), {"text": text, "times": 3}) == text * 3


async def test_errors_and_other_contents_are_results(sandbox: Runtime) -> None:
    given = context(
        sandbox, spec(), calls(("mcp__s__fail", "{}"), ("mcp__s__picture", "{}"), ("mcp__s__nosuch", "{}")), says("ok")
    )
    await run(sandbox, given)
    model: Any = given.model
    failed, picture, unknown = results(model.asked[1])
    assert (failed, picture) == ("the tool failed: no luck", "done\n[image: not shown]")
    assert unknown.startswith("unknown tool 'mcp__s__nosuch'")


@pytest.mark.deep
async def test_a_server_that_ends_or_hangs_does_not_end_the_agent(sandbox: Runtime) -> None:
    once = calls(("mcp__s__hang", "{}"), ("mcp__s__repeat", '{"text": "still here"}'), ("mcp__s__end", "{}"))
    given = context(sandbox, spec(options={"tool_seconds": 2}), once, calls(("mcp__s__env", "{}")), says("ok"))
    async with asyncio.timeout(60):
        assert (await run(sandbox, given)).answer == "ok"
    model: Any = given.model
    hung, still, ended, later = (*results(model.asked[1]), results(model.asked[2])[-1])
    assert "2" in hung
    assert still == "still here"
    assert ended.startswith("the MCP server s failed")
    assert later.startswith("the MCP server s failed")


async def test_the_servers_variables_reach_the_server_and_not_its_command_line(sandbox: Runtime) -> None:
    harness = HarnessSpec(agent="tools", mcp_servers=[server(env={"SECRET": "it's $HOME"})])
    given = context(sandbox, harness)
    async with mcp_tools(given) as tools:
        assert await tools[1].run(given, {}) == "it's $HOME"
        listed = await sandbox.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", seconds=10)
        assert "it's $HOME" not in listed.stdout.decode(errors="replace")


async def test_a_server_ends_with_the_agent(sandbox: Runtime) -> None:
    """A model call fails: its error is raised unchanged, and the server's process ends."""
    marked = server(args=["-c", f"{SERVER}#mark-of-this-server"])
    harness = HarnessSpec(agent="tools", mcp_servers=[marked])
    with pytest.raises(ModelRefused):
        await run(sandbox, context(sandbox, harness, ModelRefused("enough")))
    left = await sandbox.exec("grep -l 'mark-of-this-serve[r]' /proc/[0-9]*/cmdline", seconds=10)
    assert left.stdout == b""


async def test_a_server_that_does_not_start_is_an_error_with_its_output(sandbox: Runtime) -> None:
    harness = HarnessSpec(agent="tools", mcp_servers=[server(args=["-c", "import nosuchmodule"])])
    with pytest.raises(HarnessError, match="MCP server 's' did not start") as caught:
        await run(sandbox, context(sandbox, harness))
    assert "nosuchmodule" in (caught.value.log_tail or "")


async def test_an_agent_without_skills_of_its_own_is_told_of_them(sandbox: Runtime) -> None:
    text = "---\nname: counting\ndescription: >\n  How to count\n  well.\n---\nOne, two, three.\n"
    await sandbox.write("skills/counting/SKILL.md", text.encode())
    harness = HarnessSpec(agent="tools", skills=["skills"], options={"system": "Be brief."})
    given = context(sandbox, harness, says("ok"))
    await run(sandbox, given)
    model: Any = given.model
    system = model.asked[0][0].content
    assert system.startswith("Be brief.\n\nYou have skills.")
    assert re.search(r"- counting: How to count well\. \(skills/counting/SKILL.md\)", system)


class Plain:
    def __init__(self, options: Any) -> None: ...
    async def init(self, context: HarnessContext) -> None: ...
    async def run(self, context: HarnessContext) -> HarnessOutcome:
        return HarnessOutcome()

    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("harness", "field"),
    [
        (HarnessSpec(agent=f"{__name__}:Plain", mcp_servers=[server()]), "task.harness.mcp_servers"),
        (HarnessSpec(agent=f"{__name__}:Plain", skills=["x"]), "task.harness.skills"),
        (HarnessSpec(agent="tools", skills=["x"], options={"tools": ["think"]}), "task.harness.skills"),
        (
            HarnessSpec(
                agent="tools",
                mcp_servers=[McpServer(name="a", transport="sse", url="http://localhost:1/")],  # type: ignore[arg-type]
            ),
            "task.harness.mcp_servers.0.transport",
        ),
    ],
)
def test_what_an_agent_does_not_take_is_refused(harness: HarnessSpec, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_harness(harness)
    assert caught.value.field == field
    assert caught.value.hint


async def test_a_lone_surrogate_in_any_argument_is_the_models_mistake(sandbox: Runtime) -> None:
    """An argument that need not be a string reaches the server's client, which cannot write it as JSON."""
    given = context(
        sandbox,
        spec(),
        calls(
            ("mcp__s__repeat", '{"times": "\\ud83d"}'),
            ("mcp__s__repeat", '{"times": [{"\\ud83d": 1}]}'),
            ("mcp__s__repeat", f'{{"times": {"[" * 600}{"]" * 600}}}'),
            ("mcp__s__repeat", '{"text": "still here"}'),
        ),
        says("ok"),
    )
    assert (await run(sandbox, given)).answer == "ok"
    model: Any = given.model
    value, key, nested, later = results(model.asked[1])
    assert value == key == "malformed arguments: give a JSON object with the arguments of the tool"
    assert nested.startswith("the MCP server s failed")
    assert later == "still here"


async def test_a_lone_surrogate_in_a_result_is_replaced(sandbox: Runtime) -> None:
    given = context(sandbox, spec(), calls(("mcp__s__repeat", '{"text": "half a character"}')), says("ok"))
    assert (await run(sandbox, given)).answer == "ok"
    model: Any = given.model
    assert results(model.asked[1]) == ["a \U0001f600 and ?"]
