"""The table of rules by which the doctor of runs finds problems, and `diagnose`, which applies the rules to a run.

A rule compares a measurement with a threshold. It uses the conservative confidence bound of the measurement
(`statistics.py`), and requires a minimum number of independent units, such as sessions. Too little data therefore leads
to no finding. docs/diagnosis.md contains the table. Invariant: the findings depend only on the evidence and the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, isnan
from statistics import median
from typing import Literal

import msgspec

from outrider.schemas import RunFinding, Severity
from outrider.service.diagnosis.evidence import (
    MOST_EXAMPLES,
    STALE_VERSIONS,
    STALL_SECONDS,
    STALL_TIMES,
    EngineStart,
    GroupPoint,
    NamedTallies,
    RunEvidence,
    SessionTally,
    VersionUse,
)
from outrider.service.diagnosis.prompts import ChangedLine
from outrider.service.diagnosis.statistics import ClusterShare, Moments, least_fall, least_rise, least_times

ORDER: Sequence[Severity] = ("error", "warning", "info")
"""Severities, from the worst to the mildest."""
LEAST_SESSION_SECONDS = 5.0
"""Shares of a session's time are judged only if sessions take at least this many seconds on average. Shorter sessions
spend most of their time on starting and stopping."""
MOST_PROGRAMS = 3
"""Maximum number of programs that a finding names."""
MOST_SUBJECT = 200
"""Maximum number of characters of a finding's subject."""
THIRD = 3
"""A run's groups are divided into this many parts. The first and the last part are compared to find a trend."""

Unit = Literal["sessions", "groups"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A rule's measurement on a run.

    bound: the conservative confidence bound, which is compared with the rule's threshold.
    value: the estimate.
    units: the number of independent units.
    given: a second number, which is compared with the rule's `given`.
    subject: the name of what was measured, such as a tool.
    numbers, sessions: evidence for the finding.
    """

    bound: float
    value: float
    units: int
    given: float = inf
    subject: str = ""
    numbers: dict[str, float | str] = {}
    sessions: tuple[str, ...] = ()


Measure = Callable[[RunEvidence], Iterable[Measured]]


class RunRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule. It finds a problem if the measurement (`MEASURES`) has a bound above `threshold`, a `given` above the
    rule's `given`, and at least `least` units.

    looks_at: describes the measurement.
    finding: the message for people, with placeholders for the fields of Measured.
    percent: True if `value` and `bound` are printed as percentages.
    next: the recommended next step.
    """

    name: str
    severity: Severity
    looks_at: str
    threshold: float
    percent: bool = True
    least: int
    unit: Unit = "sessions"
    given: float = -inf
    given_text: str = ""
    finding: str
    next: str

    def fits(self, measured: Measured) -> bool:
        return measured.units >= self.least and measured.bound > self.threshold and measured.given > self.given

    def shown_threshold(self) -> str:
        return _number(self.threshold, self.percent)

    def found(self, measured: Measured) -> RunFinding:
        # The subject may be a tool name that a model has invented, with any length and any characters.
        subject = " ".join(measured.subject.split())[:MOST_SUBJECT]
        shown = {
            "value": _number(measured.value, self.percent),
            "bound": _number(measured.bound, self.percent),
            "units": f"{measured.units:,}",
            "subject": subject,
            "of": f" of {subject}" if subject else "",
        } | {name: _plain(value) for name, value in measured.numbers.items()}
        numbers: dict[str, float | str] = {
            "value": measured.value,
            "at_least": measured.bound,
            "threshold": self.threshold,
            self.unit: float(measured.units),
        }
        return RunFinding(
            rule=self.name,
            severity=self.severity,
            text=self.finding.format_map(shown),
            subject=subject,
            numbers=numbers | measured.numbers,
            sessions=measured.sessions,
            next=self.next,
        )


RULES: Sequence[RunRule] = (
    RunRule(
        name="errors",
        severity="error",
        looks_at="sessions that end with an error, for each boundary and code of the error",
        threshold=0.05,
        least=20,
        finding="{value} of {units} sessions end with the error {subject} (at least {bound})",
        next="open a session and read the error's hint; docs/failure.md explains each boundary",
    ),
    RunRule(
        name="timeouts",
        severity="warning",
        looks_at="sessions that end with `agent_timeout`, `session_timeout` or `expired`, for each reason",
        threshold=0.1,
        least=20,
        finding="{value} of {units} sessions end with {subject} (at least {bound})",
        next="raise the task's limits, or look in the sessions at what takes so long; `expired`: submit less at a time",
    ),
    RunRule(
        name="sessions cut short",
        severity="warning",
        looks_at="sessions that end with `max_tokens`, `max_turns` or `context_overflow`, for each reason",
        threshold=0.2,
        least=20,
        finding="{value} of {units} sessions are cut short by {subject} (at least {bound})",
        next="raise this limit of the task, or exclude such sessions from training with the filter `truncated`",
    ),
    RunRule(
        name="programs that fail",
        severity="warning",
        looks_at="sessions that end with `nonzero_exit`",
        threshold=0.2,
        least=20,
        finding="the agent program of {value} of {units} sessions fails, and its work is graded (at least {bound})",
        next="read the end of the program's output in one of the sessions",
    ),
    RunRule(
        name="equal rewards",
        severity="warning",
        looks_at="done groups of training with two rewards or more, all of them equal",
        threshold=0.7,
        least=24,
        unit="groups",
        finding="{value} of {units} groups have no spread of rewards, so nothing can be learned from them"
        " (at least {bound})",
        next="choose tasks that are neither solved nor failed each time, or let `DynamicSampler` replace such groups",
    ),
    RunRule(
        name="fewer tests, more reward",
        severity="error",
        looks_at="relative fall of the number of tests that run, from the first to the last third of the groups",
        threshold=0.1,
        least=30,
        unit="groups",
        given=0.3,
        given_text="the reward rises, in standard deviations",
        finding="rewards{of} rise from {reward_before} to {reward_after} while the number of tests that run falls by"
        " {value} (at least {bound}): the policy may have learned to avoid the tests",
        next="open the sessions, which have the best reward and the fewest tests, and see what happened to the tests",
    ),
    RunRule(
        name="shorter answers, more reward",
        severity="warning",
        looks_at="relative fall of the sampled tokens, from the first to the last third of the groups without a count"
        " of tests",
        threshold=0.5,
        least=30,
        unit="groups",
        given=0.3,
        given_text="the reward rises, in standard deviations",
        finding="rewards{of} rise from {reward_before} to {reward_after} while sessions get shorter by {value}"
        " (at least {bound}): the policy may have found a short way around the task",
        next="open the sessions, which have the best reward and the fewest tokens, and check that they solve the task",
    ),
    RunRule(
        name="tools that never work",
        severity="error",
        looks_at="results of a tool that show a failure, for each tool",
        threshold=0.5,
        least=12,
        given=0.95,
        given_text="share of failures",
        finding="{value} of the {results} results of the tool {subject} are failures, in {units} sessions"
        " (at least {bound})",
        next="open a session and read the tool's results; try the tool's command in a sandbox of the task",
    ),
    RunRule(
        name="missing programs",
        severity="warning",
        looks_at="sessions with a command in the agent's sandbox that ends with the exit code 126 or 127, of the"
        " sessions with commands in their timeline",
        threshold=0.2,
        least=20,
        finding="in {value} of {units} sessions a command cannot be run because its program is missing, most often"
        " {programs} (at least {bound})",
        next="add the programs to the image or the prepare steps, or tell the model which programs there are",
    ),
    RunRule(
        name="malformed calls",
        severity="warning",
        looks_at="tool calls that cannot be parsed, of all tool calls",
        threshold=0.05,
        least=20,
        finding="{value} of {calls} tool calls are malformed (at least {bound})",
        next="check that `model.renderer` fits the model, and that the temperature is not too high",
    ),
    RunRule(
        name="replies cut off",
        severity="warning",
        looks_at="sessions with a reply that ends at the token limit (finish reason `length`)",
        threshold=0.1,
        least=20,
        finding="a reply is cut off at the token limit in {value} of {units} sessions (at least {bound})",
        next="raise the task's `sampling.max_tokens`, or ask for shorter replies",
    ),
    RunRule(
        name="drift",
        severity="error",
        looks_at="sessions for which the engine reports other ids than were recorded",
        threshold=0.02,
        least=20,
        finding="the engine reports other ids than were recorded in {value} of {units} sessions (at least {bound})",
        next="check that the engine and the service have the same tokenizer and chat template (docs/engines.md)",
    ),
    RunRule(
        name="rewritten histories",
        severity="warning",
        looks_at="turns whose request changes the history, so that the engine reads it again: causes"
        " `history_rewritten`, `bridge_refused`, `template_history`, `capture_drift`",
        threshold=0.2,
        least=20,
        finding="{value} of the {turns} turns change the history that they continue (at least {bound})",
        next="see the causes with `outrider show`; docs/branches.md explains each",
    ),
    RunRule(
        name="unsure branches",
        severity="warning",
        looks_at="sampled tokens in branches of the kind `unsure`",
        threshold=0.1,
        least=20,
        finding="for {value} of the sampled tokens it is unsure whether they are work or a side call"
        " (at least {bound})",
        next="have the agent declare its branches, or set `branches.unsure` of the task (docs/branches.md)",
    ),
    RunRule(
        name="untrained tokens",
        severity="warning",
        looks_at="sampled tokens that are masked or dropped",
        threshold=0.4,
        least=20,
        finding="{value} of the {tokens} sampled tokens are masked or dropped (at least {bound})",
        next="see the kinds of the turns with `outrider show`; the task's `branches` decides what trains",
    ),
    RunRule(
        name="tokens without a reward",
        severity="warning",
        looks_at="sampled tokens of sessions that have no verdict: errors, timeouts, cancelled and stopped early",
        threshold=0.2,
        least=20,
        finding="{value} of the {tokens} sampled tokens are in sessions without a reward (at least {bound})",
        next="look at the other findings for the errors; cancel groups before they run, not while they run",
    ),
    RunRule(
        name="stale sessions",
        severity="warning",
        looks_at=f"sessions whose oldest token is {STALE_VERSIONS} or more policy versions older than the newest"
        " version seen by then",
        threshold=0.2,
        least=20,
        finding="{value} of {units} sessions have tokens that are {versions} or more policy versions old at their end"
        " (at least {bound})",
        next="submit fewer groups ahead, or limit the age of tokens with `max_age` of `DynamicSampler`"
        " (docs/sampling.md)",
    ),
    RunRule(
        name="uneven engines",
        severity="warning",
        looks_at="sessions that begin on the busiest engine, as a multiple of the mean of the others, while all engines"
        " are in use",
        threshold=3.0,
        percent=False,
        least=40,
        finding="the engine {subject} gets {value} times as many sessions as the mean of the others (at least {bound})",
        next="see the load with `outrider engines list`; is another engine draining, suspect or down at times?",
    ),
    RunRule(
        name="slow engine",
        severity="warning",
        looks_at="seconds for each sampled token on an engine, as a multiple of the other engines'",
        threshold=2.0,
        percent=False,
        least=16,
        finding="the engine {subject} takes {value} times as long for a token as the others (at least {bound})",
        next="compare the server's flags, its GPU and what else runs there; `outrider engines drain` takes it out",
    ),
    RunRule(
        name="stalled calls",
        severity="warning",
        looks_at=f"sessions with a call whose first token takes {STALL_SECONDS:g} s and {STALL_TIMES:g} times the"
        " usual time or longer",
        threshold=0.05,
        least=20,
        finding="{value} of {units} sessions have a call that stalls: {longest} s at most for the first token, usually"
        " {usual} s (at least {bound})",
        next="look at the engines' logs at these times; `outrider status` shows stalls of the service itself",
    ),
    RunRule(
        name="cache misses",
        severity="warning",
        looks_at="tokens of earlier prompts and replies that the engine computes again, by the engine's own count",
        threshold=0.5,
        least=20,
        finding="the engines compute {value} of the tokens again that they have read in the turn before"
        " (at least {bound})",
        next="is prefix caching on, and is the cache large enough for the sessions that run at a time?",
    ),
    RunRule(
        name="prompts that differ",
        severity="warning",
        looks_at="sessions whose first prompt differs from that of the sibling before in some line (and is equal in at"
        " least half of the lines)",
        threshold=0.5,
        least=12,
        finding="the prompts of {value} of {units} siblings differ in line {line} ({subject}):"
        " {before!r} became {after!r} (at least {bound})",
        next="move the changing line to the end of the prompt, or fix its value, so that siblings share the engine's"
        " cache",
    ),
    RunRule(
        name="prompts that change",
        severity="warning",
        looks_at="sessions whose system prompt changes by some line during a conversation",
        threshold=0.2,
        least=20,
        finding="the system prompt changes during {value} of {units} sessions in line {line} ({subject}):"
        " {before!r} became {after!r} (at least {bound})",
        next="have the agent keep its system prompt: each change is a new branch, and the engine reads all of it again",
    ),
    RunRule(
        name="time spent waiting",
        severity="warning",
        looks_at="time that sessions wait with a prepared sandbox, for a run slot or an eval slot (a third in a full"
        " service with the default lanes)",
        threshold=0.5,
        least=20,
        given=LEAST_SESSION_SECONDS,
        given_text="mean seconds of a session",
        finding="sessions wait for {value} of their {seconds} s with a prepared sandbox (at least {bound})",
        next="raise `lanes.run` or `lanes.eval`, or lower `lanes.ready`",
    ),
    RunRule(
        name="time spent preparing",
        severity="warning",
        looks_at="time for sandboxes and prepare steps",
        threshold=0.4,
        least=20,
        given=LEAST_SESSION_SECONDS,
        given_text="mean seconds of a session",
        finding="sandboxes and prepare steps take {value} of a session's {seconds} s (at least {bound})",
        next="move the prepare steps into an image, and start sandboxes ahead (docs/runtimes.md)",
    ),
    RunRule(
        name="time spent grading",
        severity="warning",
        looks_at="time for grading",
        threshold=0.5,
        least=20,
        given=LEAST_SESSION_SECONDS,
        given_text="mean seconds of a session",
        finding="grading takes {value} of a session's {seconds} s (at least {bound})",
        next="speed up the evaluator, run fewer tests, or raise `lanes.eval`",
    ),
    RunRule(
        name="time spent in tools",
        severity="info",
        looks_at="time of the run without a model call under way",
        threshold=0.8,
        least=20,
        given=LEAST_SESSION_SECONDS,
        given_text="mean seconds of a session",
        finding="tools and the agent program take {value} of a session's {seconds} s{programs} (at least {bound})",
        next="see in a session which commands are slow; do tools wait for something that the sandbox does not have?",
    ),
)
"""The rules, in the order in which docs/diagnosis.md lists them."""


def diagnose(evidence: RunEvidence, rules: Sequence[RunRule] = RULES) -> list[RunFinding]:
    """Apply the rules and return the findings, the most severe first, then in the order of the rules."""
    found = [
        rule.found(measured) for rule in rules for measured in MEASURES[rule.name](evidence) if rule.fits(measured)
    ]
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))


def _of_all(tallies: Callable[[RunEvidence], NamedTallies], evidence: RunEvidence) -> Iterator[Measured]:
    """Measure each tally's share of all sessions, for example for each error code. Sessions that were cancelled or
    stopped early are left out."""
    for name, tally in sorted(tallies(evidence).items()):
        yield _measured(tally, ratio=tally.ratio.padded(evidence.counted), subject=name)


def _of(tally: Callable[[RunEvidence], SessionTally], count: str, evidence: RunEvidence) -> Iterator[Measured]:
    """Measure the share of one tally. `count` is the name of the share's denominator in `numbers`, or "" to leave it
    out."""
    found = tally(evidence)
    yield _measured(found, numbers={count: found.ratio.whole} if count else {})


def _of_tools(evidence: RunEvidence) -> Iterator[Measured]:
    for name, tally in sorted(evidence.tools.items()):
        share = tally.ratio.value
        yield _measured(tally, subject=name, numbers={"results": tally.ratio.whole}, given=share)


def _measured(
    tally: SessionTally,
    *,
    ratio: ClusterShare | None = None,
    subject: str = "",
    numbers: dict[str, float | str] | None = None,
    given: float = inf,
) -> Measured:
    ratio = ratio or tally.ratio
    return Measured(
        bound=ratio.lower,
        value=ratio.value,
        units=ratio.units,
        given=given,
        subject=subject,
        numbers=numbers or {},
        sessions=tally.sessions,
    )


def _of_time(stage: str, evidence: RunEvidence) -> Iterator[Measured]:
    mean = evidence.session_seconds.mean
    yield _measured(evidence.stages[stage], numbers={"seconds": mean}, given=mean)


def _of_tool_time(evidence: RunEvidence) -> Iterator[Measured]:
    """Measure the share of the sessions' time that tools take, and name the programs that take longest."""
    [measured] = _of_time("tools", evidence)
    slowest = [name for name, seconds in evidence.program_seconds.most_common(MOST_PROGRAMS) if seconds >= 1]
    programs = f", most of it in {_listed(slowest)}" if slowest else ""
    yield msgspec.structs.replace(measured, numbers=measured.numbers | {"programs": programs})


def _of_missing(evidence: RunEvidence) -> Iterator[Measured]:
    names = [name for name, _ in evidence.missing_programs.most_common(MOST_PROGRAMS)]
    yield _measured(evidence.missing, numbers={"programs": _listed(names)})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(" ".join(name.split())[:MOST_SUBJECT] for name in names)


def _of_lines(
    tally: Callable[[RunEvidence], SessionTally],
    line: Callable[[RunEvidence], ChangedLine | None],
    evidence: RunEvidence,
) -> Iterator[Measured]:
    changed = line(evidence)
    if changed is not None:
        numbers: dict[str, float | str] = {"line": changed.number, "before": changed.before, "after": changed.after}
        yield _measured(tally(evidence), subject=changed.kind, numbers=numbers)


def _commonest_line(evidence: RunEvidence) -> ChangedLine | None:
    """Return an example of the most frequent kind of change between the prompts of a group's sessions."""
    counted = sorted(evidence.prompt_lines.items(), key=lambda item: (-item[1][0], item[0]))
    return counted[0][1][1] if counted else None


def _of_trend(kind: Literal["tests", "tokens"], evidence: RunEvidence) -> Iterator[Measured]:
    """Measure how far the number of tests or tokens (`kind`) falls from the first to the last third of a run's groups.
    `given` is the rise of the reward.

    Tokens are measured only for groups that report no number of tests. For the other groups, shorter sessions are no
    problem as long as the number of tests stays the same."""
    runs: dict[str, list[GroupPoint]] = {}
    for point in evidence.points:
        if isnan(point.tests) == (kind == "tokens") and not isnan(getattr(point, kind)):
            runs.setdefault(point.run, []).append(point)
    for name, points in sorted(runs.items()):
        if len(points) >= THIRD:
            yield _fall(kind, name if len(runs) > 1 else "", points)


def _fall(kind: str, run: str, points: Sequence[GroupPoint]) -> Measured:
    size = len(points) // THIRD
    first, last = points[:size], points[-size:]

    def moments(part: Sequence[GroupPoint], name: str) -> Moments:
        return Moments.of([getattr(point, name) for point in part])

    rewards = moments(first, "reward"), moments(last, "reward")
    values = moments(first, kind), moments(last, kind)
    fewest = sorted(last, key=lambda point: (getattr(point, kind), -point.reward))[:MOST_EXAMPLES]
    named = [point.fewest_tests if kind == "tests" else point.shortest for point in fewest]
    return Measured(
        bound=least_fall(*values),
        value=least_fall(_certain(values[0]), _certain(values[1])),
        units=len(points),
        given=least_rise(*rewards),
        subject=run,
        numbers={"reward_before": rewards[0].mean, "reward_after": rewards[1].mean},
        sessions=tuple(name for name in named if name),
    )


def _certain(moments: Moments) -> Moments:
    """Return moments with the same mean and no variance, so that a bound computed from them equals the estimate."""
    return Moments(count=2, mean=moments.mean)


def _of_loads(evidence: RunEvidence) -> Iterator[Measured]:
    """Compare the number of sessions that begin on the busiest engine with the mean of the other engines. Only the time
    in which all engines are in use counts, because it is no problem if an engine was added late or removed early."""
    uses: dict[str, list[EngineStart]] = {}
    for start in evidence.starts:
        uses.setdefault(start.engine, []).append(start)
    if len(uses) < 2:
        return
    since = max(min(start.at for start in own) for own in uses.values())
    until = min(max(start.at for start in own) for own in uses.values())
    within = {name: [start for start in own if since <= start.at <= until] for name, own in uses.items()}
    busiest = max(within, key=lambda name: (len(within[name]), name))
    share = ClusterShare()
    for name, own in within.items():
        for _ in own:
            share.add(name == busiest, 1)
    others = len(uses) - 1
    yield Measured(
        bound=_odds(share.lower) * others,
        value=_odds(share.value) * others,
        units=share.units,
        subject=busiest,
        numbers={name: float(len(own)) for name, own in sorted(within.items())[:MOST_EXAMPLES]},
        sessions=tuple(start.session_id for start in within[busiest][:MOST_EXAMPLES]),
    )


def _odds(share: float) -> float:
    return share / (1 - share) if share < 1 else inf


def _of_speeds(evidence: RunEvidence) -> Iterator[Measured]:
    """Compare the seconds per token of each engine with those of all other engines together. `units` is twice the
    smaller of two numbers: the sessions on the engine, and the sessions on the other engines."""
    for name, own in sorted(evidence.speeds.items()):
        rest = [moments for other, moments in evidence.speeds.items() if other != name]
        others = _merged(rest)
        if others.count < 2:
            continue
        yield Measured(
            bound=least_times(own, others),
            value=least_times(_certain(own), _certain(others)),
            units=2 * min(own.count, others.count),
            subject=name,
            sessions=tuple(session_id for _, session_id in evidence.slowest[name]),
        )


def _merged(parts: Sequence[Moments]) -> Moments:
    """Combine the moments of several series (Chan et al., 1979)."""
    merged = Moments()
    for part in parts:
        count = merged.count + part.count
        if not part.count:
            continue
        change = part.mean - merged.mean
        merged.squares += part.squares + change * change * merged.count * part.count / count
        merged.mean += change * part.count / count
        merged.count = count
    return merged


def _of_stalls(evidence: RunEvidence) -> Iterator[Measured]:
    """Measure the share of sessions with a stalled call. The first call of a session counts only if the policy's
    version never changes during the run. Otherwise, the call may have waited while new weights were loaded."""
    if not evidence.waits:
        return
    usual = median(waits.usual for waits in evidence.waits)
    versions = {version for use in evidence.versions for version in (use.oldest, use.newest)}
    tally = SessionTally()
    longest = 0.0
    for waits in evidence.waits:
        counted = [wait for wait in (waits.first if len(versions) < 2 else None, waits.later) if wait is not None]
        if counted:
            longest = max(longest, *counted)
            tally.add(max(counted) >= max(STALL_SECONDS, STALL_TIMES * usual), 1, waits.session_id)
    yield _measured(tally, numbers={"usual": usual, "longest": longest})


def _of_versions(evidence: RunEvidence) -> Iterator[Measured]:
    """Measure the share of stale sessions. `STALE_VERSIONS` defines when a session is stale."""
    newest = -1
    tally = SessionTally()
    by_end: list[VersionUse] = sorted(evidence.versions, key=lambda use: (use.ended, use.session_id))
    for use in by_end:
        newest = max(newest, use.newest)
        tally.add(newest - use.oldest >= STALE_VERSIONS, 1, use.session_id)
    yield _measured(tally, numbers={"versions": float(STALE_VERSIONS)})


MEASURES: Mapping[str, Measure] = {
    "errors": partial(_of_all, lambda evidence: evidence.errors),
    "timeouts": partial(_of_all, lambda evidence: evidence.out_of_time),
    "sessions cut short": partial(_of_all, lambda evidence: evidence.cut_short),
    "programs that fail": partial(_of, lambda evidence: evidence.exits, ""),
    "equal rewards": partial(_of, lambda evidence: evidence.equal_rewards, ""),
    "fewer tests, more reward": partial(_of_trend, "tests"),
    "shorter answers, more reward": partial(_of_trend, "tokens"),
    "tools that never work": _of_tools,
    "missing programs": _of_missing,
    "malformed calls": partial(_of, lambda evidence: evidence.malformed, "calls"),
    "replies cut off": partial(_of, lambda evidence: evidence.cut_replies, ""),
    "drift": partial(_of, lambda evidence: evidence.drift, ""),
    "rewritten histories": partial(_of, lambda evidence: evidence.rewritten, "turns"),
    "unsure branches": partial(_of, lambda evidence: evidence.unsure, "tokens"),
    "untrained tokens": partial(_of, lambda evidence: evidence.untrained, "tokens"),
    "tokens without a reward": partial(_of, lambda evidence: evidence.ungraded, "tokens"),
    "stale sessions": _of_versions,
    "uneven engines": _of_loads,
    "slow engine": _of_speeds,
    "stalled calls": _of_stalls,
    "cache misses": partial(_of, lambda evidence: evidence.cache_misses, "tokens"),
    "prompts that differ": partial(_of_lines, lambda evidence: evidence.prompts, _commonest_line),
    "prompts that change": partial(
        _of_lines, lambda evidence: evidence.system_changes, lambda evidence: evidence.system_line
    ),
    "time spent waiting": partial(_of_time, "waiting"),
    "time spent preparing": partial(_of_time, "preparing"),
    "time spent grading": partial(_of_time, "grading"),
    "time spent in tools": _of_tool_time,
}
"""For each rule, by name, the function that makes its measurements."""


def _number(value: float, percent: bool) -> str:
    if value in (inf, -inf):
        return "endlessly" if value > 0 else "nothing"
    return f"{value:.0%}" if percent else f"{value:.1f}"


def _plain(value: float | str) -> str:
    """Format a number for a message to people. A text is returned unchanged."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"
