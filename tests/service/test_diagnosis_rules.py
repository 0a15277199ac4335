"""Each rule of the doctor of runs finds a fault of its size and reports none for a smaller one. Another threshold or
the opposite comparison changes the findings, and a rule needs a minimum of evidence."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from outrider.schemas import RunFinding
from outrider.service.diagnosis.evidence import MOST_NAMES, NamedTallies, RunEvidence
from outrider.service.diagnosis.rules import MEASURES, RULES, Measured, RunRule, diagnose
from outrider.service.diagnosis.session_facts import EngineSpeed, SessionFacts
from outrider.trajectory import TurnTimings, VersionSpan

from .ailing import (
    PAIRS,
    Place,
    Plan,
    Planned,
    commands,
    differing,
    evidence_of,
    planned,
    slow,
    stale,
    stalled,
    tool,
    trend,
    uneven,
)

NAMES = [rule.name for rule in RULES]


def rule_of(name: str) -> RunRule:
    [rule] = [rule for rule in RULES if rule.name == name]
    return rule


def found(evidence: RunEvidence, rule: RunRule) -> list[RunFinding]:
    return diagnose(evidence, [rule])


def with_fault(name: str) -> RunEvidence:
    pair = PAIRS[name]
    return evidence_of(pair.plan(pair.fault), groups=pair.groups, n=pair.n)


def without_fault(name: str) -> RunEvidence:
    pair = PAIRS[name]
    return evidence_of(pair.plan(pair.sound), groups=pair.groups, n=pair.n)


def too_few(name: str) -> RunEvidence:
    """Return a run with a large fault and one unit less than the rule needs."""
    pair, rule = PAIRS[name], rule_of(name)
    if rule.unit == "groups":
        return evidence_of(pair.plan(pair.most), groups=rule.least - 1, n=2)
    least = rule.least + (name == "prompts that differ")  # the first sibling is compared with none
    return evidence_of(pair.plan(pair.most), groups=1, n=least - 1)


def test_every_rule_has_a_measure_and_a_pair_of_runs() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(MEASURES) == set(PAIRS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_finds_its_fault(name: str) -> None:
    evidence = with_fault(name)
    [finding] = [each for each in diagnose(evidence) if each.rule == name]
    rule = rule_of(name)
    assert finding.severity == rule.severity
    assert finding.next == rule.next
    assert 0 < len(finding.sessions) <= 5
    assert "{" not in finding.text
    assert "\n" not in finding.text
    assert float(finding.numbers["at_least"]) > rule.threshold


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_says_nothing_about_a_smaller_fault(name: str) -> None:
    assert found(without_fault(name), rule_of(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_says_nothing_without_enough_evidence(name: str) -> None:
    evidence, rule = too_few(name), rule_of(name)
    assert found(evidence, rule) == []
    assert found(evidence, msgspec.structs.replace(rule, least=2)), "the least number of units has no effect"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tools that never work"])
def test_another_threshold_changes_what_a_rule_finds(name: str) -> None:
    """A rule with a higher threshold misses the fault. With half of the threshold it reports the smaller fault."""
    rule = rule_of(name)
    higher = 2 * rule.threshold if not rule.percent or rule.threshold < 0.5 else (1 + rule.threshold) / 2
    assert found(with_fault(name), msgspec.structs.replace(rule, threshold=higher)) == []
    assert found(without_fault(name), msgspec.structs.replace(rule, threshold=rule.threshold / 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_the_other_way_round_fails(name: str) -> None:
    """A rule with the opposite comparison misses the fault and reports the smaller one."""

    class Reversed(RunRule, frozen=True, kw_only=True):
        def fits(self, measured: Measured) -> bool:
            return not super().fits(measured)

    turned = Reversed(**msgspec.structs.asdict(rule_of(name)))
    assert not [each for each in found(with_fault(name), turned) if each.subject in subjects(name)]
    assert found(without_fault(name), turned)


def subjects(name: str) -> set[str]:
    return {each.subject for each in found(with_fault(name), rule_of(name))}


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("errors", "runtime: runtime_failure"),
        ("timeouts", "agent_timeout"),
        ("sessions cut short", "max_turns"),
        ("tools that never work", "search"),
        ("uneven engines", "one"),
        ("prompts that differ", "date or time"),
        ("prompts that change", "path"),
        ("drift", ""),
    ],
)
def test_a_finding_names_its_subject(name: str, subject: str) -> None:
    assert subjects(name) == {subject}


def test_names_have_a_bound() -> None:
    tallies = NamedTallies()
    for number in range(2 * MOST_NAMES):
        tallies.at(f"cause {number}").add(1, 1, f"s-{number}")
    tallies.at("cause 0").add(1, 1, "s-0")
    assert len(tallies) == MOST_NAMES + 1
    assert tallies["others"].ratio.units == MOST_NAMES
    assert tallies["cause 0"].ratio.units == 2


def test_programs_and_engines_have_a_bound() -> None:
    evidence = RunEvidence()
    for number in range(2 * MOST_NAMES):
        facts = SessionFacts(
            session_id=f"s-{number}",
            turns=1,
            programs={f"program-{number}": 1.0, "ls": 2.0},
            speeds={f"engine-{number}": EngineSpeed(1.0, 10), "one": EngineSpeed(1.0, 10)},
        )
        evidence.add_facts("g", facts)
    assert len(evidence.speeds) == len(evidence.program_seconds) == MOST_NAMES
    assert evidence.program_seconds["ls"] == 4.0 * MOST_NAMES
    assert evidence.speeds["one"].count == 2 * MOST_NAMES


def test_the_commonest_kind_of_change_is_named() -> None:
    def plan(place: Place) -> Planned:
        kind = "Today is 2026-11-{:02}." if place.group % 3 else "Working directory: /work/{}"
        return differing(0.9, kind)(place)

    [finding] = found(evidence_of(plan), rule_of("prompts that differ"))
    assert finding.subject == "date or time"


def test_a_tool_that_often_works_is_not_one_that_never_works() -> None:
    rule = rule_of("tools that never work")
    often = evidence_of(tool(0.93))
    assert found(often, rule) == []
    assert found(often, msgspec.structs.replace(rule, given=0.9))
    assert found(evidence_of(tool(0.97)), rule)
    assert found(evidence_of(tool(0.97)), msgspec.structs.replace(rule, given=0.98)) == []
    few = evidence_of(tool(1.0), groups=5, n=3)
    assert found(few, rule)
    assert found(few, msgspec.structs.replace(rule, threshold=0.75)) == []


@pytest.mark.parametrize("kind", ["tests", "tokens"])
def test_a_fall_without_a_rise_of_the_reward_is_no_sign(kind: str) -> None:
    rule = rule_of("fewer tests, more reward" if kind == "tests" else "shorter answers, more reward")
    steady = evidence_of(trend(kind, rise=0.0)(0.9), groups=60)
    assert found(steady, rule) == []
    assert found(steady, msgspec.structs.replace(rule, given=-inf))
    rising = evidence_of(trend(kind)(0.9), groups=60)
    assert found(rising, rule)
    assert found(rising, msgspec.structs.replace(rule, given=20.0)) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("time spent")])
def test_the_time_of_short_sessions_is_not_judged(name: str) -> None:
    rule, evidence = rule_of(name), with_fault(name)
    assert found(evidence, rule)
    assert found(evidence, msgspec.structs.replace(rule, given=101.0)) == []
    [measured] = MEASURES[name](evidence)
    assert measured.given == pytest.approx(100)
    assert not rule.fits(msgspec.structs.replace(measured, given=4.9))


def test_the_slowest_programs_are_named() -> None:
    def plan(place: Place) -> Planned:
        made = PAIRS["time spent in tools"].plan(0.9)(place)
        ran = (("pytest -x", 1, 40.0), ("/bin/ls", 0, 0.001), ("cargo build", 0, 20.0))
        return made._replace(entries=commands(*ran))

    [finding] = found(evidence_of(plan), rule_of("time spent in tools"))
    assert "100 s, most of it in pytest, cargo (at least" in finding.text


def test_the_missing_programs_are_named_and_those_of_graders_are_not() -> None:
    rule = rule_of("missing programs")
    [finding] = found(with_fault("missing programs"), rule)
    assert "its program is missing, most often rg (at least" in finding.text
    graders = commands(("pytest", 127, 1.0), sandbox="grading")
    assert found(evidence_of(lambda place: planned(place)._replace(entries=graders)), rule) == []
    failing = commands(("pytest", 1, 1.0), ("make", 2, 1.0))
    assert found(evidence_of(lambda place: planned(place)._replace(entries=failing)), rule) == []


def test_a_lag_of_three_versions_is_not_stale() -> None:
    assert found(evidence_of(stale(0.9, lag=3)), rule_of("stale sessions")) == []
    assert found(evidence_of(stale(0.9, lag=4)), rule_of("stale sessions"))


def test_a_wait_is_a_stall_by_its_length_and_by_what_is_usual() -> None:
    rule = rule_of("stalled calls")
    assert found(evidence_of(stalled(0.5, seconds=29, usual=1)), rule) == []
    assert found(evidence_of(stalled(0.5, seconds=31, usual=1)), rule)
    assert found(evidence_of(stalled(0.5, seconds=99, usual=10)), rule) == []
    assert found(evidence_of(stalled(0.5, seconds=101, usual=10)), rule)


def test_the_first_call_of_a_session_may_wait_for_new_weights() -> None:
    def plan(versions: int) -> Plan:
        def of(place: Place) -> Planned:
            [first, *others] = stale(0.0)(place).turns
            seconds = 60.0 if place.among(0.2) else 1.0
            at = first.timings.received
            times = TurnTimings(received=at, first_token=at + seconds, finished=at + 70)
            spans = (VersionSpan(place.group * versions, 0, 10),)
            first, *others = (msgspec.structs.replace(turn, versions=spans) for turn in (first, *others))
            return planned(place, turns=[msgspec.structs.replace(first, timings=times), *others])

        return of

    assert found(evidence_of(plan(0)), rule_of("stalled calls"))
    assert found(evidence_of(plan(1)), rule_of("stalled calls")) == []


def test_an_engine_that_came_late_is_not_uneven() -> None:
    """The second engine has sessions only in the last tenth of the groups."""

    def plan(place: Place) -> Planned:
        made = uneven(1.0)(place)
        engine = "new" if place.group >= 90 and place.index % 2 else "one"
        return made._replace(turns=[msgspec.structs.replace(turn, engine=engine) for turn in made.turns])

    assert found(evidence_of(plan), rule_of("uneven engines")) == []


def test_the_slower_of_two_engines_is_named() -> None:
    [finding] = found(evidence_of(slow(3.0)), rule_of("slow engine"))
    assert finding.subject == "one"
    assert "the engine one takes 3." in finding.text


def test_findings_are_ordered_by_severity() -> None:
    def plan(place: Place) -> Planned:
        made = PAIRS["time spent in tools"].plan(0.9)(place)
        other = PAIRS["errors"].plan(0.5)(place)
        third = PAIRS["sessions cut short"].plan(0.5)(place)
        return made._replace(result=third.result | other.result | {"seconds": made.result["seconds"]})

    severities = [finding.severity for finding in diagnose(evidence_of(plan))]
    assert len(set(severities)) > 1
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert severities[0] == "error"


def test_a_run_without_a_fault_has_no_finding() -> None:
    assert diagnose(evidence_of(planned)) == []


def test_an_empty_run_has_no_finding() -> None:
    assert diagnose(RunEvidence()) == []
