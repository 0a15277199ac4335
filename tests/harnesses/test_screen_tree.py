"""The text of an accessibility tree, made from elements without a screen: its lines and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest

from outrider.harnesses.screen_tree import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_TEXT,
    Box,
    Element,
    Gone,
    ScreenTree,
)

ON = frozenset({"showing", "enabled"})
BOX = Box(1, 2, 30, 40)


@dataclass
class Fake:
    """An element. Its children are `of`, or the element itself `endless` times."""

    kind: str = "panel"
    called: str = ""
    of: tuple[Fake, ...] = ()
    state: frozenset[str] = ON
    at: Box | None = BOX
    says: str = ""
    counts: float | None = None
    endless: int = 0
    asked: list[str] = field(default_factory=list)

    def states(self) -> frozenset[str]:
        self.asked.append("states")
        return self.state

    def role(self) -> str:
        return self.kind

    def name(self) -> str:
        return self.called

    def box(self) -> Box | None:
        return self.at

    def text(self) -> str:
        return self.says

    def number(self) -> float | None:
        return self.counts

    def count(self) -> int:
        return self.endless or len(self.of)

    def child(self, index: int) -> Element:
        return self if self.endless else self.of[index]


class Lost(Fake):
    def states(self) -> frozenset[str]:
        raise Gone


class Silent(Fake):
    def count(self) -> int:
        raise Gone


def window(*elements: Fake, name: str = "W", states: str = "") -> Fake:
    return Fake("frame", name, elements, state=ON | set(states.split()))


def text(*programs: Fake, seconds: float = 100.0) -> str:
    ticks = count()
    return ScreenTree(800, 600, seconds, clock=lambda: next(ticks) / 1000).read(Fake("desktop", of=programs))


def lines(*elements: Fake) -> list[str]:
    """Return the lines below a window, and the notes at the end."""
    first, second, *rest = text(Fake("application", "A", (window(*elements),))).splitlines()
    assert (first, second) == ('application "A"', '  frame "W" (1,2 30x40)')
    return rest


@pytest.mark.parametrize(
    ("element", "line"),
    [
        (Fake("push button", "Save"), 'push button "Save" (1,2 30x40)'),
        (Fake("push button", "Save", state=frozenset({"showing"})), 'push button "Save" [disabled] (1,2 30x40)'),
        (Fake("entry", "Name", says="Ann", state=ON | {"editable"}), 'entry "Name" value "Ann" [editable] (1,2 30x40)'),
        (Fake("link", "Home", says="Home"), 'link "Home" (1,2 30x40)'),
        (Fake("slider", "Size", counts=2.5), 'slider "Size" value "2.5" (1,2 30x40)'),
        (Fake("combo box", state=ON | {"expandable"}), "combo box [collapsed] (1,2 30x40)"),
        (Fake("heading", 'a\n"b" \x1b[31m'), 'heading "a \\"b\\" \\u001b[31m" (1,2 30x40)'),
        (Fake("heading", "x" * 1000), f'heading "{"x" * (MAX_TEXT - 1)}…" (1,2 30x40)'),
        (Fake("panel", "Group"), 'panel "Group" (1,2 30x40)'),
    ],
)
def test_an_element_is_a_line(element: Fake, line: str) -> None:
    assert lines(element) == [f"    {line}"]


def test_elements_without_a_meaning_of_their_own_are_left_out() -> None:
    button = Fake("push button", "OK", (Fake("static", "OK"),))
    assert lines(Fake("panel", of=(Fake("section", of=(button, Fake("static"))),))) == [
        '    push button "OK" (1,2 30x40)'
    ]
    assert lines(Fake("list", "L", (Fake("static", "one"),))) == [
        '    list "L" (1,2 30x40)',
        '      static "one" (1,2 30x40)',
    ]


def test_only_what_is_on_the_screen_is_in_the_tree() -> None:
    hidden = Fake("push button", "Below", (Fake("static", "child"),), state=frozenset({"enabled"}))
    outside = Fake("push button", "Outside", at=Box(800, 0, 5, 5))
    flat = Fake("panel", "Flat", (Fake("push button", "In"),), at=Box(0, 0, 9, 0))
    assert lines(hidden, outside, flat) == [
        '    push button "In" (1,2 30x40)',
        "[2 elements that are not on the screen are left out]",
    ]
    assert hidden.of[0].asked == []


def test_a_closed_combo_box_shows_its_choice() -> None:
    entries = tuple(
        Fake("menu item", name, state=ON if name == "two" else frozenset({"enabled"})) for name in ("one", "two")
    )
    assert lines(Fake("combo box", "Pick", (Fake("menu", of=entries, state=frozenset({"enabled"})),))) == [
        '    combo box "Pick" (1,2 30x40)',
        '      menu item "two" (1,2 30x40)',
        "[1 elements that are not on the screen are left out]",
    ]


def test_the_active_window_comes_first() -> None:
    idle = Fake("application", "Idle", (window(name="I"),))
    used = Fake("application", "Used", (window(name="Behind"), window(name="Front", states="active")))
    assert text(idle, Fake("application", "Without windows"), used).splitlines() == [
        'application "Used"',
        '  frame "Front" [active] (1,2 30x40)',
        '  frame "Behind" (1,2 30x40)',
        'application "Idle"',
        '  frame "I" (1,2 30x40)',
    ]


def test_a_screen_without_a_tree() -> None:
    assert text() == "[no program on the screen has an accessibility tree]"


def test_programs_and_elements_that_do_not_answer_are_counted() -> None:
    assert lines(Lost("push button"), Fake("push button", "OK"), Silent("list", "L")) == [
        '    push button "OK" (1,2 30x40)',
        '    list "L" (1,2 30x40)',
        "[2 elements or programs did not answer]",
    ]
    assert text(Silent("application", "A")) == "[1 elements or programs did not answer]"


def test_a_wide_tree_is_cut_at_its_length() -> None:
    many = Fake("push button", "x" * 90)
    shown = text(Fake("application", "A", (window(*[many] * 100_000),)))
    assert shown.endswith(f"\n[cut at {MAX_CHARACTERS} characters]")
    assert MAX_CHARACTERS - 200 < len(shown) < MAX_CHARACTERS + 50
    assert len(many.asked) < 200


def test_a_tree_of_hidden_elements_is_cut_at_their_number() -> None:
    hidden = Fake("push button", "x", state=frozenset())
    *_, cut, left = lines(*[hidden] * 100_000)
    assert cut == f"[cut after {MAX_ELEMENTS} elements]"
    assert left == f"[{len(hidden.asked)} elements that are not on the screen are left out]"
    assert len(hidden.asked) < MAX_ELEMENTS


def test_an_endless_tree_is_cut_at_its_depth_or_its_number() -> None:
    nested = Fake("group", "g", endless=1)
    *shown, left = lines(nested)
    assert len(shown) == MAX_DEPTH
    assert left == f"[1 elements more than {MAX_DEPTH} levels deep are left out]"
    assert "[cut " in "\n".join(lines(Fake("panel", endless=3)))


def test_a_slow_tree_is_cut_in_time() -> None:
    shown = text(Fake("application", "A", (window(*[Fake("push button", "b")] * 1000),)), seconds=0.1)
    assert shown.endswith("\n[cut because the programs on the screen take too long to answer]")
    assert 50 < shown.count("push button") < 100
