"""docs/branches.md lists the rules and differences of the code with their reasons, and the defaults and limits of the
code.
"""

from __future__ import annotations

from outrider.tokens.branches.branch_signals import LABELS, LOOK_BACK, MAX_TOOL_TEXTS, PURPOSES
from outrider.tokens.branches.classify import RULES, TURN_RULES
from outrider.tokens.branches.segments import QUOTE_SHARE
from outrider.tokens.samples import POLICY
from outrider.tokens.tree.canonical import DIFFERENCES, PRINTED_FIELDS
from outrider.trajectory import BranchKind

from .pages import Table, code, page

PAGE = page("docs/branches.md")


def table(first: str) -> Table:
    [found] = PAGE.tables(first)
    return found


def test_every_rule_is_there_in_its_order() -> None:
    assert table("Rule").rows == tuple((f"`{rule.name}`", rule.kind, rule.reason) for rule in RULES)
    assert table("Turn rule").rows == tuple((f"`{rule.name}`", rule.kind, rule.reason) for rule in TURN_RULES)


def test_every_difference_is_there() -> None:
    rows = tuple((row.change, row.effect.value, row.reason) for row in DIFFERENCES)
    assert table("What the client did").rows == rows


def test_every_kind_is_there_with_its_default() -> None:
    rows = {code(row[0]): row[1] for row in table("Kind").rows}
    assert rows == {kind.value: POLICY[kind].value for kind in BranchKind}


def test_every_purpose_label_and_limit_is_there() -> None:
    assert {code(row[0]): row[1] for row in table("Purpose").rows} == {
        word: kind.value for word, kind in PURPOSES.items()
    }
    assert set(PAGE.spans) >= {label for _, label in LABELS}
    assert f"at least {QUOTE_SHARE:.0%} of".replace("%", " %") in PAGE.text
    assert f"the last {LOOK_BACK} turns" in PAGE.text
    assert f"the last {MAX_TOOL_TEXTS} texts" in PAGE.text


def test_every_family_is_there_with_what_it_shows() -> None:
    shown = {code(row[0]): tuple(cell == "yes" for cell in row[1:]) for row in table("Family").rows}
    assert shown == {name: (one.call_ids, one.names, one.outer_space) for name, one in PRINTED_FIELDS.items()}
