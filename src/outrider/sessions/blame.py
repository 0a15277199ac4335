"""Decides what happens after a stage of an attempt has ended. The attempt is graded, ends without a grade, or fails
with an error, or the agent is blamed (`agent_excess`).

`decide(facts)` applies the first rule of RULES that fits. The callers of `decide` collect the facts and build the
errors. docs/failure.md lists the rules.

Invariants, which tests/sessions/test_blame.py checks for all combinations of facts:

- A failure of the infrastructure is never graded.
- An agent is blamed only if its model had replied and the failure came from inside its sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from outrider.errors import ContextOverflow, EvaluatorError, HarnessError, RuntimeFailure
from outrider.harnesses.base import ModelRefused, ProgramExit
from outrider.lifecycle import StopReason
from outrider.sessions.calls.limits import LimitReached

HARMFUL_SECONDS = 2.0
"""A delay of this many seconds can make an agent's client give up. The delay is either a single stall of the service,
or the sum of a run's delays while its calls waited for an engine, the store or the decoder of images. Shorter delays
are ignored, because a slow model call without any fault can take as long."""


class Stage(StrEnum):
    """A part of an attempt. The rules are applied when the part has ended."""

    PREPARE = "prepare"
    """The sandbox starts, and the harness is installed. No agent has run yet."""
    RUN = "run"
    """The agent runs, and its outcome is collected."""
    NEXT_STEP = "next step"
    """The sandbox in which an agent has worked is prepared for the task's next step."""
    GRADE = "grade"
    """The agent's outcome is evaluated. If the task carries files to a new sandbox, the files are copied first."""
    CONFIRM = "confirm"
    """A sandbox that no agent has touched is graded, to find out whether the agent is to blame for a failure of the
    agent's sandbox or of the grading."""


class End(StrEnum):
    """Why a stage has ended."""

    RETURNED = "its own end"
    AGENT_CLOCK = "the agent's time"
    SESSION_CLOCK = "the session's time"
    """The time limit of the session or of its preparation was reached."""
    TIMEOUT = "another timeout"
    """The stage raised TimeoutError, but no clock of the session had run out. Either a plugin raised the error, or the
    run was cut off because a limit was reached or a turn could not be stored."""
    LIMIT = "a limit"
    """An in-process agent raised `LimitReached`."""
    REFUSED = "a refusal"
    """An in-process agent raised `ModelRefused`, because a frozen model refused a call."""
    EXITED = "an exit code"
    """The agent's program exited with a code other than 0, which raises `ProgramExit`."""
    PROGRAM = "the program"
    """The stage raised a HarnessError other than `ProgramExit`, or an in-process agent raised ContextOverflow."""
    SANDBOX = "the sandbox"
    """The stage raised RuntimeFailure."""
    EVALUATOR = "the evaluator"
    """The stage raised EvaluatorError."""
    ERROR = "another error"
    """The stage raised any other exception: an error of an engine, the store or the service, or a bug in a plugin."""


def end_of(error: BaseException) -> End:
    """Return the `End` that stands for an exception of a stage. Every TimeoutError becomes TIMEOUT, so the caller must
    first check whether one of the session's own clocks has run out."""
    kinds = (
        (TimeoutError, End.TIMEOUT),
        (LimitReached, End.LIMIT),
        (ModelRefused, End.REFUSED),
        (ProgramExit, End.EXITED),
        (HarnessError | ContextOverflow, End.PROGRAM),
        (RuntimeFailure, End.SANDBOX),
        (EvaluatorError, End.EVALUATOR),
    )
    return next((end for kind, end in kinds if isinstance(error, kind)), End.ERROR)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the end of a stage."""

    stage: Stage
    end: End
    unrecorded: bool = False
    """A turn could not be stored."""
    engine_failed: bool = False
    """A model call failed, and no later call has made up for the failure by succeeding (see `FailedCalls`). A call that
    failed because its prompt was too long does not count."""
    stalled: bool = False
    """While the agent ran, the service stalled once for at least HARMFUL_SECONDS."""
    overdue: bool = False
    """The run's calls waited longer than usual for an engine, the store or the decoder of images, by HARMFUL_SECONDS or
    more in total."""
    in_vain: bool = False
    """The agent gave up waiting for a call because an engine was silent or slow, the store or the decoder of images was
    slow, or the policy was paused."""
    hung_up: bool = False
    """The agent's client disconnected during a call, before the run ended."""
    limit: bool = False
    """The newest model call was refused because the session had used up its turns or tokens."""
    overflow: bool = False
    """The prompt of a model call was too long, and no later call has made up for that call by succeeding."""
    called: bool = False
    """At least one model call to the policy was recorded as a turn in the task's current step."""
    replied: bool = False
    """The agent has received at least one whole reply in this session."""
    inside: bool = False
    """The failure came from inside a sandbox in which the agent had worked."""
    sandbox_failed: bool = False
    """Used only in the stage CONFIRM, which examines an earlier failure. True if the sandbox or a program had failed,
    False if the evaluator had failed."""

    @property
    def may_be_harmed(self) -> bool:
        """True if a late or missing reply may be the reason why the run ended in this way."""
        by_model = self.limit or self.overflow
        return (
            self.hung_up
            or self.engine_failed
            or self.end in (End.AGENT_CLOCK, End.REFUSED, End.SANDBOX, End.EVALUATOR, End.ERROR)
            or (self.end in (End.SESSION_CLOCK, End.TIMEOUT) and not self.limit)
            or (self.end in (End.EXITED, End.PROGRAM) and not by_model)
            or (self.end is End.RETURNED and not self.called and not by_model)
        )

    @property
    def explained(self) -> bool:
        """True if it is already known which part of the infrastructure failed. In this case, the calls that the agent
        gave up need not be checked."""
        delayed = self.stalled or self.overdue
        return self.unrecorded or self.engine_failed or (self.may_be_harmed and delayed)


class Blame(StrEnum):
    """The consequence for the attempt when a rule applies."""

    GRADE = "graded"
    UNGRADED = "not graded"
    """The session ends with a stop reason, but with neither a verdict nor an error. It is not tried again."""
    AGENT = "agent_excess"
    """The session ends with `agent_excess` if the failed operation succeeds in a sandbox that no agent has touched.

    If the agent's work can still be graded, its verdict counts. Otherwise the reward is the lower of 0 and the reward
    for doing nothing."""
    ERROR = "error"
    """The attempt fails. It is tried again if the error is retryable and the task has attempts left."""


class Cause(StrEnum):
    """The error with which an attempt ends, named by its error code or by its origin."""

    RAISED = "as raised"
    FIRST = "the first failure"
    UNRECORDED = "the store's"
    ENGINE = "the call's"
    STALL = "service_error"
    OVERDUE = "engine_silent or service_error"
    IN_VAIN = "engine_silent or service_error of the call"
    OWN_TIMEOUT = "harness_error (timed out by itself)"
    NO_REPLY = "harness_error (no reply in time)"
    NO_CALL = "harness_error (no model call)"


ANY = tuple(End)
WORKING = (Stage.PREPARE, Stage.RUN, Stage.NEXT_STEP)


class BlameRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule about the end of a stage.

    stages, ends, when: the rule fits if the stage is in `stages`, the end is in `ends`, and all facts named in `when`
        are true.
    cause: the error with which the attempt ends, or None.
    reason: the stop reason of the attempt, if `cause` is None. The attempt is then graded, unless the stop reason is
        SESSION_TIMEOUT. If `cause` and `reason` are both None, the stop reason is that of the limit that was reached.
    maybe_agent: if True, the agent is blamed instead, provided that the error came from inside the sandbox and the
        model had replied.
    """

    name: str
    stages: tuple[Stage, ...] = (Stage.RUN,)
    ends: tuple[End, ...] = ANY
    when: tuple[str, ...] = ()
    reason: StopReason | None = None
    cause: Cause | None = None
    maybe_agent: bool = False
    why: str

    @property
    def blame(self) -> Blame:
        if self.cause is not None:
            return Blame.ERROR
        return Blame.UNGRADED if self.reason is StopReason.SESSION_TIMEOUT else Blame.GRADE

    def fits(self, facts: Facts) -> bool:
        return facts.stage in self.stages and facts.end in self.ends and all(getattr(facts, name) for name in self.when)


RULES = (
    # The failures of the infrastructure come first, from broad to narrow, because a broad failure may have caused a
    # narrow one. The last of these rules is "sandbox failed", because none of the others can blame the agent.
    BlameRule(
        name="turn not stored",
        when=("unrecorded",),
        cause=Cause.UNRECORDED,
        why="samples would lack the turn",
    ),
    BlameRule(
        name="engine failed",
        when=("engine_failed",),
        cause=Cause.ENGINE,
        why="the policy was not there to decide what the agent does, and the broken reply may have used up a limit",
    ),
    BlameRule(
        name="service stalled",
        when=("stalled", "may_be_harmed"),
        cause=Cause.STALL,
        why="the agent's client may have given up meanwhile",
    ),
    BlameRule(
        name="overdue",
        when=("overdue", "may_be_harmed"),
        cause=Cause.OVERDUE,
        why="the agent's client may have given up meanwhile",
    ),
    BlameRule(
        name="waited in vain",
        when=("in_vain",),
        cause=Cause.IN_VAIN,
        why="an agent that gave a call up may end as if all were well",
    ),
    BlameRule(
        name="other error",
        stages=(*WORKING, Stage.GRADE),
        ends=(End.ERROR,),
        cause=Cause.RAISED,
        why="an engine, the store, the service or a plugin failed",
    ),
    BlameRule(
        name="sandbox failed",
        stages=WORKING,
        ends=(End.SANDBOX, End.EVALUATOR),
        cause=Cause.RAISED,
        maybe_agent=True,
        why="the agent could not work in the sandbox; a limit that was also reached does not matter",
    ),
    # The ordinary reasons for the end of a run follow. The stronger reason comes first.
    BlameRule(
        name="model refused",
        ends=(End.REFUSED,),
        when=("replied",),
        reason=StopReason.NONZERO_EXIT,
        why="the agent had used up a frozen model, or wrote it too long a prompt",
    ),
    BlameRule(
        name="prompt too long, out of time",
        ends=(End.AGENT_CLOCK,),
        when=("overflow",),
        reason=StopReason.CONTEXT_OVERFLOW,
        why="the agent could only wait after that",
    ),
    BlameRule(
        name="agent out of time",
        ends=(End.AGENT_CLOCK,),
        when=("called",),
        reason=StopReason.AGENT_TIMEOUT,
        why="the agent's work until then is its outcome",
    ),
    BlameRule(
        name="limit",
        ends=(End.RETURNED, End.AGENT_CLOCK, End.SESSION_CLOCK, End.TIMEOUT, End.LIMIT, End.EXITED, End.PROGRAM),
        when=("limit",),
        why="the session had used up its turns or tokens, whatever the program made of the refusal",
    ),
    BlameRule(
        name="prompt too long",
        ends=(End.RETURNED, End.EXITED, End.PROGRAM),
        when=("overflow",),
        reason=StopReason.CONTEXT_OVERFLOW,
        why="the agent wrote the prompt",
    ),
    BlameRule(
        name="completed",
        ends=(End.RETURNED,),
        when=("called",),
        reason=StopReason.COMPLETED,
        why="the run came to its end",
    ),
    BlameRule(
        name="exit code",
        ends=(End.EXITED,),
        when=("replied",),
        reason=StopReason.NONZERO_EXIT,
        why="with a model that replies, the exit is the agent's outcome",
    ),
    BlameRule(
        name="session out of time",
        stages=WORKING,
        ends=(End.SESSION_CLOCK,),
        reason=StopReason.SESSION_TIMEOUT,
        why="the bound covers sandboxes and prepare steps, too, so that its end says nothing about the policy",
    ),
    BlameRule(
        name="timed out by itself",
        stages=WORKING,
        ends=(End.TIMEOUT,),
        cause=Cause.OWN_TIMEOUT,
        maybe_agent=True,
        why="a plugin let out a timeout of its own",
    ),
    BlameRule(
        name="no reply",
        ends=(End.AGENT_CLOCK,),
        cause=Cause.NO_REPLY,
        maybe_agent=True,
        why="the agent never had a model",
    ),
    BlameRule(
        name="no call",
        ends=(End.RETURNED,),
        cause=Cause.NO_CALL,
        maybe_agent=True,
        why="the harness is set up wrongly: a program that never calls its model shows nothing about the policy",
    ),
    BlameRule(
        name="program failed",
        stages=WORKING,
        ends=(End.LIMIT, End.REFUSED, End.EXITED, End.PROGRAM),
        cause=Cause.RAISED,
        maybe_agent=True,
        why="the program failed before its model had replied, or could not be run",
    ),
    # The last rules are for gradings that failed. If a grading returns a verdict, no rule is needed.
    BlameRule(
        name="grading failed",
        stages=(Stage.GRADE,),
        ends=(End.SANDBOX, End.EVALUATOR, End.PROGRAM, End.EXITED, End.LIMIT, End.REFUSED, End.TIMEOUT),
        cause=Cause.RAISED,
        maybe_agent=True,
        why="without a verdict there is no reward",
    ),
    BlameRule(
        name="no verdict without an agent",
        stages=(Stage.CONFIRM,),
        ends=(End.EVALUATOR,),
        when=("sandbox_failed",),
        reason=StopReason.AGENT_EXCESS,
        why="the sandbox had failed, and an untouched one works; evaluators may need what an agent makes",
    ),
    BlameRule(
        name="not confirmed",
        stages=(Stage.CONFIRM,),
        cause=Cause.FIRST,
        why="the failed operation also fails without an agent",
    ),
)
"""The rules in order of precedence. The first rule that fits is applied."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one rule about an attempt. For `reason` and `cause`, see `BlameRule`. If `maybe_agent` is True,
    the agent is blamed for a failure that came from inside the sandbox."""

    rule: str
    blame: Blame
    reason: StopReason | None
    cause: Cause | None
    maybe_agent: bool


def decide(facts: Facts, rules: Sequence[BlameRule] = RULES) -> Ruling:
    """Apply the first rule that fits. Raises StopIteration for an end that the stage cannot have."""
    rule = next(rule for rule in rules if rule.fits(facts))
    maybe_agent = rule.maybe_agent and facts.replied
    blame = Blame.AGENT if maybe_agent and facts.inside else rule.blame
    return Ruling(rule=rule.name, blame=blame, reason=rule.reason, cause=rule.cause, maybe_agent=maybe_agent)
