"""docs/evaluators/math.md has the confusion table of the labelled pairs. (A deep test compares the pairs' verdicts.)"""

from __future__ import annotations

from evaluators.math_pairs import confusion_table, read_pairs

from .pages import page

[TABLE] = page("docs/evaluators/math.md").tables("Family")


def test_the_confusion_table_is_that_of_the_pairs() -> None:
    assert TABLE.columns == ("Family", "right: 1", "right: 0", "wrong: 0", "wrong: 1")
    assert list(TABLE.rows) == confusion_table(read_pairs())
