"""docs/security.md has the code's table of paths that tasks may not read."""

from __future__ import annotations

from outrider.sandbox.host_paths import KEPT

from .pages import page


def test_the_table_of_what_no_task_may_read() -> None:
    [table] = page("docs/security.md").tables("Of this machine")
    assert table.columns[1:] == ("A folder in it may be named", "May lie in what sandboxes are shown")
    said = {True: "no", False: "yes"}
    assert table.rows == tuple((rule.what, said[rule.below], said[rule.shown]) for rule in KEPT.values())
