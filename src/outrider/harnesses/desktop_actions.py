"""The actions of an agent on a desktop: looking at the screen, and using mouse and keyboard.

The docstring of each action in ACTIONS is shown to the model as its description. `pixels` must return all pixels that
an action names, because only the pixels that it returns are checked against the size of the screen.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from outrider.messages import ToolSpec

Pixel = Annotated[int, msgspec.Meta(ge=0)]
Point = tuple[Pixel, Pixel]
Keys = Annotated[str, msgspec.Meta(pattern=r"^\w+(\+\w+)*$", max_length=100)]
Button = Literal["left", "middle", "right", "back", "forward"]
PauseSeconds = Annotated[float, msgspec.Meta(gt=0, le=60)]

_BUTTONS: dict[Button, str] = {"left": "1", "middle": "2", "right": "3", "back": "8", "forward": "9"}
_WHEEL = {"up": "4", "down": "5", "left": "6", "right": "7"}


class Screenshot(msgspec.Struct, forbid_unknown_fields=True):
    """Look at the screen."""


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    """Read the accessibility tree of the screen: a line for each element, with its role, name, value, states and box
    (x,y WIDTHxHEIGHT), whose x,y is its top left pixel."""


class Click(msgspec.Struct, forbid_unknown_fields=True):
    """Move the mouse to a pixel, counted from the top left corner of the screen, and click there."""

    x: Pixel
    y: Pixel
    button: Literal["left", "middle", "right"] = "left"
    count: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """Move the mouse to a pixel."""

    x: Pixel
    y: Pixel


class Drag(msgspec.Struct, forbid_unknown_fields=True):
    """Press the left button at the first pixel [x, y], move the mouse through the others, and release at the last."""

    path: Annotated[list[Point], msgspec.Meta(min_length=2, max_length=100)]


class Type(msgspec.Struct, forbid_unknown_fields=True):
    """Type text at the keyboard."""

    text: Annotated[str, msgspec.Meta(max_length=4096)]


class Key(msgspec.Struct, forbid_unknown_fields=True):
    """Press a key, or several at once, by their X names: Return, Tab, ctrl+a."""

    keys: Keys


class Scroll(msgspec.Struct, forbid_unknown_fields=True):
    """Move the mouse to a pixel and turn its wheel by a number of notches."""

    x: Pixel
    y: Pixel
    direction: Literal["up", "down", "left", "right"]
    amount: Annotated[int, msgspec.Meta(ge=1, le=50)] = 3


class Wait(msgspec.Struct, forbid_unknown_fields=True):
    """Wait for a number of seconds."""

    seconds: PauseSeconds


class Press(msgspec.Struct):
    """Press, release or click a mouse button where the pointer is."""

    button: Button
    event: Literal["mousedown", "mouseup", "click"]


class Hold(msgspec.Struct):
    """Hold keys down while `action` runs, or for some seconds."""

    keys: Keys
    seconds: PauseSeconds | None = None
    action: Click | Drag | Move | Press | Scroll | None = None


class Position(msgspec.Struct):
    """Return the position of the mouse pointer as text."""


class Zoom(msgspec.Struct):
    """Look at a part of the screen: the pixels from [x0, y0] to [x1, y1]."""

    start: Point
    end: Point


Action = Screenshot | Tree | Click | Move | Drag | Type | Key | Scroll | Wait | Press | Hold | Position | Zoom
ACTIONS: dict[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Screenshot, Tree, Click, Move, Drag, Type, Key, Scroll, Wait)
}
"""The actions that a model can call, by name."""


def pixels(action: Action) -> list[Point]:
    """Return all pixels that an action names."""
    match action:
        case Click() | Move() | Scroll():
            return [(action.x, action.y)]
        case Drag():
            return action.path
        case Zoom():
            return [action.start, action.end]
        case Hold(action=Click() | Drag() | Move() | Scroll() as inner):
            return pixels(inner)
        case _:
            return []


def xdotool_arguments(action: Action) -> list[str]:
    """Return the arguments with which xdotool performs an action of the mouse or the keyboard."""
    match action:
        case Click():
            repeat = ["--repeat", str(action.count), "--delay", "50"]
            return [*_move(action.x, action.y), "click", *repeat, _BUTTONS[action.button]]
        case Scroll():
            turns = ["--repeat", str(action.amount), "--delay", "20", _WHEEL[action.direction]]
            return [*_move(action.x, action.y), "click", *turns]
        case Move():
            return _move(action.x, action.y)
        case Drag():
            # Pause after each movement: programs recognise a drag only by several separate movements.
            first, *others = action.path
            through = [word for x, y in others for word in (*_move(x, y), "sleep", "0.05")]
            return [*_move(*first), "mousedown", "1", "sleep", "0.05", *through, "mouseup", "1"]
        case Press():
            return [action.event, _BUTTONS[action.button]]
        case Type():
            return ["type", "--delay", "10", "--", action.text]
        case Key():
            return ["key", "--", action.keys]
        case Hold():
            meanwhile = ["sleep", f"{action.seconds:g}"] if action.seconds is not None else []
            inner = xdotool_arguments(action.action) if action.action is not None else []
            return ["keydown", action.keys, *meanwhile, *inner, "keyup", action.keys]
        case Position():
            return ["getmouselocation"]
        case Screenshot() | Tree() | Wait() | Zoom():
            raise ValueError(f"{type(action).__name__} needs neither mouse nor keyboard")


def release_arguments(action: Action) -> list[str]:
    """Return the arguments with which xdotool releases the keys and the button that an action holds down while it runs.
    The list is empty for any other action."""
    match action:
        case Drag():
            return ["mouseup", "1"]
        case Hold():
            inner = release_arguments(action.action) if action.action is not None else []
            return [*inner, "keyup", action.keys]
        case _:
            return []


def _move(x: int, y: int) -> list[str]:
    return ["mousemove", str(x), str(y)]


def action_tool(name: str) -> ToolSpec:
    """Return the description of an action in ACTIONS for the model."""
    kind = ACTIONS[name]
    (_,), schemas = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = schemas[kind.__name__]
    parameters = {"type": "object", "properties": schema["properties"], "required": schema["required"]}
    description = " ".join((kind.__doc__ or "").split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
