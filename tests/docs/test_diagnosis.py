"""docs/diagnosis.md lists the rules of the code with their thresholds, and the constants of the code."""

from __future__ import annotations

import msgspec

from outrider.schemas import RunFinding
from outrider.service.diagnosis import doctor_of_runs, evidence, prompts, session_facts
from outrider.service.diagnosis.evidence import SAMPLED_GROUPS, SAMPLED_SESSIONS, TEST_COUNTS
from outrider.service.diagnosis.prompts import KINDS
from outrider.service.diagnosis.rules import RULES, RunRule

from .pages import code, page

PAGE = page("docs/diagnosis.md")


def shown(rule: RunRule) -> tuple[str, ...]:
    """Return a rule as a row of the page."""
    only = f"{rule.given_text} > {rule.given:g}" if rule.given_text else ""
    least = f"{rule.least} {rule.unit}"
    return f"`{rule.name}`", rule.severity, rule.looks_at, rule.shown_threshold(), least, only, rule.next


def test_the_rules_are_printed() -> None:
    (table,) = PAGE.tables("Rule")
    assert table.rows == tuple(map(shown, RULES))


def test_the_constants_are_printed() -> None:
    (table,) = PAGE.tables("Name")
    values = {code(name): float(value) for name, value, _ in table.rows}
    modules = (doctor_of_runs, evidence, prompts, session_facts)
    assert len(values) == 7
    for name, value in values.items():
        [found] = {vars(module)[name] for module in modules if name in vars(module)}
        assert found == value, name


def test_the_fields_of_a_finding_are_explained() -> None:
    (table,) = PAGE.tables("Field of a finding")
    assert [code(row[0]) for row in table.rows] == [field.name for field in msgspec.structs.fields(RunFinding)]


def test_the_names_and_the_size_of_the_sample_are_there() -> None:
    assert set(PAGE.spans) >= {*TEST_COUNTS, *(name for name, _ in KINDS)}
    assert f"up to {SAMPLED_SESSIONS} sessions of up to {SAMPLED_GROUPS} groups" in PAGE.text
