"""The tool set `desktop`: a screen in the sandbox, which the model sees in screenshots and controls by mouse and
keyboard.

The option `run` opens the programs to be used. Invariants: a call acts on the screen of its own sandbox or not at all;
for a mistake of the model, the result is an explanation; only a broken sandbox raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import Field

from outrider.errors import HarnessError
from outrider.messages import Part, Text, ToolSpec, image_from_bytes
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.spec import Spec
from outrider.spec import Text as LongText

DISPLAY = ":1"
"""The name of the screen, for programs in the sandbox."""
PROGRAMS = ("Xvfb", "openbox", "xdotool", "scrot")
OPEN_SECONDS = 120.0
PNG = b"\x89PNG\r\n\x1a\n"

# The configuration has no keys, mouse bindings or menus that would let an agent close or move the windows that the
# grader needs.
WINDOW_MANAGER = """\
<?xml version="1.0"?>
<openbox_config xmlns="http://openbox.org/3.4/rc">
  <focus><focusNew>yes</focusNew><followMouse>no</followMouse></focus>
  <mouse>
    <context name="Client">
      <mousebind button="Left" action="Press"><action name="Focus"/><action name="Raise"/></mousebind>
    </context>
  </mouse>
  <applications>
    <application type="normal"><decor>no</decor><maximized>yes</maximized></application>
  </applications>
</openbox_config>
"""

# The script refuses an existing display. A display that already exists belongs to the host or another session, which is
# possible in a runtime without namespaces. Without -noreset Xvfb restarts when its last client exits, and meanwhile
# refuses new clients.
OPEN = """\
for program in {programs}; do
    command -v "$program" >/dev/null || {{ echo "$program is not installed"; exit 127; }}
done
[ ! -e /tmp/.X11-unix/X1 ] || {{ echo "the display {display} is in use"; exit 1; }}
mkdir -p -m 1777 /tmp/.X11-unix
setsid Xvfb {display} -screen 0 {width}x{height}x24 -nolisten tcp -noreset </dev/null >{folder}/xvfb.log 2>&1 &
ready() {{
    for try in $(seq 400); do "$@" >/dev/null 2>&1 && return; sleep 0.05; done
    cat {folder}/*.log
    exit 1
}}
ready xdotool getdisplaygeometry
setsid openbox --config-file {folder}/openbox.xml </dev/null >{folder}/openbox.log 2>&1 &
ready xdotool get_num_desktops
"""


class DesktopOptions(Spec):
    """The size of the screen in pixels, and a shell command that opens the programs and ends when they are visible."""

    width: Annotated[int, Field(ge=64, le=4096)] = 1024
    height: Annotated[int, Field(ge=64, le=4096)] = 768
    run: LongText | None = None


Pixel = Annotated[int, msgspec.Meta(ge=0)]


class Screenshot(msgspec.Struct, forbid_unknown_fields=True):
    """Look at the screen."""


class Click(msgspec.Struct, forbid_unknown_fields=True):
    """Move the mouse to a pixel, counted from the top left corner of the screen, and click there."""

    x: Pixel
    y: Pixel
    button: Literal["left", "middle", "right"] = "left"
    count: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1


class Type(msgspec.Struct, forbid_unknown_fields=True):
    """Type text at the keyboard."""

    text: Annotated[str, msgspec.Meta(max_length=4096)]


class Key(msgspec.Struct, forbid_unknown_fields=True):
    """Press a key, or several at once, by their X names: Return, Tab, ctrl+a."""

    keys: Annotated[str, msgspec.Meta(pattern=r"^\w+(\+\w+)*$", max_length=100)]


class Scroll(msgspec.Struct, forbid_unknown_fields=True):
    """Move the mouse to a pixel and turn its wheel by a number of notches."""

    x: Pixel
    y: Pixel
    direction: Literal["up", "down", "left", "right"]
    amount: Annotated[int, msgspec.Meta(ge=1, le=50)] = 3


class Wait(msgspec.Struct, forbid_unknown_fields=True):
    """Wait for a number of seconds."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=60)]


Action = Screenshot | Click | Type | Key | Scroll | Wait
ACTIONS: dict[str, type[Action]] = {kind.__name__.lower(): kind for kind in get_args(Action)}
BUTTONS = {"left": "1", "middle": "2", "right": "3"}
WHEEL = {"up": "4", "down": "5", "left": "6", "right": "7"}
DONE = "done"


class Desktop:
    """The screen of a sandbox. The screen stays open until the sandbox stops, so that a grader can inspect it."""

    def __init__(self, runtime: Runtime, options: DesktopOptions, *, seconds: float) -> None:
        self._runtime = runtime
        self._options = options
        self._seconds = seconds
        self._folder = f"{runtime.scratch}/outrider-desktop"

    def tools(self) -> list[ToolSpec]:
        """Return the descriptions of the tools for a model."""
        specs = [_tool(name, action) for name, action in ACTIONS.items()]
        # Models and their servers scale images, so the description states the size to which pixels refer.
        specs[0]["function"]["description"] += f" It has {self._options.width}x{self._options.height} pixels."
        return specs

    async def open(self) -> None:
        """Start the screen, its window manager and the programs. Raises HarnessError, with the output, if one of these
        fails."""
        options = self._options
        await self._runtime.write(f"{self._folder}/openbox.xml", WINDOW_MANAGER.encode())
        script = OPEN.format(
            programs=" ".join(PROGRAMS),
            display=DISPLAY,
            folder=self._folder,
            width=options.width,
            height=options.height,
        )
        for what, command in (("the desktop", script), ("its program", options.run)):
            if command is None:
                continue
            done = await self._execute(command, OPEN_SECONDS)
            if done.exit_code != 0:
                raise HarnessError(
                    f"{what} does not start in the sandbox",
                    hint="the sandbox needs xvfb, openbox, xdotool and scrot, and a display of its own",
                    log_tail=done.log_tail(),
                )

    async def call(self, name: str, arguments: str) -> Part:
        """Run a call in `ACTIONS` and return the result. Raises RuntimeFailure if the sandbox is broken."""
        try:
            action = msgspec.json.decode(arguments or "{}", type=ACTIONS[name])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return Text(f"malformed arguments: {error}")
        options = self._options
        if isinstance(action, Click | Scroll) and not (action.x < options.width and action.y < options.height):
            return Text(f"({action.x}, {action.y}) is not on the screen, which has {options.width}x{options.height}")
        match action:
            case Screenshot():
                return await self._screenshot()
            case Wait():
                await asyncio.sleep(min(action.seconds, self._seconds))
                return Text(DONE)
            case Click():
                clicks = ["click", "--repeat", str(action.count), "--delay", "50", BUTTONS[action.button]]
                return await self._xdotool("mousemove", str(action.x), str(action.y), *clicks)
            case Scroll():
                turns = ["click", "--repeat", str(action.amount), "--delay", "20", WHEEL[action.direction]]
                return await self._xdotool("mousemove", str(action.x), str(action.y), *turns)
            case Type() if "\0" in action.text:  # a program's argument cannot contain NUL
                return Text("malformed arguments: the text has a NUL")
            case Type():
                return await self._xdotool("type", "--delay", "10", "--", action.text)
            case Key():
                return await self._xdotool("key", "--", action.keys)

    async def _xdotool(self, *arguments: str) -> Part:
        done = await self._execute(["xdotool", *arguments], self._seconds)
        if done.timed_out:
            return Text(f"[timed out after {self._seconds:g} s]")
        # xdotool exits with 0 even for an unknown key, so any output of xdotool becomes the result.
        return Text(done.log_tail().strip() or (DONE if done.exit_code == 0 else f"[exit code {done.exit_code}]"))

    async def _screenshot(self) -> Part:
        file = f"{self._folder}/screen.png"
        done = await self._execute(f"scrot --overwrite {file} && cat {file}", self._seconds)
        if done.exit_code != 0 or not done.stdout.startswith(PNG):
            return Text(f"[the screen cannot be read: {done.stderr.decode(errors='replace').strip()[-200:]}]")
        return image_from_bytes("image/png", done.stdout)

    async def _execute(self, command: str | Sequence[str], seconds: float) -> ExecResult:
        return await self._runtime.exec(command, env={"DISPLAY": DISPLAY}, seconds=seconds)


def _tool(name: str, action: type[Action]) -> ToolSpec:
    (_,), schemas = msgspec.json.schema_components([action])
    schema: dict[str, Any] = schemas[action.__name__]
    parameters = {"type": "object", "properties": schema["properties"], "required": schema["required"]}
    return {
        "type": "function",
        "function": {"name": name, "description": action.__doc__, "parameters": parameters},
    }
