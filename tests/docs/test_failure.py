"""docs/failure.md lists all background work that can fail, and prints the rules that decide how an attempt ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import outrider
from docs.pages import ROOT, page
from outrider.engines.pool.placement import EngineTask
from outrider.sessions.blame import ANY, RULES, Blame, BlameRule, Facts

SOURCES = Path(outrider.__file__).parent
NAMED = {"begin": 0, "until_done": 0, "note": 0, "note_success": 0}
"""Methods of `Chores` and `Failures`, with the position of the argument that names the work."""


def name_in(node: ast.expr) -> str | None:
    """Return the text of a string, with … for each value that is filled in; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def names() -> Iterator[str]:
    for path in SOURCES.rglob("*.py"):
        source = path.read_text()
        if "Chores" not in source and "Failures" not in source and "self._tasks." not in source:
            continue
        tree = ast.parse(source)
        constants = {
            target.id: name
            for node in tree.body
            if isinstance(node, ast.Assign) and (name := name_in(node.value)) is not None
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method = node.func.attr
            given = [word.value for word in node.keywords if word.arg == "chore"]
            of_a_task_group = isinstance(node.func.value, ast.Name) and node.func.value.id == "tasks"
            if not given and method == "create_task" and "Chores(" in source and not of_a_task_group:
                given = [word.value for word in node.keywords if word.arg == "name"]
            if method in NAMED and len(node.args) > NAMED[method]:
                given = [node.args[NAMED[method]]]
            for each in given:
                name = constants.get(each.id) if isinstance(each, ast.Name) else name_in(each)
                if name is not None:
                    yield name


def test_all_background_work_is_listed() -> None:
    page = (ROOT / "docs" / "failure.md").read_text()
    section = page.partition("## When the machine lacks something")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    found = set(names())
    assert len(found) > 20
    found |= {f"{what} …" for what in get_args(EngineTask)}
    assert found <= listed
    # These names are variables in the calls, or belong to work of `Chores` that another file makes.
    others = {
        "process of node …", "use engine …", "checkpoints of the database", "start a sandbox for an evaluation",
        "stream of a pod", "gateway tunnel",
    }  # fmt: skip
    assert listed - found == others


def shown(rule: BlameRule) -> tuple[str, ...]:
    """Return a rule as a row of the page."""
    ends = "any" if rule.ends == ANY else ", ".join(rule.ends)
    ending = rule.blame.value
    if rule.reason is not None:
        ending = f"`{rule.reason}`, {ending}"
    elif rule.blame is Blame.GRADE:
        ending = f"the limit, {ending}"
    if rule.cause is not None:
        ending = f"{ending}: {rule.cause}"
    maybe = "yes" if rule.maybe_agent else "no"
    when = ", ".join(f"`{name}`" for name in rule.when) or "always"
    return f"`{rule.name}`", ", ".join(rule.stages), ends, when, ending, maybe, rule.why


def test_the_rules_of_blame_are_printed() -> None:
    (table,) = page("docs/failure.md").tables("Rule")
    assert table.rows == tuple(map(shown, RULES))


def test_every_fact_that_a_rule_names_is_explained() -> None:
    (table,) = page("docs/failure.md").tables("Fact")
    assert {row[0].strip("`") for row in table.rows} == {name for rule in RULES for name in rule.when}
    assert {name for rule in RULES for name in rule.when} <= set(dir(Facts))


def policies() -> Iterator[tuple[str, str, str, str | None]]:
    """Yield the retry policies of the package: name, first wait, longest wait, and the limit of attempts or None."""
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if "RetryPolicy(" in text else ():
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if ast.unparse(node.value.func) == "RetryPolicy":
                given = {word.arg: ast.literal_eval(word.value) for word in node.value.keywords}
                module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
                attempts = str(given["attempts"]) if "attempts" in given else None
                yield (
                    f"{module}.{ast.unparse(node.targets[0])}",
                    f"{given['first']:g} s",
                    f"{given['longest']:g} s",
                    attempts,
                )


def test_everything_that_is_tried_again_is_listed() -> None:
    (table,) = page("docs/failure.md").tables("Policy")
    rows = {row[0].strip("`"): row[1:4] for row in table.rows}
    found = {
        name: (first, longest, attempts or rows.get(name, ("", "", ""))[2])
        for name, first, longest, attempts in policies()
    }
    assert rows == found
