"""The table of blame: examples of each rule, guarantees of the table over all combinations of facts, and mutants of
every rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest

from outrider.errors import (
    ContextOverflow,
    EngineUnavailable,
    EvaluatorError,
    HarnessError,
    RuntimeFailure,
    ServiceError,
)
from outrider.harnesses.base import ModelRefused, ProgramExit
from outrider.lifecycle import StopReason
from outrider.sessions.blame import RULES, Blame, BlameRule, Cause, End, Facts, Ruling, Stage, decide, end_of
from outrider.sessions.calls.limits import LimitReached

FLAGS = tuple(field.name for field in msgspec.structs.fields(Facts) if field.name not in ("stage", "end"))
HARM = ("stalled", "overdue")
INFRASTRUCTURE = ("unrecorded", "engine_failed", "in_vain")
IMPOSSIBLE = {
    *((stage, End.AGENT_CLOCK) for stage in (Stage.PREPARE, Stage.NEXT_STEP, Stage.GRADE)),
    # A stage without a failure needs no decision: the next stage begins.
    *((stage, End.RETURNED) for stage in (Stage.PREPARE, Stage.NEXT_STEP, Stage.GRADE)),
    # An evaluation has its own clock, which ends the evaluation with an EvaluatorError.
    (Stage.GRADE, End.SESSION_CLOCK),
}

Example = tuple[str, Facts, Blame, StopReason | Cause | None]


def run(end: End, *true: str) -> Facts:
    return Facts(stage=Stage.RUN, end=end, **dict.fromkeys(true, True))


def at(stage: Stage, end: End, *true: str) -> Facts:
    return Facts(stage=stage, end=end, **dict.fromkeys(true, True))


def examples() -> Iterator[Example]:
    """Yield facts for each rule, with the rule's name and decision: the fewest facts that the rule needs, and facts
    that lower-ranked rules fit as well."""
    worked = ("called", "replied")
    for end in End:
        bad = (*worked, "hung_up")
        yield "turn not stored", run(end, *worked, "unrecorded"), Blame.ERROR, Cause.UNRECORDED
        yield "turn not stored", run(end, *worked, "unrecorded", "engine_failed"), Blame.ERROR, Cause.UNRECORDED
        yield "engine failed", run(end, *worked, "engine_failed"), Blame.ERROR, Cause.ENGINE
        yield "engine failed", run(end, *worked, "engine_failed", "stalled", "limit"), Blame.ERROR, Cause.ENGINE
        yield "service stalled", run(end, *bad, "stalled"), Blame.ERROR, Cause.STALL
        yield "service stalled", run(end, *bad, "stalled", "overdue"), Blame.ERROR, Cause.STALL
        yield "overdue", run(end, *bad, "overdue"), Blame.ERROR, Cause.OVERDUE
        yield "overdue", run(end, *bad, "overdue", "in_vain"), Blame.ERROR, Cause.OVERDUE
        yield "waited in vain", run(end, *worked, "in_vain"), Blame.ERROR, Cause.IN_VAIN
        yield "waited in vain", run(end, *worked, "in_vain", "limit", "overflow"), Blame.ERROR, Cause.IN_VAIN
    for end in (End.TIMEOUT, End.SESSION_CLOCK):
        # An overlong prompt leads to neither of these ends, so only the stall can be at fault.
        yield "service stalled", run(end, *worked, "stalled", "overflow"), Blame.ERROR, Cause.STALL
        yield "limit", run(end, *worked, "stalled", "limit"), Blame.GRADE, None
    for end in (End.EXITED, End.PROGRAM):
        yield "limit", run(end, *worked, "stalled", "limit"), Blame.GRADE, None
        yield "prompt too long", run(end, *worked, "stalled", "overflow"), Blame.GRADE, StopReason.CONTEXT_OVERFLOW
    # A run that ended well is graded, whatever its agent had to wait for.
    for harm in HARM:
        yield "completed", run(End.RETURNED, *worked, harm), Blame.GRADE, StopReason.COMPLETED
    for stage in (Stage.PREPARE, Stage.RUN, Stage.NEXT_STEP, Stage.GRADE):
        yield "other error", at(stage, End.ERROR, *worked, "inside", "limit", "overflow"), Blame.ERROR, Cause.RAISED
    for stage in (Stage.PREPARE, Stage.RUN, Stage.NEXT_STEP):
        for end in (End.SANDBOX, End.EVALUATOR):
            yield "sandbox failed", at(stage, end, *worked, "limit", "overflow"), Blame.ERROR, Cause.RAISED
            yield "sandbox failed", at(stage, end, *worked, "inside"), Blame.AGENT, Cause.RAISED
            yield "sandbox failed", at(stage, end, "called", "inside"), Blame.ERROR, Cause.RAISED
    yield "model refused", run(End.REFUSED, *worked), Blame.GRADE, StopReason.NONZERO_EXIT
    yield "model refused", run(End.REFUSED, *worked, "limit", "overflow"), Blame.GRADE, StopReason.NONZERO_EXIT
    too_late = run(End.AGENT_CLOCK, *worked, "overflow", "limit")
    yield "prompt too long, out of time", too_late, Blame.GRADE, StopReason.CONTEXT_OVERFLOW
    yield "agent out of time", run(End.AGENT_CLOCK, *worked), Blame.GRADE, StopReason.AGENT_TIMEOUT
    yield "agent out of time", run(End.AGENT_CLOCK, *worked, "limit"), Blame.GRADE, StopReason.AGENT_TIMEOUT
    for end in (End.RETURNED, End.SESSION_CLOCK, End.TIMEOUT, End.LIMIT, End.EXITED, End.PROGRAM):
        yield "limit", run(end, *worked, "limit"), Blame.GRADE, None
        yield "limit", run(end, *worked, "limit", "overflow", "inside"), Blame.GRADE, None
    yield "limit", run(End.AGENT_CLOCK, "limit"), Blame.GRADE, None
    for end in (End.RETURNED, End.EXITED, End.PROGRAM):
        yield "prompt too long", run(end, *worked, "overflow"), Blame.GRADE, StopReason.CONTEXT_OVERFLOW
        yield "prompt too long", run(end, *worked, "overflow", "inside"), Blame.GRADE, StopReason.CONTEXT_OVERFLOW
        yield "prompt too long", run(end, "overflow"), Blame.GRADE, StopReason.CONTEXT_OVERFLOW
    yield "completed", run(End.RETURNED, *worked, "inside"), Blame.GRADE, StopReason.COMPLETED
    yield "completed", run(End.RETURNED, *worked), Blame.GRADE, StopReason.COMPLETED
    yield "exit code", run(End.EXITED, *worked, "inside"), Blame.GRADE, StopReason.NONZERO_EXIT
    for stage in (Stage.PREPARE, Stage.RUN, Stage.NEXT_STEP):
        inside = at(stage, End.SESSION_CLOCK, *worked, "inside")
        yield "session out of time", inside, Blame.UNGRADED, StopReason.SESSION_TIMEOUT
        yield "session out of time", at(stage, End.SESSION_CLOCK, *worked), Blame.UNGRADED, StopReason.SESSION_TIMEOUT
        yield "timed out by itself", at(stage, End.TIMEOUT, *worked), Blame.ERROR, Cause.OWN_TIMEOUT
        yield "timed out by itself", at(stage, End.TIMEOUT, *worked, "inside"), Blame.AGENT, Cause.OWN_TIMEOUT
        for end in (End.LIMIT, End.REFUSED, End.EXITED, End.PROGRAM):
            yield "program failed", at(stage, end), Blame.ERROR, Cause.RAISED
    yield "no reply", run(End.AGENT_CLOCK), Blame.ERROR, Cause.NO_REPLY
    yield "no reply", run(End.AGENT_CLOCK, "replied", "inside"), Blame.AGENT, Cause.NO_REPLY
    yield "no call", run(End.RETURNED), Blame.ERROR, Cause.NO_CALL
    yield "no call", run(End.RETURNED, "replied", "inside"), Blame.AGENT, Cause.NO_CALL
    yield "program failed", run(End.PROGRAM, *worked, "inside"), Blame.AGENT, Cause.RAISED
    for end in (End.SANDBOX, End.EVALUATOR, End.PROGRAM, End.EXITED, End.LIMIT, End.REFUSED, End.TIMEOUT):
        yield "grading failed", at(Stage.GRADE, end, "replied"), Blame.ERROR, Cause.RAISED
        yield "grading failed", at(Stage.GRADE, end, "replied", "inside"), Blame.AGENT, Cause.RAISED
        yield "grading failed", at(Stage.GRADE, end, "inside"), Blame.ERROR, Cause.RAISED
    unneeded = at(Stage.CONFIRM, End.EVALUATOR, "sandbox_failed")
    yield "no verdict without an agent", unneeded, Blame.GRADE, StopReason.AGENT_EXCESS
    for end in End:
        yield "not confirmed", at(Stage.CONFIRM, end), Blame.ERROR, Cause.FIRST


EXAMPLES = tuple(examples())


@cache
def all_facts() -> tuple[Facts, ...]:
    return tuple(
        Facts(stage=stage, end=end, **dict(zip(FLAGS, values, strict=True)))
        for stage, end in itertools.product(Stage, End)
        if (stage, end) not in IMPOSSIBLE
        for values in itertools.product((False, True), repeat=len(FLAGS))
        # The stage RUN does not use the last fact. The other stages use only the last three facts.
        if not (values[-1] if stage is Stage.RUN else any(values[:-3]))
    )


def test_examples() -> None:
    for rule, facts, become, detail in EXAMPLES:
        found = decide(facts)
        assert (found.rule, found.blame, detail in (found.reason, found.cause)) == (rule, become, True), facts
    assert {rule for rule, *_ in EXAMPLES} == {rule.name for rule in RULES}


def ended_well(facts: Facts) -> bool:
    """An oracle for `may_be_harmed`. It uses the reasons for which a run is graded, instead of the kinds of ends."""
    if facts.hung_up or facts.engine_failed:
        return False
    match facts.end:
        case End.LIMIT:
            return True
        case End.RETURNED:
            return facts.called or facts.limit or facts.overflow
        case End.EXITED | End.PROGRAM:
            return facts.limit or facts.overflow
        case End.SESSION_CLOCK | End.TIMEOUT:
            return facts.limit
        case _:
            return False


def test_a_failure_of_the_infrastructure_is_an_error_whatever_else_is_true() -> None:
    for facts in all_facts():
        if facts.stage is Stage.RUN:
            assert facts.may_be_harmed is not ended_well(facts), facts
            harmed = not ended_well(facts) and any(getattr(facts, name) for name in HARM)
            if harmed or facts.end is End.ERROR or any(getattr(facts, name) for name in INFRASTRUCTURE):
                assert decide(facts).blame is Blame.ERROR, facts
            if facts.explained:
                assert harmed or facts.unrecorded or facts.engine_failed, facts
        if facts.end in (End.ERROR, End.SANDBOX) and not facts.inside:
            assert decide(facts).blame is Blame.ERROR, facts


def test_an_agent_is_blamed_only_for_what_came_from_inside_after_a_reply() -> None:
    for facts in all_facts():
        if decide(facts).blame is Blame.AGENT:
            assert facts.inside, facts
            assert facts.replied, facts


def test_a_run_is_graded_only_if_its_model_was_there_or_the_agent_kept_it_from_replying() -> None:
    for facts in all_facts():
        if facts.stage is Stage.RUN and decide(facts).blame is Blame.GRADE:
            assert facts.called or facts.replied or facts.limit or facts.overflow, facts


def test_a_rule_has_a_reason_or_a_cause() -> None:
    assert {rule.name for rule in RULES if (rule.reason is None) == (rule.cause is None)} == {"limit"}


@cache
def fitting() -> tuple[frozenset[int], ...]:
    """Return, for each rule, the indices in `all_facts` of the facts that the rule fits."""
    return tuple(frozenset(n for n, facts in enumerate(all_facts()) if rule.fits(facts)) for rule in RULES)


def mutants() -> Iterator[tuple[str, tuple[BlameRule, ...]]]:
    for place, rule in enumerate(RULES):
        before, after = RULES[:place], RULES[place + 1 :]

        def changed(
            before: tuple[BlameRule, ...] = before,
            after: tuple[BlameRule, ...] = after,
            rule: BlameRule = rule,
            **to: object,
        ) -> tuple[BlameRule, ...]:
            return (*before, msgspec.structs.replace(rule, **to), *after)

        yield f"{rule.name}: removed", (*before, *after)
        for name in rule.when:
            yield f"{rule.name}: {name}", changed(when=tuple(one for one in rule.when if one != name))
        for stage in rule.stages:
            yield f"{rule.name}: {stage}", changed(stages=tuple(one for one in rule.stages if one is not stage))
        for end in rule.ends:
            yield f"{rule.name}: {end}", changed(ends=tuple(one for one in rule.ends if one is not end))
        if any(facts.inside and facts.replied and rule.fits(facts) for _, facts, _, _ in EXAMPLES):
            yield f"{rule.name}: maybe_agent", changed(maybe_agent=not rule.maybe_agent)
        other = StopReason.CANCELLED if rule.reason is None else None
        yield f"{rule.name}: reason", changed(reason=other, cause=None if rule.cause else Cause.FIRST)
        if after and rivals(place):
            yield f"{rule.name}: after {after[0].name}", (*before, after[0], rule, *after[1:])


def rivals(place: int) -> bool:
    """Return True if the order of a rule and the next rule matters for some facts."""
    earlier = frozenset[int]().union(*fitting()[:place])
    return bool(fitting()[place] & fitting()[place + 1] - earlier)


def decisions(rules: tuple[BlameRule, ...] = RULES) -> list[Ruling | None]:
    found: list[Ruling | None] = []
    for _, facts, _, _ in EXAMPLES:
        try:
            found.append(decide(facts, rules))
        except StopIteration:
            found.append(None)
    return found


@pytest.mark.deep
def test_an_example_fails_for_every_mutant() -> None:
    meant = decisions()
    assert not [name for name, rules in mutants() if decisions(rules) == meant]


def test_the_end_of_each_exception() -> None:
    raised = {
        TimeoutError(): End.TIMEOUT,
        LimitReached(StopReason.MAX_TURNS, None): End.LIMIT,
        ModelRefused("no"): End.REFUSED,
        ProgramExit("it exited with 3", exit_code=3, hint="", log_tail=""): End.EXITED,
        HarnessError("it crashed"): End.PROGRAM,
        ContextOverflow("it is too long"): End.PROGRAM,
        RuntimeFailure("it is gone"): End.SANDBOX,
        EvaluatorError("no verdict"): End.EVALUATOR,
        EngineUnavailable("none"): End.ERROR,
        ServiceError("broken"): End.ERROR,
        ValueError("a bug"): End.ERROR,
    }
    assert {error: end_of(error) for error in raised} == raised
