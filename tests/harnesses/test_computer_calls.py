"""The vendors' computer tools on a desktop: each call becomes the actions that the vendor documents."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from outrider.harnesses import computer_calls
from outrider.harnesses.computer_calls import VENDORS, Vendor
from outrider.harnesses.desktop import PNG, PYTHON, Desktop, DesktopOptions, Observation
from outrider.messages import Image, Text
from outrider.sandbox.runtimes.base import Runtime

from .test_desktop import Screen, ended

SHOT = "scrot --overwrite /tmp/outrider-desktop/screen.png && cat /tmp/outrider-desktop/screen.png"

ANTHROPIC: list[tuple[dict[str, Any], list[str]]] = [
    ({"action": "screenshot"}, []),
    ({"action": "key", "text": "ctrl+Return"}, ["key -- ctrl+Return"]),
    ({"action": "key", "text": "Down Down"}, ["key -- Down", "key -- Down"]),
    ({"action": "type", "text": "a b"}, ["type --delay 10 -- a b"]),
    ({"action": "mouse_move", "coordinate": [3, 4]}, ["mousemove 3 4"]),
    ({"action": "left_click", "coordinate": [3, 4]}, ["mousemove 3 4 click --repeat 1 --delay 50 1"]),
    ({"action": "left_click"}, ["click 1"]),
    ({"action": "double_click"}, ["click 1", "click 1"]),
    (
        {"action": "left_click", "coordinate": [3, 4], "text": "shift"},
        ["keydown shift mousemove 3 4 click --repeat 1 --delay 50 1 keyup shift"],
    ),
    ({"action": "triple_click", "coordinate": [3, 4]}, ["mousemove 3 4 click --repeat 3 --delay 50 1"]),
    (
        {"action": "left_click_drag", "start_coordinate": [1, 2], "coordinate": [3, 4]},
        ["mousemove 1 2 mousedown 1 sleep 0.05 mousemove 3 4 sleep 0.05 mouseup 1"],
    ),
    ({"action": "left_mouse_down"}, ["mousedown 1"]),
    ({"action": "left_mouse_up"}, ["mouseup 1"]),
    (
        {"action": "scroll", "coordinate": [3, 4], "scroll_direction": "down", "scroll_amount": 5},
        ["mousemove 3 4 click --repeat 5 --delay 20 5"],
    ),
    ({"action": "hold_key", "text": "w", "duration": 0.5}, ["keydown w sleep 0.5 keyup w"]),
    ({"action": "wait", "duration": 0.01}, []),
]
OPENAI: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "screenshot"}, []),
    ({"type": "click", "button": "wheel", "x": 3, "y": 4}, ["mousemove 3 4 click --repeat 1 --delay 50 2"]),
    ({"type": "click", "button": "back", "x": 3, "y": 4}, ["mousemove 3 4", "click 8"]),
    ({"type": "double_click", "x": 3, "y": 4}, ["mousemove 3 4 click --repeat 2 --delay 50 1"]),
    (
        {"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}, {"x": 5, "y": 6}]},
        ["mousemove 1 2 mousedown 1 sleep 0.05 mousemove 3 4 sleep 0.05 mousemove 5 6 sleep 0.05 mouseup 1"],
    ),
    ({"type": "keypress", "keys": ["CTRL", "A"]}, ["key -- ctrl+a"]),
    ({"type": "keypress", "keys": ["ARROWDOWN"]}, ["key -- Down"]),
    ({"type": "keypress", "keys": ["/"]}, ["key -- slash"]),
    ({"type": "keypress", "keys": ["CTRL", "+"]}, ["key -- ctrl+plus"]),
    ({"type": "move", "x": 3, "y": 4}, ["mousemove 3 4"]),
    (
        {"type": "scroll", "x": 3, "y": 4, "scroll_x": 0, "scroll_y": -250},
        ["mousemove 3 4 click --repeat 2 --delay 20 4"],
    ),
    ({"type": "scroll", "x": 3, "y": 4, "scroll_x": 0, "scroll_y": 0}, []),
    ({"type": "type", "text": "x"}, ["type --delay 10 -- x"]),
]
GOOGLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("open_web_browser", {}, []),
    ("click_at", {"x": 500, "y": 999}, ["mousemove 100 99 click --repeat 1 --delay 50 1"]),
    ("hover_at", {"x": 0, "y": 0}, ["mousemove 0 0"]),
    (
        "type_text_at",
        {"x": 500, "y": 500, "text": "hi"},
        [
            "mousemove 100 50 click --repeat 1 --delay 50 1",
            "key -- ctrl+a",
            "key -- BackSpace",
            "type --delay 10 -- hi",
            "key -- Return",
        ],
    ),
    (
        "type_text_at",
        {"x": 0, "y": 0, "text": "hi", "press_enter": False, "clear_before_typing": False},
        ["mousemove 0 0 click --repeat 1 --delay 50 1", "type --delay 10 -- hi"],
    ),
    ("key_combination", {"keys": "control+shift+T"}, ["key -- ctrl+shift+t"]),
    ("key_combination", {"keys": "enter"}, ["key -- Return"]),
    ("navigate", {"url": "http://x/"}, ["key -- ctrl+l", "type --delay 10 -- http://x/", "key -- Return"]),
    ("go_back", {}, ["key -- alt+Left"]),
    ("go_forward", {}, ["key -- alt+Right"]),
    ("scroll_document", {"direction": "down"}, ["mousemove 100 50 click --repeat 1 --delay 20 5"]),
    (
        "scroll_at",
        {"x": 0, "y": 0, "direction": "right", "magnitude": 999},
        ["mousemove 0 0 click --repeat 2 --delay 20 7"],
    ),
    (
        "drag_and_drop",
        {"x": 0, "y": 0, "destination_x": 500, "destination_y": 500},
        ["mousemove 0 0 mousedown 1 sleep 0.05 mousemove 100 50 sleep 0.05 mouseup 1"],
    ),
]
CASES: list[tuple[Vendor, str, dict[str, Any], list[str]]] = [
    *(("anthropic", "computer", arguments, ran) for arguments, ran in ANTHROPIC),
    *(("openai", "computer", arguments, ran) for arguments, ran in OPENAI),
    *(("google", name, arguments, ran) for name, arguments, ran in GOOGLE),
]


def desktop(screen: Screen, vendor: Vendor, observation: Observation = "screenshot") -> Desktop:
    options = DesktopOptions(width=200, height=100, actions=vendor, observation=observation)
    return Desktop(cast(Runtime, screen), options, seconds=5, settle_seconds=0)


class Shown(Screen):
    """A screen on which commands given as text, such as those for screenshots, print a PNG image."""

    async def exec(self, command: Any, *, env: Any, seconds: float) -> Any:
        done = await super().exec(command, env=env, seconds=seconds)
        return ended(out=PNG) if isinstance(command, str) else done


@pytest.mark.parametrize(("vendor", "name", "arguments", "ran"), CASES)
async def test_a_call_is_carried_out_and_the_screen_shown(
    vendor: Vendor, name: str, arguments: dict[str, Any], ran: list[str]
) -> None:
    screen = Shown()
    [shown] = await desktop(screen, vendor).call(name, json.dumps(arguments))
    assert isinstance(shown, Image)
    commands = [command if isinstance(command, str) else " ".join(command[1:]) for command in screen.commands]
    assert commands[: len(ran)] == ran
    assert set(commands[len(ran) :]) == {SHOT}


async def test_a_part_of_the_screen_can_be_shown() -> None:
    screen = Shown()
    [shown] = await desktop(screen, "anthropic").call("computer", '{"action": "zoom", "region": [10, 20, 30, 50]}')
    assert isinstance(shown, Image)
    [command] = screen.commands
    assert isinstance(command, str)
    assert "--autoselect 10,20,20,30 " in command


async def test_the_mouses_place_is_text() -> None:
    screen = Screen(ended(out=b"x:3 y:4 screen:0 window:5\n"))
    assert await desktop(screen, "anthropic").call("computer", '{"action": "cursor_position"}') == (Text("x:3 y:4"),)


class Read(Shown):
    """A `Shown` screen with an accessibility tree."""

    async def exec(self, command: Any, *, env: Any, seconds: float) -> Any:
        assert env["AT_SPI_BUS_ADDRESS"] == "unix:path=/tmp/outrider-desktop/a11y-bus"
        done = await super().exec(command, env={"DISPLAY": env["DISPLAY"]}, seconds=seconds)
        return ended(out=b'button "OK"') if command[0] == PYTHON else done


@pytest.mark.parametrize("action", ["screenshot", "left_mouse_down"])
async def test_the_screen_after_a_call_may_be_text(action: str) -> None:
    call = ("computer", json.dumps({"action": action}))
    assert await desktop(Read(), "anthropic", "tree").call(*call) == (Text('button "OK"'),)
    image, tree = await desktop(Read(), "anthropic", "both").call(*call)
    assert isinstance(image, Image)
    assert tree == Text('button "OK"')


async def test_text_has_no_zoom() -> None:
    zoom = ("computer", '{"action": "zoom", "region": [10, 20, 30, 50]}')
    screen = Read()
    assert await desktop(screen, "anthropic", "tree").call(*zoom) == (
        Text("nothing was done: the screen is given as text, which has no zoom"),
    )
    assert screen.commands == []
    [shown] = await desktop(Read(), "anthropic", "both").call(*zoom)
    assert isinstance(shown, Image)
    offered = [
        desktop(Read(), "anthropic", each).tools()[0]["function"]["parameters"]["properties"]
        for each in ("screenshot", "both", "tree")
    ]
    assert ["region" in properties for properties in offered] == [True, True, False]


async def test_a_call_without_an_action_shows_the_screen() -> None:
    still = '{"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": 0}'
    [shown] = await desktop(Shown(), "openai").call("computer", still)
    assert isinstance(shown, Image)


@pytest.mark.parametrize(
    ("vendor", "name", "arguments", "explained"),
    [
        ("anthropic", "computer", '{"action": "fly"}', "there is no action 'fly'"),
        ("anthropic", "computer", '{"action": "type"}', "`text` is missing"),
        ("anthropic", "computer", '{"action": "key", "text": "a; reboot"}', "Expected `str` matching"),
        ("anthropic", "computer", '{"action": "key", "text": " "}', "1 to 100 keys"),
        ("anthropic", "computer", json.dumps({"action": "key", "text": "Tab " * 101}), "1 to 100 keys"),
        ("anthropic", "computer", '{"action": "wait", "duration": 1e9}', "<= 60"),
        ("anthropic", "computer", '{"action": "left_click", "coordinate": [-1, 2]}', ">= 0"),
        ("anthropic", "computer", '{"action": "left_click", "coordinate": [200, 2]}', "(200, 2) is not on the screen"),
        (
            "anthropic",
            "computer",
            '{"action": "left_click", "coordinate": [1, 2], "force": 1}',
            "unknown field `force`",
        ),
        ("anthropic", "computer", '{"action": "zoom", "region": [5, 5, 5, 9]}', "x0 < x1"),
        ("anthropic", "computer", '{"action": "zoom", "region": [5, 5, 500, 9]}', "is not on the screen"),
        ("openai", "computer", '{"type": "click", "x": 1, "y": 2}', "missing required field `button`"),
        ("openai", "computer", '{"type": "drag", "path": [{"x": 1, "y": 2}]}', "length >= 2"),
        ("openai", "computer", '{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 1, "y": 200}]}', "is not on the"),
        ("openai", "computer", '{"type": "keypress", "keys": []}', "matching regex"),
        ("openai", "computer", "", "missing required field `type`"),
        ("google", "click_at", '{"x": 1000, "y": 2}', "from 0 to 999"),
        ("google", "click_at", '{"x": 1}', "`y` is missing"),
        ("google", "search", "{}", "there is no search engine"),
        ("google", "navigate", '{"url": "a\\u0000b"}', "NUL"),
    ],
)
async def test_a_call_that_cannot_be_carried_out_is_explained(
    vendor: Vendor, name: str, arguments: str, explained: str
) -> None:
    [answer] = await desktop(Shown(), vendor).call(name, arguments)
    assert isinstance(answer, Text)
    assert explained in answer.text


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_model_has_the_vendors_tools_only(vendor: Vendor) -> None:
    offered = desktop(Screen(), vendor)
    names = [tool["function"]["name"] for tool in offered.tools()]
    assert set(names) == offered.names() == computer_calls.names(vendor)
    assert len(names) == len(set(names))
