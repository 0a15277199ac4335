"""The `desktop` tools without a screen: their descriptions for the model, the commands that they run, and their
results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic import ValidationError

from outrider.errors import HarnessError
from outrider.harnesses.desktop import PNG, TREE_BYTES, Desktop, DesktopOptions
from outrider.harnesses.desktop_actions import ACTIONS
from outrider.harnesses.tool_agent import ToolAgent, ToolOptions
from outrider.messages import Image, Role, Text
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.spec import HarnessSpec

from .conftest import calls, context, says


def ended(code: int | None = 0, out: bytes = b"", err: bytes = b"") -> ExecResult:
    return ExecResult(exit_code=code, stdout=out, stderr=err, timed_out=code is None)


class Screen:
    """The part of a runtime that a desktop uses. Records the commands, and returns the results from a list."""

    scratch = "/tmp"

    def __init__(self, *answers: ExecResult) -> None:
        self.answers = list(answers)
        self.commands: list[str | list[str]] = []
        self.files: dict[str, bytes] = {}

    async def exec(self, command: str | Sequence[str], *, env: Any, seconds: float) -> ExecResult:
        assert env["DISPLAY"] == ":1"
        self.env = env
        self.commands.append(command if isinstance(command, str) else list(command))
        return self.answers.pop(0) if self.answers else ended()

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data


def desktop(screen: Screen, *, seconds: float = 5, **options: Any) -> Desktop:
    return Desktop(cast(Runtime, screen), DesktopOptions(width=200, height=100, **options), seconds=seconds)


def test_the_tools_as_the_model_sees_them() -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in desktop(Screen()).tools()}
    assert list(tools) == [name for name in ACTIONS if name != "tree"]
    assert tools["screenshot"]["description"] == "Look at the screen. It has 200x100 pixels."
    assert tools["wait"]["parameters"] == {
        "type": "object",
        "properties": {"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 60}},
        "required": ["seconds"],
    }


@pytest.mark.parametrize(
    ("name", "arguments", "ran"),
    [
        ("click", {"x": 199, "y": 0}, "mousemove 199 0 click --repeat 1 --delay 50 1"),
        ("click", {"x": 1, "y": 2, "button": "right", "count": 2}, "mousemove 1 2 click --repeat 2 --delay 50 3"),
        ("scroll", {"x": 1, "y": 2, "direction": "down"}, "mousemove 1 2 click --repeat 3 --delay 20 5"),
        ("type", {"text": "--é"}, "type --delay 10 -- --é"),
        ("key", {"keys": "ctrl+shift+a"}, "key -- ctrl+shift+a"),
    ],
)
async def test_mouse_and_keyboard(name: str, arguments: dict[str, Any], ran: str) -> None:
    screen = Screen()
    assert await desktop(screen).call(name, json.dumps(arguments)) == (Text("done"),)
    assert screen.commands == [["xdotool", *ran.split(" ")]]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("click", '{"x": 1}', "malformed arguments: Object missing required field `y`"),
        ("click", '{"x": -1, "y": 1}', "malformed"),
        ("click", '{"x": 1, "y": 1, "z": 1}', "malformed"),
        ("click", '{"x": 200, "y": 1}', "(200, 1) is not on the screen, which has 200x100"),
        ("scroll", '{"x": 1, "y": 100, "direction": "up"}', "(1, 100) is not on the screen"),
        ("key", '{"keys": "ctrl a; reboot"}', "malformed"),
        ("key", '{"keys": "--window"}', "malformed"),
        ("type", '{"text": "a\\u0000b"}', "malformed"),
        ("type", '{"text": "\\ud800"}', "malformed"),
        ("type", '"\ud800"', "malformed"),
        ("screenshot", "[" * 100_000, "malformed"),
        ("wait", '{"seconds": 61}', "malformed"),
        ("wait", "no JSON", "malformed"),
    ],
)
async def test_what_the_model_got_wrong_is_said_and_not_run(name: str, arguments: str, says: str) -> None:
    screen = Screen()
    [answer] = await desktop(screen).call(name, arguments)
    assert isinstance(answer, Text)
    assert answer.text.startswith(says)
    assert screen.commands == []


async def test_a_screenshot_is_an_image_of_a_tools_message() -> None:
    screen = Screen(ended(), ended(out=PNG + b"..."))
    spec = HarnessSpec(agent="tools", options={"tools": ["desktop"]})
    given = context(cast(Runtime, screen), spec, calls(("screenshot", ""), ("wait", '{"seconds": 0.01}')), says("ok"))
    agent = ToolAgent(spec.options)
    await agent.init(given)
    assert (await agent.run(given)).answer == "ok"
    model: Any = given.model
    assert model.tools[0] == [name for name in ACTIONS if name != "tree"]
    shown, waited = model.asked[1][-2:]
    [image] = shown.parts
    assert (shown.role, shown.tool_call_id, shown.content) == (Role.TOOL, "call_0", "")
    assert isinstance(image, Image)
    assert (image.media_type, image.data) == ("image/png", PNG + b"...")
    assert waited.content == "done"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ended(1, err=b"Can't open display"), "[the screen cannot be read: Can't open display]"),
        (ended(out=b"no picture"), "[the screen cannot be read: ]"),
    ],
)
async def test_a_screen_that_cannot_be_read(answer: ExecResult, says: str) -> None:
    assert await desktop(Screen(answer)).call("screenshot", "{}") == (Text(says),)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ended(err=b"No such key name 'x'\n"), "No such key name 'x'"),
        (ended(None), "[timed out after 5 s]"),
        (ended(1), "[exit code 1]"),
    ],
)
async def test_what_a_program_could_not_do_is_said(answer: ExecResult, says: str) -> None:
    assert await desktop(Screen(answer)).call("key", '{"keys": "x"}') == (Text(says),)


@pytest.mark.parametrize(
    ("options", "name", "arguments", "released"),
    [
        ({}, "drag", {"path": [[1, 1], [2, 2]]}, "mouseup 1"),
        ({"actions": "anthropic"}, "computer", {"action": "hold_key", "text": "shift", "duration": 9}, "keyup shift"),
        (
            {"actions": "openai"},
            "computer",
            {"type": "drag", "path": [{"x": 1, "y": 1}, {"x": 2, "y": 2}], "keys": ["ctrl"]},
            "mouseup 1 keyup ctrl",
        ),
    ],
)
async def test_what_an_action_held_is_released_at_the_time_limit(
    options: dict[str, Any], name: str, arguments: dict[str, Any], released: str
) -> None:
    screen = Screen(ended(None))
    assert await desktop(screen, **options).call(name, json.dumps(arguments)) == (Text("[timed out after 5 s]"),)
    assert screen.commands[1:] == [["xdotool", *released.split(" ")]]


async def test_a_desktop_that_does_not_open_is_an_error_with_what_was_printed() -> None:
    with pytest.raises(HarnessError, match="the desktop does not start") as failed:
        await desktop(Screen(ended(127, out=b"Xvfb is not installed"))).open()
    assert failed.value.log_tail == "Xvfb is not installed"
    screen = Screen(ended(), ended(1))
    with pytest.raises(HarnessError, match="its program does not start"):
        await desktop(screen, run="browser &").open()
    assert screen.commands[1] == "browser &"
    assert "200x100x24" in screen.commands[0]
    assert list(screen.files) == ["/tmp/outrider-desktop/openbox.xml"]


@pytest.mark.parametrize(
    ("observation", "without"), [("screenshot", {"tree"}), ("tree", {"screenshot"}), ("both", set())]
)
def test_the_model_can_look_at_what_the_option_says(observation: Any, without: set[str]) -> None:
    tools = [tool["function"] for tool in desktop(Screen(), observation=observation).tools()]
    assert {tool["name"] for tool in tools} == set(ACTIONS) - without
    assert tools[0]["description"].endswith(" It has 200x100 pixels.")
    assert desktop(Screen(), observation=observation).names() == set(ACTIONS) - without


@pytest.mark.parametrize(("seconds", "limit"), [(5, "2.5"), (60, "10")])
async def test_the_tree_is_what_the_script_prints(seconds: float, limit: str) -> None:
    screen = Screen(ended(out='button "é"'.encode()))
    assert await desktop(screen, seconds=seconds, observation="tree").call("tree", "{}") == (Text('button "é"'),)
    script = "/tmp/outrider-desktop/screen_tree.py"
    assert screen.commands == [["/usr/bin/python3", script, "200", "100", limit]]
    assert screen.env["AT_SPI_BUS_ADDRESS"] == "unix:path=/tmp/outrider-desktop/a11y-bus"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ended(1, err=b"no bus\n"), "[the accessibility tree cannot be read: no bus]"),
        (ended(None), "[timed out after 5 s]"),
    ],
)
async def test_a_tree_that_cannot_be_read(answer: ExecResult, says: str) -> None:
    assert await desktop(Screen(answer), observation="tree").call("tree", "{}") == (Text(says),)


async def test_more_than_the_script_prints_is_cut() -> None:
    [tree] = await desktop(Screen(ended(out=b"x" * 1_000_000)), observation="tree").call("tree", "{}")
    assert isinstance(tree, Text)
    assert len(tree.text) == TREE_BYTES


async def test_the_bus_opens_before_the_program_and_only_for_a_tree() -> None:
    screen = Screen()
    await desktop(screen, run="browser &").open()
    assert len(screen.commands) == 2
    assert screen.env == {"DISPLAY": ":1"}
    await desktop(screen, run="browser &", observation="both").open()
    assert "dbus-daemon" in screen.commands[3]
    assert screen.commands[4:] == ["browser &"]
    assert screen.files["/tmp/outrider-desktop/screen_tree.py"].startswith(b'"""')
    with pytest.raises(HarnessError, match="the accessibility bus does not start") as failed:
        await desktop(Screen(ended(), ended(127)), observation="tree").open()
    assert "at-spi2-core" in str(failed.value.hint)


def test_settings_of_a_desktop_need_one() -> None:
    with pytest.raises(ValidationError, match='needs "desktop" in `tools`'):
        ToolOptions.model_validate({"desktop": {"width": 100}})
    assert ToolOptions.model_validate({"tools": ["desktop"], "desktop": {"width": 100}}).desktop is not None
