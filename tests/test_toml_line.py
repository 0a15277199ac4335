"""The line of a TOML file that sets a field."""

from __future__ import annotations

import pytest

from outrider.text_files import toml_line

TEXT = """a = 1
"b" = { c = 2 }
[one]
x = 1
[one.two]
y . z = 2
[[list]]
p = 1
[list.inner]
q = 2
[[list]]
p = 3
[list.inner]
q = 4
"""


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("a", 1),
        ("b.c", 2),
        ("one.x", 4),
        ("one.y", 3),
        ("one.two.y.z", 6),
        ("one.two.w", 5),
        ("list.0.p", 8),
        ("list.1.p", 12),
        ("list.1.inner.q", 14),
        ("list.1.inner.r", 13),
        ("list.0.r", 7),
        ("list", 7),
        ("nothing", None),
    ],
)
def test_the_line_of_a_field(field: str, line: int | None) -> None:
    assert toml_line(TEXT, field) == line
