"""Prints the accessibility tree of a screen: python3 screen_tree.py WIDTH HEIGHT SECONDS.

This program runs inside a sandbox, with Debian's Python and its bindings of AT-SPI (`gir1.2-atspi-2.0`, `python3-gi`).
Each line describes one element on the screen: its role, name, value, states, and box in pixels. A line is indented
below the line of the element's parent.

Invariant: the output has at most MAX_CHARACTERS characters and is complete after about SECONDS, even if a program
reports elements without end. Notes at the end count the elements that are left out.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

MAX_CHARACTERS = 16_000
"""Maximum characters of the output. The limit for results of tools is higher, so the output is not cut again."""
MAX_ELEMENTS = 5_000
"""Maximum number of elements that are read, printed or not."""
MAX_DEPTH = 50
"""Maximum levels of elements below a window."""
MAX_TEXT = 200
"""Maximum characters of an element's name or value."""
CALL_SECONDS = 1.0
"""Time limit in seconds of one query to a program."""

EMBEDDED = "\ufffc"
"""In an element's text, this character stands for a child."""

WRAPPERS = frozenset(
    (
        "filler",
        "internal frame",
        "label",
        "layered pane",
        "notification",
        "panel",
        "paragraph",
        "redundant object",
        "root pane",
        "scroll pane",
        "section",
        "separator",
        "split pane",
        "static",
        "text",
        "unknown",
        "viewport",
    )
)
"""Roles of elements that are not printed, unless they have a name, a value or a state in NOTED."""

NOTED = (
    "active",
    "focused",
    "checked",
    "indeterminate",
    "pressed",
    "selected",
    "expanded",
    "editable",
    "required",
    "read-only",
    "invalid-entry",
    "busy",
    "modal",
)
"""The states that are printed. Other states are not, because most elements have them."""


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int


class Gone(Exception):
    """The element no longer exists, or its program does not reply."""


class Element(Protocol):
    """An element of an accessibility tree. Every method may raise Gone."""

    def states(self) -> frozenset[str]: ...
    def role(self) -> str: ...
    def name(self) -> str: ...
    def box(self) -> Box | None: ...
    def text(self) -> str: ...
    def number(self) -> float | None: ...
    def count(self) -> int: ...
    def child(self, index: int) -> Element: ...


class Full(Exception):
    """The output has reached a limit. The message becomes a note at the end of the output."""


class ScreenTree:
    """Writes an accessibility tree as text. `until` is the time, as told by `clock`, at which reading stops."""

    def __init__(self, width: int, height: int, until: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._width, self._height = width, height
        self._until, self._clock = until, clock
        self._lines: list[str] = []
        self._left = MAX_CHARACTERS
        self._read = 0
        self._hidden = 0
        self._deeper = 0
        self._gone = 0

    def read(self, desktop: Element) -> str:
        """Return the accessibility trees of the programs on a desktop as text, the active program first."""
        try:
            programs = [(program, self._windows(program)) for program in self._children(desktop)]
            for program, windows in sorted(programs, key=lambda each: not any(active for active, _ in each[1])):
                self._program(program, windows)
            note = "" if self._lines or self._gone else "no program on the screen has an accessibility tree"
        except Full as full:
            note = str(full)
        notes = (
            note,
            f"{self._hidden} elements that are not on the screen are left out" if self._hidden else "",
            f"{self._deeper} elements more than {MAX_DEPTH} levels deep are left out" if self._deeper else "",
            f"{self._gone} elements or programs did not answer" if self._gone else "",
        )
        return "\n".join([*self._lines, *(f"[{each}]" for each in notes if each)])

    def _children(self, element: Element) -> Iterator[Element]:
        try:
            count = element.count()
        except Gone:
            self._gone += 1
            return
        for index in range(count):
            self._count()
            try:
                yield element.child(index)
            except Gone:
                self._gone += 1

    def _windows(self, program: Element) -> list[tuple[bool, Element]]:
        """Return the windows of a program, each with True if it is active. The active window comes first."""
        windows = []
        for window in self._children(program):
            try:
                windows.append(("active" in window.states(), window))
            except Gone:
                self._gone += 1
        return sorted(windows, key=lambda each: not each[0])

    def _program(self, program: Element, windows: list[tuple[bool, Element]]) -> None:
        try:
            self._add(f"application {_quoted(program.name())}")
        except Gone:
            self._gone += 1
            return
        lines = len(self._lines)
        for _, window in windows:
            self._element(window, 1, 0, within=None)
        if len(self._lines) == lines:
            self._left += len(self._lines.pop()) + 1

    def _element(self, element: Element, indent: int, depth: int, *, within: str | None) -> None:
        """Add the lines of an element and of all elements below it. `within` is its parent's name, or None for a
        window."""
        try:
            states, role = element.states(), element.role()
            shown = "showing" in states
            # A menu is read even if it is not on the screen: it may contain the chosen entry of a closed combo box.
            if not shown and (role != "menu" or within is None):
                self._hidden += 1
                return
            name = _one_line(element.name())
            line = self._line(element, role, name, states) if shown else None
            if line is not None and not (role in ("static", "text") and name == within and not line.noted):
                self._add("  " * indent + line.text)
                indent += 1
            if depth >= MAX_DEPTH:
                self._deeper += element.count()
                return
        except Gone:
            self._gone += 1
            return
        for child in self._children(element):
            self._element(child, indent, depth + 1, within=name)

    def _line(self, element: Element, role: str, name: str, states: frozenset[str]) -> _Line | None:
        """Return the line of an element. Returns None if there is nothing to print, or if the element is not on the
        screen."""
        box = element.box()
        if box is None or box.width <= 0 or box.height <= 0:
            return None
        if box.x >= self._width or box.y >= self._height or box.x + box.width <= 0 or box.y + box.height <= 0:
            self._hidden += 1
            return None
        value = _one_line(element.text())
        if value == name:
            value = ""
        number = None if value else element.number()
        if number is not None:
            value = f"{number:g}"
        noted = [state for state in NOTED if state in states]
        if "expandable" in states and "expanded" not in states:
            noted.append("collapsed")
        if not states & {"enabled", "sensitive", "read-only"}:
            noted.append("disabled")
        if role in WRAPPERS and not (name or value or noted):
            return None
        words = [role]
        if name:
            words.append(_quoted(name))
        if value:
            words.append(f"value {_quoted(value)}")
        words += [f"[{state}]" for state in noted]
        words.append(f"({box.x},{box.y} {box.width}x{box.height})")
        return _Line(" ".join(words), bool(value or noted))

    def _count(self) -> None:
        if self._read >= MAX_ELEMENTS:
            raise Full(f"cut after {MAX_ELEMENTS} elements")
        if self._clock() >= self._until:
            raise Full("cut because the programs on the screen take too long to answer")
        self._read += 1

    def _add(self, line: str) -> None:
        if len(line) >= self._left:
            raise Full(f"cut at {MAX_CHARACTERS} characters")
        self._left -= len(line) + 1
        self._lines.append(line)


class _Line(NamedTuple):
    text: str
    noted: bool


def _one_line(text: str) -> str:
    words = " ".join(text[: 2 * MAX_TEXT].replace(EMBEDDED, " ").split())
    return words if len(words) <= MAX_TEXT else words[: MAX_TEXT - 1] + "…"


def _quoted(text: str) -> str:
    return json.dumps(_one_line(text), ensure_ascii=False)


class Accessible:
    """An element of an accessibility tree from AT-SPI. `atspi` is the module with the bindings."""

    def __init__(self, atspi: Any, accessible: Any) -> None:
        self._atspi = atspi
        self._accessible = accessible

    def states(self) -> frozenset[str]:
        return frozenset(state.value_nick for state in self._ask(self._accessible.get_state_set).get_states())

    def role(self) -> str:
        return str(self._ask(self._accessible.get_role_name))

    def name(self) -> str:
        return str(self._ask(self._accessible.get_name))

    def box(self) -> Box | None:
        if "Component" not in self._interfaces():
            return None
        box = self._ask(self._atspi.Component.get_extents, self._accessible, self._atspi.CoordType.SCREEN)
        return Box(box.x, box.y, box.width, box.height)

    def text(self) -> str:
        """Return the beginning of the element's own text. Returns "" if the element has no text, or if it has children
        and cannot be edited."""
        interfaces = self._interfaces()
        if "Text" not in interfaces or ("EditableText" not in interfaces and self.count() > 0):
            return ""
        return str(self._ask(self._atspi.Text.get_text, self._accessible, 0, 2 * MAX_TEXT))

    def number(self) -> float | None:
        if "Value" not in self._interfaces():
            return None
        return float(self._ask(self._atspi.Value.get_current_value, self._accessible))

    def count(self) -> int:
        return int(self._ask(self._accessible.get_child_count))

    def child(self, index: int) -> Element:
        return Accessible(self._atspi, self._ask(self._accessible.get_child_at_index, index))

    def _interfaces(self) -> list[str]:
        return list(self._ask(self._accessible.get_interfaces))

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        start = time.monotonic()
        try:
            answer = question(*arguments)
        except Exception as error:  # this catches GLib.Error, whose module may be missing, so it cannot be named here
            raise Gone from error
        # If a query exceeds its time limit, the library may return 0 or "" instead of raising an error.
        if answer is None or time.monotonic() - start >= CALL_SECONDS:
            raise Gone
        return answer


def main(width: int, height: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    warnings.simplefilter("ignore")  # the bindings warn about many of their own functions, which are deprecated
    importlib.import_module("gi").require_version("Atspi", "2.0")
    atspi = importlib.import_module("gi.repository.Atspi")
    atspi.set_timeout(int(CALL_SECONDS * 1000), int(CALL_SECONDS * 1000))
    text = ScreenTree(width, height, until).read(Accessible(atspi, atspi.get_desktop(0)))
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
