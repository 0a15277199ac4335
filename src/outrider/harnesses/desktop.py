"""The tools `desktop`: a screen in the sandbox. The model sees it in screenshots or as an accessibility tree, and uses
mouse and keyboard.

The shell command in the option `run` opens programs on the screen. Invariants: a call acts on the screen of its own
sandbox or not at all; if the model makes a mistake, the result of the call explains the mistake; only a broken sandbox
raises an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from pydantic import Field

from outrider.errors import HarnessError
from outrider.harnesses import computer_calls
from outrider.harnesses.computer_calls import Vendor
from outrider.harnesses.desktop_actions import (
    ACTIONS,
    Action,
    Position,
    Screenshot,
    Tree,
    Type,
    Wait,
    Zoom,
    action_tool,
    pixels,
    release_arguments,
    xdotool_arguments,
)
from outrider.messages import Part, Text, ToolSpec, image_from_bytes
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.spec import Spec
from outrider.spec import Text as LongText

DISPLAY = ":1"
"""X display of the desktop, as programs in the sandbox name it."""
PROGRAMS = ("Xvfb", "openbox", "xdotool", "scrot")
OPEN_SECONDS = 120.0
SETTLE_SECONDS = 0.5
"""Seconds between an action of a vendor's tool and the screenshot that shows its effect."""
TREE_SECONDS = 10.0
"""Time limit in seconds for reading the accessibility tree. At the limit, the part that has been read becomes the
result."""
TREE_BYTES = 64_000
"""Maximum bytes of an accessibility tree in UTF-8. `screen_tree.py` never prints more."""
BUS = "a11y-bus"
"""Name of the accessibility bus's socket, in the folder of the desktop."""
PYTHON = "/usr/bin/python3"
"""The Python with Debian's bindings of AT-SPI. PATH may find another Python first."""
SCRIPT = Path(__file__).with_name("screen_tree.py")
PNG = b"\x89PNG\r\n\x1a\n"

# The configuration has no key bindings, mouse bindings or menus that close or move windows, because a grader may need
# the windows as they are.
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

# The script refuses a display that already exists: in a runtime without namespaces, the display could be the host's or
# another session's. Without -noreset, Xvfb would restart when its last client exits, and refuse new clients during the
# restart.
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


# AT-SPI's own bus needs no session bus, because programs find AT-SPI's bus through AT_SPI_BUS_ADDRESS. The daemon of
# the bus starts AT-SPI's registry, and the registry needs the same variable.
OPEN_BUS = """\
for program in dbus-daemon {python}; do
    command -v "$program" >/dev/null || {{ echo "$program is not installed"; exit 127; }}
done
{python} -c 'import gi; gi.require_version("Atspi", "2.0")' || exit 127
[ -e {configuration} ] || {{ echo "at-spi2-core is not installed"; exit 127; }}
setsid dbus-daemon --config-file={configuration} --address="$AT_SPI_BUS_ADDRESS" --nofork --nopidfile \\
    </dev/null >{folder}/bus.log 2>&1 &
for try in $(seq 200); do [ -S {folder}/{bus} ] && exit; sleep 0.05; done
cat {folder}/bus.log
exit 1
"""
BUS_CONFIGURATION = "/usr/share/defaults/at-spi2/accessibility.conf"

Observation = Literal["screenshot", "tree", "both"]
OBSERVATIONS: tuple[Observation, ...] = get_args(Observation)


class DesktopOptions(Spec):
    """Options of a desktop.

    width, height: the size of the screen in pixels.
    run: a shell command that opens programs. It ends when these programs are visible.
    observation: how the model sees the screen.
    actions: the vendor whose computer tool the model gets in place of the tools in ACTIONS, or None."""

    width: Annotated[int, Field(ge=64, le=4096)] = 1024
    height: Annotated[int, Field(ge=64, le=4096)] = 768
    run: LongText | None = None
    observation: Observation = "screenshot"
    actions: Vendor | None = None


DONE = "done"


class Desktop:
    """The screen of a sandbox. It stays open until the sandbox stops, because a grader may look at it."""

    def __init__(
        self, runtime: Runtime, options: DesktopOptions, *, seconds: float, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._seconds = seconds
        self._settle_seconds = settle_seconds
        self._folder = f"{runtime.scratch}/outrider-desktop"

    def tools(self) -> list[ToolSpec]:
        """Return the descriptions of the desktop's tools for the model."""
        options = self._options
        if options.actions is not None:
            zoom = options.observation != "tree"
            return computer_calls.tools(options.actions, options.width, options.height, zoom=zoom)
        specs = [action_tool(name) for name in _actions(options)]
        # The description names the size of the screen. The model cannot see the size in a screenshot, because models
        # and their servers scale images.
        specs[0]["function"]["description"] += f" It has {options.width}x{options.height} pixels."
        return specs

    def names(self) -> frozenset[str]:
        """Return the names of the desktop's tools."""
        return tool_names(self._options)

    async def open(self) -> None:
        """Start the screen, its window manager and the programs of the option `run`. Raises HarnessError with the
        output of what failed."""
        options = self._options
        await self._runtime.write(f"{self._folder}/openbox.xml", WINDOW_MANAGER.encode())
        script = OPEN.format(
            programs=" ".join(PROGRAMS),
            display=DISPLAY,
            folder=self._folder,
            width=options.width,
            height=options.height,
        )
        steps = [("the desktop", script, "xvfb, openbox, xdotool and scrot, and a display of its own")]
        if options.observation != "screenshot":
            await self._runtime.write(f"{self._folder}/{SCRIPT.name}", SCRIPT.read_bytes())
            bus = OPEN_BUS.format(python=PYTHON, configuration=BUS_CONFIGURATION, folder=self._folder, bus=BUS)
            steps.append(("the accessibility bus", bus, "at-spi2-core, dbus-daemon, gir1.2-atspi-2.0 and python3-gi"))
        if options.run is not None:
            steps.append(("its program", options.run, "the programs that `desktop.run` opens"))
        for what, command, needs in steps:
            done = await self._execute(command, OPEN_SECONDS)
            if done.exit_code != 0:
                raise HarnessError(
                    f"{what} does not start in the sandbox",
                    hint=f"the sandbox needs {needs}",
                    log_tail=done.log_tail(),
                )

    async def call(self, name: str, arguments: str) -> tuple[Part, ...]:
        """Run a call of one of the tools, and return its result. Raises RuntimeFailure if the sandbox is broken."""
        options = self._options
        try:
            if options.actions is None:
                actions = [msgspec.json.decode(arguments or "{}", type=ACTIONS[name])]
            else:
                actions = computer_calls.actions(
                    options.actions, name, arguments or "{}", options.width, options.height
                )
        except (ValueError, RecursionError) as error:
            return (Text(f"{'malformed arguments' if options.actions is None else 'nothing was done'}: {error}"),)
        for x, y in [pixel for action in actions for pixel in pixels(action)]:
            if not (x < options.width and y < options.height):
                return (Text(f"({x}, {y}) is not on the screen, which has {options.width}x{options.height}"),)
        if options.observation == "tree" and any(isinstance(action, Zoom) for action in actions):
            return (Text("nothing was done: the screen is given as text, which has no zoom"),)
        for action in actions:
            if options.actions is not None and isinstance(action, Screenshot):
                break  # a screenshot is always the last action, and is taken below
            result = await self._act(action)
            if result != Text(DONE):
                return (result,)
        if options.actions is None:
            return (Text(DONE),)
        # The vendors' models expect to see the screen after each call. Programs need a moment to show an effect.
        if not any(isinstance(action, Screenshot) for action in actions):
            await asyncio.sleep(self._settle_seconds)
        shown = [await self._screenshot()] if options.observation != "tree" else []
        return (*shown, await self._tree()) if options.observation != "screenshot" else tuple(shown)

    async def _act(self, action: Action) -> Part:
        match action:
            case Screenshot():
                return await self._screenshot()
            case Tree():
                return await self._tree()
            case Zoom():
                return await self._screenshot(action)
            case Position():
                place = await self._xdotool(*xdotool_arguments(action))
                return Text(" ".join(place.text.split(" ")[:2])) if isinstance(place, Text) else place
            case Wait():
                await asyncio.sleep(min(action.seconds, self._seconds))
                return Text(DONE)
            case Type() if "\0" in action.text:  # an argument of a program cannot contain NUL
                return Text("malformed arguments: the text has a NUL")
            case _:
                return await self._xdotool(*xdotool_arguments(action), release=release_arguments(action))

    async def _xdotool(self, *arguments: str, release: Sequence[str] = ()) -> Part:
        """Run xdotool. At the time limit, xdotool is killed, and then run again with the arguments `release`."""
        done = await self._execute(["xdotool", *arguments], self._seconds)
        if done.timed_out:
            if release:
                await self._execute(["xdotool", *release], self._seconds)
            return Text(f"[timed out after {self._seconds:g} s]")
        # xdotool exits with 0 even if a key is unknown. So if xdotool prints anything, its output is the result.
        return Text(done.log_tail().strip() or (DONE if done.exit_code == 0 else f"[exit code {done.exit_code}]"))

    async def _screenshot(self, part: Zoom | None = None) -> Part:
        """Return an image of the screen, or only of the area `part`."""
        file = f"{self._folder}/screen.png"
        area = ""
        if part is not None:
            (left, top), (right, bottom) = part.start, part.end
            area = f" --autoselect {left},{top},{right - left + 1},{bottom - top + 1}"
        done = await self._execute(f"scrot --overwrite{area} {file} && cat {file}", self._seconds)
        if done.exit_code != 0 or not done.stdout.startswith(PNG):
            return Text(f"[the screen cannot be read: {done.stderr.decode(errors='replace').strip()[-200:]}]")
        return image_from_bytes("image/png", done.stdout)

    async def _tree(self) -> Text:
        """Return the accessibility tree of the screen."""
        options, script = self._options, f"{self._folder}/{SCRIPT.name}"
        # The script reads for at most half of the time. The rest is for the start of the script, and for the last reply
        # that the script waits for.
        words = [PYTHON, script, str(options.width), str(options.height), f"{min(TREE_SECONDS, self._seconds / 2):g}"]
        done = await self._execute(words, self._seconds)
        if done.timed_out:
            return Text(f"[timed out after {self._seconds:g} s]")
        if done.exit_code != 0:
            why = done.stderr.decode(errors="replace").strip()[-200:]
            return Text(f"[the accessibility tree cannot be read: {why}]")
        return Text(done.stdout[:TREE_BYTES].decode(errors="replace"))

    async def _execute(self, command: str | Sequence[str], seconds: float) -> ExecResult:
        env = {"DISPLAY": DISPLAY}
        if self._options.observation != "screenshot":
            # The last two variables turn on accessibility in Chromium and in Qt. GTK always has it.
            env |= {
                "AT_SPI_BUS_ADDRESS": f"unix:path={self._folder}/{BUS}",
                "GNOME_ACCESSIBILITY": "1",
                "QT_LINUX_ACCESSIBILITY_ALWAYS_ON": "1",
            }
        return await self._runtime.exec(command, env=env, seconds=seconds)


def tool_names(options: DesktopOptions) -> frozenset[str]:
    """Return the names of the tools of a desktop with these options."""
    return frozenset(_actions(options)) if options.actions is None else computer_calls.names(options.actions)


def _actions(options: DesktopOptions) -> list[str]:
    """Return the names of the actions that the model may call."""
    without = {"screenshot": "tree", "tree": "screenshot"}.get(options.observation)
    return [name for name in ACTIONS if name != without]
