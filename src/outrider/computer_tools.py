"""Describes the computer tools of Anthropic, OpenAI and Google as functions, so that any model can use them.

A client declares such a tool only by its type, without parameters, because the vendor's own models were trained on the
tool's actions. The functions here have the parameters that the vendor documents. The client carries out the calls.

Source: Anthropic documentation, "Computer use tool"; OpenAI API reference, "computer_use_preview" and "computer_call";
Google AI documentation, "Computer Use".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

import msgspec

from outrider.messages import ToolSpec

OPENAI_NAME = "computer"
"""The function name for OpenAI's computer tools, which have no name in a client's request."""
GRID = 1000
"""Google's coordinates are thousandths of the screen's width or height, from 0 to 999."""

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_POINT: Schema = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_DIRECTION: Schema = {**_TEXT, "enum": ["up", "down", "left", "right"]}

_ANTHROPIC_ACTIONS = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "screenshot",
    "cursor_position",
    "left_mouse_down",
    "left_mouse_up",
    "scroll",
    "hold_key",
    "wait",
)


class _OpenAiAction(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """An action of OpenAI's computer tool. `keys` in a mouse action are the keys that are held down during the
    action."""


class OpenAiClick(_OpenAiAction, tag="click"):
    button: Literal["left", "right", "wheel", "back", "forward"]
    x: int
    y: int
    keys: list[str] | None = None


class OpenAiDoubleClick(_OpenAiAction, tag="double_click"):
    x: int
    y: int
    keys: list[str] | None = None


class OpenAiPoint(msgspec.Struct, forbid_unknown_fields=True):
    x: int
    y: int


class OpenAiDrag(_OpenAiAction, tag="drag"):
    path: list[OpenAiPoint]
    keys: list[str] | None = None


class OpenAiKeypress(_OpenAiAction, tag="keypress"):
    keys: list[str]


class OpenAiMove(_OpenAiAction, tag="move"):
    x: int
    y: int
    keys: list[str] | None = None


class OpenAiScreenshot(_OpenAiAction, tag="screenshot"):
    pass


class OpenAiScroll(_OpenAiAction, tag="scroll"):
    scroll_x: int
    scroll_y: int
    x: int
    y: int
    keys: list[str] | None = None


class OpenAiType(_OpenAiAction, tag="type"):
    text: str


class OpenAiWait(_OpenAiAction, tag="wait"):
    pass


OpenAiAction = (
    OpenAiClick
    | OpenAiDoubleClick
    | OpenAiDrag
    | OpenAiKeypress
    | OpenAiMove
    | OpenAiScreenshot
    | OpenAiScroll
    | OpenAiType
    | OpenAiWait
)
OPENAI_ACTION: msgspec.json.Decoder[OpenAiAction] = msgspec.json.Decoder(OpenAiAction)
"""Decodes the arguments of a call to OpenAI's computer tool. Raises msgspec.ValidationError for an invalid action."""


def anthropic_tool(name: str, width: int | None, height: int | None, *, zoom: bool = False) -> ToolSpec:
    """Return the function that describes Anthropic's computer tool to a model. With `zoom`, the function includes the
    action that shows a part of the screen at full resolution. Only some clients have this action."""
    properties: Schema = {
        "action": {**_TEXT, "enum": [*_ANTHROPIC_ACTIONS, *(["zoom"] if zoom else [])]},
        "coordinate": {**_POINT, "description": "The pixel [x, y] of the action."},
        "start_coordinate": {**_POINT, "description": "For left_click_drag: the pixel where the drag begins."},
        "text": {
            **_TEXT,
            "description": "For type: the text. For key and hold_key: keys such as ctrl+s. For clicks and scroll: keys "
            "that are held meanwhile.",
        },
        "scroll_direction": _DIRECTION,
        "scroll_amount": {**_INTEGER, "description": "For scroll: the number of notches of the wheel."},
        "duration": {"type": "number", "description": "For wait and hold_key: seconds."},
    }
    if zoom:
        region = {**_POINT, "minItems": 4, "maxItems": 4}
        properties["region"] = {**region, "description": "For zoom: the corners [x0, y0, x1, y1] of the part to show."}
    return _function(
        name,
        f"Use the computer: look at the screen, and use mouse and keyboard.{_size(width, height)}",
        properties,
        ["action"],
    )


def openai_tool(width: int | None, height: int | None) -> ToolSpec:
    """Return the function that describes OpenAI's computer tools to a model. The arguments of a call are the fields of
    one action, as in OpenAI's `computer_call`."""
    point = {"type": "object", "properties": {"x": _INTEGER, "y": _INTEGER}, "required": ["x", "y"]}
    properties: Schema = {
        "type": {
            **_TEXT,
            "enum": [str(kind.__struct_config__.tag) for kind in get_args(OpenAiAction)],
        },
        "x": {**_INTEGER, "description": "For click, double_click, move and scroll: the pixel's column."},
        "y": {**_INTEGER, "description": "For click, double_click, move and scroll: the pixel's row."},
        "button": {**_TEXT, "enum": ["left", "right", "wheel", "back", "forward"], "description": "For click."},
        "path": {"type": "array", "items": point, "description": "For drag: the pixels from the first to the last."},
        "keys": {
            "type": "array",
            "items": _TEXT,
            "description": "For keypress: the keys, pressed together. For the mouse: keys that are held meanwhile.",
        },
        "scroll_x": {**_INTEGER, "description": "For scroll: pixels to the right."},
        "scroll_y": {**_INTEGER, "description": "For scroll: pixels down."},
        "text": {**_TEXT, "description": "For type."},
    }
    return _function(
        OPENAI_NAME,
        f"Use the computer: look at the screen, and use mouse and keyboard.{_size(width, height)}",
        properties,
        ["type"],
    )


_ACROSS: Schema = {"type": "integer", "minimum": 0, "maximum": GRID - 1}
_AT: Schema = {"x": _ACROSS, "y": _ACROSS}
_GOOGLE: dict[str, tuple[str, Schema, list[str]]] = {
    "open_web_browser": ("Open the web browser.", {}, []),
    "wait_5_seconds": ("Wait for 5 seconds.", {}, []),
    "go_back": ("Go to the previous page of the browser's history.", {}, []),
    "go_forward": ("Go to the next page of the browser's history.", {}, []),
    "search": ("Open the start page of a search engine.", {}, []),
    "navigate": ("Open an address in the browser.", {"url": _TEXT}, ["url"]),
    "click_at": ("Click at a position.", _AT, ["x", "y"]),
    "hover_at": ("Move the mouse to a position.", _AT, ["x", "y"]),
    "type_text_at": (
        "Click at a position and type text there. By default the field is cleared first, and Enter is pressed last.",
        {**_AT, "text": _TEXT, "press_enter": {"type": "boolean"}, "clear_before_typing": {"type": "boolean"}},
        ["x", "y", "text"],
    ),
    "key_combination": ("Press keys together, such as control+c.", {"keys": _TEXT}, ["keys"]),
    "scroll_document": ("Scroll the page.", {"direction": _DIRECTION}, ["direction"]),
    "scroll_at": (
        "Scroll at a position, by thousandths of the screen.",
        {**_AT, "direction": _DIRECTION, "magnitude": _ACROSS},
        ["x", "y", "direction"],
    ),
    "drag_and_drop": (
        "Drag from a position to another.",
        {**_AT, "destination_x": _ACROSS, "destination_y": _ACROSS},
        ["x", "y", "destination_x", "destination_y"],
    ),
}
GOOGLE_FUNCTIONS = frozenset(_GOOGLE)


def google_tools(excluded: Collection[str] = ()) -> list[ToolSpec]:
    """Return the functions that describe Google's tool `computerUse` to a model. Functions named in `excluded` are left
    out."""
    return [
        _function(
            name,
            f"{about} Positions are thousandths of the screen, from 0 to 999." if properties.keys() & _AT else about,
            properties,
            required,
        )
        for name, (about, properties, required) in _GOOGLE.items()
        if name not in excluded
    ]


def _size(width: int | None, height: int | None) -> str:
    return f" The screen has {width}x{height} pixels." if width and height else ""


def _function(name: str, description: str, properties: Schema, required: list[str]) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
