"""Translates calls of the vendors' computer tools (`outrider.computer_tools`) to actions on a desktop.

Invariant: a call either becomes the actions that the vendor documents, or raises ValueError with an explanation for the
model. No part of a call is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from outrider.computer_tools import (
    GOOGLE_FUNCTIONS,
    GRID,
    OPENAI_ACTION,
    OPENAI_NAME,
    OpenAiClick,
    OpenAiDoubleClick,
    OpenAiDrag,
    OpenAiKeypress,
    OpenAiMove,
    OpenAiScreenshot,
    OpenAiScroll,
    OpenAiType,
    OpenAiWait,
    anthropic_tool,
    google_tools,
    openai_tool,
)
from outrider.harnesses.desktop_actions import (
    Action,
    Click,
    Drag,
    Hold,
    Key,
    Move,
    Position,
    Press,
    Screenshot,
    Scroll,
    Type,
    Wait,
    Zoom,
)
from outrider.messages import ToolSpec

Vendor = Literal["anthropic", "openai", "google"]
VENDORS: tuple[Vendor, ...] = get_args(Vendor)

ANTHROPIC_NAME = "computer"
NOTCH = 100
"""Number of pixels by which a page scrolls at one notch of the mouse wheel."""
_MAX_NOTCHES = 50
_MAX_KEYS = 100
"""Maximum number of keys that one call presses one after the other. Each key is a program run in the sandbox."""
_WAIT_SECONDS = 2.0
"""Duration of OpenAI's action `wait` in seconds. The action itself names no duration."""

_KEYS = {
    "alt": "alt",
    "arrowdown": "Down",
    "arrowleft": "Left",
    "arrowright": "Right",
    "arrowup": "Up",
    "backspace": "BackSpace",
    "capslock": "Caps_Lock",
    "cmd": "super",
    "command": "super",
    "control": "ctrl",
    "ctrl": "ctrl",
    "del": "Delete",
    "delete": "Delete",
    "down": "Down",
    "end": "End",
    "enter": "Return",
    "esc": "Escape",
    "escape": "Escape",
    "home": "Home",
    "insert": "Insert",
    "left": "Left",
    "meta": "super",
    "option": "alt",
    "page_down": "Next",
    "page_up": "Prior",
    "pagedown": "Next",
    "pageup": "Prior",
    "return": "Return",
    "right": "Right",
    "shift": "shift",
    "space": "space",
    "super": "super",
    "tab": "Tab",
    "up": "Up",
    "win": "super",
    "windows": "super",
    "+": "plus",
    "-": "minus",
    "=": "equal",
    ",": "comma",
    ".": "period",
    "/": "slash",
    "\\": "backslash",
    ";": "semicolon",
    "'": "apostrophe",
    "[": "bracketleft",
    "]": "bracketright",
    "`": "grave",
    " ": "space",
}
"""Maps the vendors' names of keys, in lower case, to the names that X uses."""


def tools(vendor: Vendor, width: int, height: int, *, zoom: bool) -> list[ToolSpec]:
    """Return the computer tools of a vendor for a screen of this size in pixels. If `zoom` is true, the model may ask
    for images of a part of the screen."""
    match vendor:
        case "anthropic":
            return [anthropic_tool(ANTHROPIC_NAME, width, height, zoom=zoom)]
        case "openai":
            return [openai_tool(width, height)]
        case "google":
            return google_tools()


def names(vendor: Vendor) -> frozenset[str]:
    """Return the names of the vendor's computer tools."""
    if vendor == "google":
        return GOOGLE_FUNCTIONS
    return frozenset({ANTHROPIC_NAME if vendor == "anthropic" else OPENAI_NAME})


def actions(vendor: Vendor, name: str, arguments: str, width: int, height: int) -> list[Action]:
    """Return the actions of a call, in order. After the last action, the model is shown the screen, unless this action
    has its own result. Raises ValueError with an explanation for the model if the call is malformed."""
    read = {"anthropic": _anthropic, "openai": _openai}.get(vendor)
    if read is not None:
        return read(arguments)
    return _google(name, arguments, width, height)


class _AnthropicCall(msgspec.Struct, forbid_unknown_fields=True):
    action: str
    coordinate: tuple[int, int] | None = None
    start_coordinate: tuple[int, int] | None = None
    text: str | None = None
    scroll_direction: Literal["up", "down", "left", "right"] | None = None
    scroll_amount: int | None = None
    duration: float | None = None
    region: tuple[int, int, int, int] | None = None


_CLICKS: dict[str, tuple[Literal["left", "middle", "right"], int]] = {
    "left_click": ("left", 1),
    "right_click": ("right", 1),
    "middle_click": ("middle", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
}


def _anthropic(arguments: str) -> list[Action]:
    call = msgspec.json.decode(arguments, type=_AnthropicCall)
    match call.action:
        case "screenshot":
            return [Screenshot()]
        case "cursor_position":
            return [Position()]
        case "wait":
            return [_checked(Wait, seconds=_given(call.duration, "duration"))]
        case "type":
            return [_checked(Type, text=_given(call.text, "text"))]
        case "key":
            pressed = _given(call.text, "text").split()
            if not 1 <= len(pressed) <= _MAX_KEYS:
                raise ValueError(f"`text` must name 1 to {_MAX_KEYS} keys with blanks between them")
            return [_key(keys) for keys in pressed]
        case "hold_key":
            pause = _checked(Wait, seconds=_given(call.duration, "duration"))
            return [Hold(_key(_given(call.text, "text")).keys, seconds=pause.seconds)]
        case "mouse_move":
            x, y = _given(call.coordinate, "coordinate")
            return [_checked(Move, x=x, y=y)]
        case "left_click_drag":
            path = [_given(call.start_coordinate, "start_coordinate"), _given(call.coordinate, "coordinate")]
            return [_checked(Drag, path=path)]
        case "left_mouse_down" | "left_mouse_up":
            return [Press("left", "mousedown" if call.action == "left_mouse_down" else "mouseup")]
        case "scroll":
            x, y = _given(call.coordinate, "coordinate")
            direction = _given(call.scroll_direction, "scroll_direction")
            return [
                _holding(call.text, _checked(Scroll, x=x, y=y, direction=direction, amount=call.scroll_amount or 3))
            ]
        case "zoom":
            x0, y0, x1, y1 = _given(call.region, "region")
            if not (x0 < x1 and y0 < y1):
                raise ValueError("`region` must be [x0, y0, x1, y1] with x0 < x1 and y0 < y1")
            return [_checked(Zoom, start=(x0, y0), end=(x1 - 1, y1 - 1))]
        case action if action in _CLICKS:
            button, count = _CLICKS[action]
            if call.coordinate is None:  # without a coordinate, the click is at the mouse pointer
                return [_holding(call.text, Press(button, "click"))] * count
            x, y = call.coordinate
            return [_holding(call.text, _checked(Click, x=x, y=y, button=button, count=count))]
        case action:
            raise ValueError(f"there is no action {action!r}")


def _openai(arguments: str) -> list[Action]:
    match OPENAI_ACTION.decode(arguments):
        case OpenAiScreenshot():
            return [Screenshot()]
        case OpenAiWait():
            return [Wait(_WAIT_SECONDS)]
        case OpenAiType() as call:
            return [_checked(Type, text=call.text)]
        case OpenAiKeypress() as call:
            return [_key(call.keys)]
        case OpenAiMove() as call:
            return [_holding(call.keys, _checked(Move, x=call.x, y=call.y))]
        case OpenAiDrag() as call:
            return [_holding(call.keys, _checked(Drag, path=[(point.x, point.y) for point in call.path]))]
        case OpenAiDoubleClick() as call:
            return [_holding(call.keys, _checked(Click, x=call.x, y=call.y, count=2))]
        case OpenAiScroll() as call:
            turns = [
                ("right" if call.scroll_x > 0 else "left", call.scroll_x),
                ("down" if call.scroll_y > 0 else "up", call.scroll_y),
            ]
            return [
                _holding(call.keys, _checked(Scroll, x=call.x, y=call.y, direction=direction, amount=_notches(way)))
                for direction, way in turns
                if way
            ]
        case OpenAiClick(button="back" | "forward" as button) as call:
            return [_checked(Move, x=call.x, y=call.y), _holding(call.keys, Press(button, "click"))]
        case OpenAiClick() as call:
            name = "middle" if call.button == "wheel" else call.button
            return [_holding(call.keys, _checked(Click, x=call.x, y=call.y, button=name))]


class _GoogleCall(msgspec.Struct):
    x: int | None = None
    y: int | None = None
    destination_x: int | None = None
    destination_y: int | None = None
    text: str | None = None
    keys: str | None = None
    url: str | None = None
    direction: Literal["up", "down", "left", "right"] | None = None
    magnitude: int = 800
    press_enter: bool = True
    clear_before_typing: bool = True


def _google(name: str, arguments: str, width: int, height: int) -> list[Action]:
    call = msgspec.json.decode(arguments, type=_GoogleCall)

    def at(x: int | None, y: int | None, of: str = "") -> tuple[int, int]:
        across, down = _given(x, f"{of}x"), _given(y, f"{of}y")
        if not (0 <= across < GRID and 0 <= down < GRID):
            raise ValueError(f"positions are thousandths of the screen, from 0 to {GRID - 1}")
        return across * width // GRID, down * height // GRID

    def scroll(x: int, y: int, notches: int) -> list[Action]:
        return [_checked(Scroll, x=x, y=y, direction=_given(call.direction, "direction"), amount=notches)]

    browser: dict[str, Callable[[], list[Action]]] = {
        "open_web_browser": lambda: [Screenshot()],
        "wait_5_seconds": lambda: [Wait(5)],
        "go_back": lambda: [Key("alt+Left")],
        "go_forward": lambda: [Key("alt+Right")],
        "navigate": lambda: [Key("ctrl+l"), _checked(Type, text=_given(call.url, "url")), Key("Return")],
        "key_combination": lambda: [_key(_given(call.keys, "keys"))],
    }
    if name in browser:
        return browser[name]()
    match name:
        case "click_at" | "hover_at":
            x, y = at(call.x, call.y)
            return [Click(x, y) if name == "click_at" else Move(x, y)]
        case "type_text_at":
            x, y = at(call.x, call.y)
            clear: list[Action] = [Key("ctrl+a"), Key("BackSpace")] if call.clear_before_typing else []
            enter: list[Action] = [Key("Return")] if call.press_enter else []
            return [Click(x, y), *clear, _checked(Type, text=_given(call.text, "text")), *enter]
        case "scroll_document":
            return scroll(width // 2, height // 2, _notches(height if call.direction in ("up", "down") else width))
        case "scroll_at":
            x, y = at(call.x, call.y)
            side = height if call.direction in ("up", "down") else width
            return scroll(x, y, _notches(call.magnitude * side // GRID))
        case "drag_and_drop":
            return [Drag([at(call.x, call.y), at(call.destination_x, call.destination_y, "destination_")])]
        case _:
            raise ValueError(f"{name} cannot be done here: there is no search engine")


def _notches(pixels: int) -> int:
    return min(max(round(abs(pixels) / NOTCH), 1), _MAX_NOTCHES)


def _holding(keys: str | list[str] | None, action: Click | Drag | Move | Press | Scroll) -> Action:
    """Return an action that holds `keys` down while `action` runs. Without keys, return `action` itself."""
    return Hold(_key(keys).keys, action=action) if keys else action


def _key(keys: str | list[str]) -> Key:
    """Return the action that presses keys together. `keys` is a list, or a string with "+" between the keys. Raises
    ValueError."""
    if isinstance(keys, str):
        words = keys.split("+")
        if keys.endswith("+"):  # the last key is "+" itself
            words = [*filter(None, words), "+"]
    else:
        words = keys
    return msgspec.convert({"keys": "+".join(_x_name(word, alone=len(words) == 1) for word in words)}, Key)


def _x_name(key: str, *, alone: bool) -> str:
    """Return X's name of a key. X uses the lower-case letter as the name of a letter's key. So a letter becomes lower
    case if other keys are pressed together with its key."""
    return _KEYS.get(key.lower()) or (key if alone or len(key) > 1 else key.lower())


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"`{name}` is missing")
    return value


def _checked(kind: Any, **fields: Any) -> Any:
    """Return an action of the type `kind` after checking its fields. Raises ValueError."""
    return msgspec.convert(fields, kind)
