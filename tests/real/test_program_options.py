"""The common options with real programs: each option changes the program's requests or its run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from outrider.harnesses.common_options import COMMON
from outrider.harnesses.presets import load_preset
from outrider.lab.certify.tool_finder import NOTE_TOOL

from .wire import RecordedRun, ran_with

pytestmark = pytest.mark.real

EFFORTS = ("reasoning_effort", "effort", "thinkingLevel")
TEXTS = ("tools", "messages", "input", "contents", "system", "systemInstruction")
REPLACED, APPENDED = "The zebra is the system prompt.", 'The yak\nis "added".'


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a program: words of its own system prompt, the tools that the test allows, the tools that the
    program keeps in addition, and whether its run ends with an error at its limit of turns."""

    own_prompt: str
    tools: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    fails_at_limit: bool = True


PROGRAMS = {
    "pi": Program(own_prompt="You are an expert coding assistant", tools=("bash", "read")),
    "claude-code": Program(own_prompt="You are an agent working with the user", tools=("Bash", "Read")),
    "codex": Program(own_prompt="You are a coding agent running in the Codex CLI"),
    "gemini-cli": Program(own_prompt="You are Gemini CLI", tools=("run_shell_command", "read_file")),
    "mini-swe-agent": Program(own_prompt="You are a helpful assistant", fails_at_limit=False),
    "qwen-code": Program(
        own_prompt="You are Qwen Code",
        tools=("run_shell_command", "read_file"),
        kept=("agent", "get_goal", "list_agents", "skill", "tool_call", "tool_search", "update_goal"),
    ),
    "opencode": Program(own_prompt="You are opencode", tools=("bash", "read"), fails_at_limit=False),
    "openhands": Program(own_prompt="You are OpenHands agent"),
    "openhands-sdk": Program(
        own_prompt="You are OpenHands agent", tools=("terminal", "file_editor"), kept=("finish", "think")
    ),
    "copilot": Program(own_prompt="You are the GitHub Copilot CLI", tools=("bash", "view")),
    "openclaw": Program(own_prompt="You are a personal assistant", tools=("exec", "read")),
}
SLOW = {"mini-swe-agent", "qwen-code", "opencode", "openhands", "openhands-sdk", "copilot", "openclaw"}
NAMES = [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in PROGRAMS]


@pytest.mark.parametrize("name", NAMES)
async def test_each_option_changes_what_goes_over_the_wire(name: str) -> None:
    """Compares three runs: without options, with all options that can be tested together, and with `system_prompt`."""
    program = PROGRAMS[name]
    has = load_preset(name).options
    plain = await ran_with(name, {})
    assert plain.verdict is not None
    assert plain.verdict.verdict == "holds", plain.verdict
    turns = len(calls(plain))
    assert turns == 3
    assert program.own_prompt in text_of(plain.first)
    together = {
        "effort": "low",
        "append_system_prompt": APPENDED,
        "allowed_tools": list(program.tools),
        "max_turns": 2,
    }
    together = {option: value for option, value in together.items() if option in has}
    changed = await ran_with(name, together)
    body = changed.first
    assert set(efforts(body)) == ({"low"} if "effort" in has else set())
    assert "low" not in efforts(plain.first)
    assert (APPENDED in text_of(body)) is ("append_system_prompt" in has)
    assert program.own_prompt in text_of(body)
    if "allowed_tools" in has:
        assert tools(body) == {*program.tools, *program.kept}
        assert tools(plain.first) > tools(body)
    if "max_turns" in has:
        assert changed.verdict is not None
        assert changed.verdict.turns <= 3  # OpenCode has one more call, for a title
        assert len(calls(changed)) == 2
        assert (changed.verdict.verdict != "holds") is program.fails_at_limit
    if "system_prompt" in has:
        body = (await ran_with(name, {"system_prompt": REPLACED})).first
        assert REPLACED in text_of(body)
        assert program.own_prompt not in text_of(body)


WITH_SERVERS = [
    each for each in NAMES if PROGRAMS[str(each.values[0])].tools and load_preset(str(each.values[0])).mcp is not None
]


@pytest.mark.parametrize("name", WITH_SERVERS)
async def test_allowed_tools_leave_the_tools_of_the_tasks_servers(name: str) -> None:
    program, settings = PROGRAMS[name], load_preset(name).mcp
    assert settings is not None
    ran = await ran_with(name, {"allowed_tools": list(program.tools)}, row="mcp")
    assert ran.verdict is not None
    assert ran.verdict.verdict == "holds", ran.verdict
    [own] = [tool for tool in tools(ran.first) if tool.endswith(NOTE_TOOL)]
    assert tools(ran.first) == {*program.tools, *program.kept, own}


# OpenClaw does not request thinking. With the option, it only sends thinking back.
ASKING = [
    each for each in NAMES if "thinking" in load_preset(str(each.values[0])).options and "openclaw" not in each.values
]


@pytest.mark.parametrize("name", ASKING)
async def test_thinking_that_is_switched_off_is_not_asked_for(name: str) -> None:
    # In the dialect chat, OpenCode does not request thinking. With the option, it only sends thinking back.
    dialect = {"dialect": "gemini"} if name == "opencode" else {}
    on, off = [(await ran_with(name, {"thinking": value, **dialect})).first for value in (True, False)]
    assert asks_for_thinking(on)
    assert not asks_for_thinking(off)


async def test_a_budget_ends_the_run_of_claude_code() -> None:
    spent = await ran_with("claude-code", {"budget": 0.001})
    assert spent.verdict is not None
    assert len(calls(spent)) == 1
    assert spent.verdict.verdict == "does not hold"


def test_every_program_with_options_is_tried() -> None:
    mapped = {option for name in PROGRAMS for option in load_preset(name).options if option in COMMON}
    assert mapped == set(COMMON)


def calls(wire: RecordedRun) -> list[dict[str, Any]]:
    """Return the requests of the program's main loop. Requests for a title have no tools and are left out. OpenCode's
    last request at its limit of turns has no tools either, but is found by its text."""
    return [body for body in wire.bodies if body.get("tools") or "MAXIMUM STEPS" in text_of(body)]


def text_of(body: dict[str, Any]) -> str:
    return "\n".join(value for key, value in pieces(body) if isinstance(value, str) and key not in ("description",))


def pieces(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a JSON document that is neither an object nor a list, with its key in the innermost
    object."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from pieces(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from pieces(inner, key)
    else:
        yield key, value


def efforts(body: dict[str, Any]) -> list[str]:
    settings = {key: value for key, value in body.items() if key not in TEXTS}
    return [str(value).lower() for key, value in pieces(settings) if key in EFFORTS]


def tools(body: dict[str, Any]) -> set[str]:
    declared = [each for tool in body["tools"] for each in tool.get("functionDeclarations", [tool])]
    return {each["name"] if "name" in each else each["function"]["name"] for each in declared}


def asks_for_thinking(body: dict[str, Any]) -> bool:
    """Return whether the settings of a request switch thinking on."""
    settings = json.dumps({key: value for key, value in body.items() if key not in TEXTS})
    off = ('"enable_thinking": false', '"thinkingBudget": 0')
    return not any(each in settings for each in off) and ("thinking" in settings or "reasoning" in settings)
