"""Counts what happened in a run: the result of each session, and facts about a sample of sessions.

Results are added group by group, in any order, and are not kept, so the memory does not grow with the run. In a large
run, trends are computed from a sample of groups, and only the turns of a sample of sessions are read. Samples are
chosen by digests of group ids, so the same run always gives the same samples. Invariant: each session is counted once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import log, nan
from statistics import median
from typing import TypeVar

import msgspec

from outrider.lifecycle import GroupState, StopReason
from outrider.schemas import EVALUATION_LABEL, RunSeconds
from outrider.service.diagnosis.prompts import ChangedLine, changed_line
from outrider.service.diagnosis.session_facts import SessionFacts
from outrider.service.diagnosis.statistics import ClusterShare, Moments
from outrider.store.queue import BUCKET_LABELS
from outrider.store.rows import GroupRow
from outrider.trajectory import ForkCause, SessionResult

T = TypeVar("T", bound=msgspec.Struct)

MOST_EXAMPLES = 5
"""Maximum number of example sessions in a finding."""
MOST_NAMES = 200
"""Maximum number of error causes, of tools and of engines that are counted separately."""
TREND_GROUPS = 4096
"""Maximum number of groups whose rewards and lengths are compared over time."""
SAMPLED_GROUPS = 100
"""Maximum number of groups from which sessions are sampled."""
SAMPLED_SESSIONS = 400
"""Maximum number of sessions whose turns are read."""
LEAST_SIBLINGS = 4
"""Minimum number of sessions to sample from each group. If there are few groups, more sessions are sampled from
each."""
LEAST_SPREAD = 1e-9
"""Rewards count as equal if they differ by at most this number."""
STALE_VERSIONS = 4
"""A session is stale if its oldest token is at least this many versions behind the newest policy version at the
session's end. The newest version is taken from the sampled sessions that had ended by then."""
STALL_SECONDS = 30.0
"""A call is stalled if it waits at least this many seconds for its first token, and at least STALL_TIMES times the
usual wait."""
STALL_TIMES = 10.0
"""See STALL_SECONDS. The usual wait is the median of the sessions' median waits."""
TEST_COUNTS = ("tests", "tests_run", "num_tests", "total_tests", "test_count", "cases")
"""Names of metrics that contain the number of tests that ran, in order of preference. A metric also counts if its name
ends with one of these names after a dot, a slash or a colon, such as `unit/tests`."""

OUTSIDE = frozenset({StopReason.CANCELLED, StopReason.EARLY_STOP})
"""Stop reasons of sessions that were cancelled, or that their group no longer needed. Such sessions count neither as
failed nor as successful."""
CUT_SHORT = (StopReason.MAX_TOKENS, StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW)
OUT_OF_TIME = (StopReason.AGENT_TIMEOUT, StopReason.SESSION_TIMEOUT, StopReason.EXPIRED)
REWRITES = (
    ForkCause.HISTORY_REWRITTEN,
    ForkCause.BRIDGE_REFUSED,
    ForkCause.TEMPLATE_HISTORY,
    ForkCause.CAPTURE_DRIFT,
)
"""Causes of forks after which the engine must compute the history of a conversation again."""
STAGES = ("waiting", "preparing", "model", "tools", "grading", "stopping")
"""The stages into which a session's time is divided, without the wait in the queue."""


class SessionTally:
    """A share, summed over sessions, such as the share of a tool's results that show a failure. The tally also keeps
    the ids of the sessions that contribute most."""

    def __init__(self) -> None:
        self.ratio = ClusterShare()
        self._examples: list[tuple[float, str]] = []

    def add(self, part: float, whole: float, session_id: str) -> None:
        self.ratio.add(part, whole)
        if part > 0:
            entry = (part, session_id)
            if len(self._examples) < MOST_EXAMPLES:
                heapq.heappush(self._examples, entry)
            else:
                heapq.heappushpop(self._examples, entry)

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(session_id for _, session_id in sorted(self._examples, key=lambda each: (-each[0], each[1])))


class NamedTallies(dict[str, SessionTally]):
    """Tallies by name. There are at most MOST_NAMES names; all further names share the tally `others`."""

    def at(self, name: str) -> SessionTally:
        if name not in self and len(self) >= MOST_NAMES:
            name = "others"
        return self.setdefault(name, SessionTally())


class GroupPoint(msgspec.Struct, frozen=True):
    """The averages of one group, from which the trends of a run are computed.

    run: the name of the run (`run_of`).
    reward: the mean reward.
    tokens, tests: the mean logarithm of the number of sampled tokens, and of tests; nan if unknown.
    fewest_tests, shortest: the ids of two of the sessions with the best reward: the session with the fewest tests, and
        the session with the fewest tokens.
    """

    run: str
    created: float
    reward: float
    tokens: float
    tests: float
    fewest_tests: str
    shortest: str


class GroupSample(msgspec.Struct):
    """The sessions of a group that may be chosen for the sample. `sessions` maps a session id to the number of its
    attempt."""

    created: float
    sessions: dict[str, int] = {}


class EngineStart(msgspec.Struct, frozen=True):
    """The first model call of a session: the engine that served it, and its time."""

    engine: str
    at: float
    session_id: str


class VersionUse(msgspec.Struct, frozen=True):
    """The oldest and newest policy version of a session's tokens, and the time at which its last turn ended."""

    session_id: str
    group_id: str
    oldest: int
    newest: int
    ended: float


class CallWaits(msgspec.Struct, frozen=True):
    """Seconds that the calls of a session waited for their first token.

    usual: the median wait.
    first: the wait of the first call, or None if it is unknown.
    later: the longest wait of the later calls, or None if there are none."""

    session_id: str
    usual: float
    first: float | None
    later: float | None


class RunEvidence:
    """The counts of a run. For each group, call `begin_group`, then `add_result` for each session, then `end_group`.
    Afterwards, call `add_facts` for each session in `to_read`, group by group."""

    def __init__(self) -> None:
        self.groups = 0
        self.sessions = 0
        self.not_done = 0
        self.counted = 0
        """Number of sessions that ended by themselves (their stop reason is not in `OUTSIDE`)."""
        self.errors = NamedTallies()
        self.cut_short = NamedTallies()
        self.out_of_time = NamedTallies()
        self.exits = SessionTally()
        self.drift = SessionTally()
        self.unsure = SessionTally()
        self.untrained = SessionTally()
        self.ungraded = SessionTally()
        self.rewritten = SessionTally()
        self.equal_rewards = SessionTally()
        self.stages = {name: SessionTally() for name in STAGES}
        self.stage_seconds = dict.fromkeys(("queued", *STAGES), 0.0)
        self.session_seconds = Moments()
        self._points: list[tuple[int, str, GroupPoint]] = []
        self._sampled: list[tuple[int, str, GroupSample]] = []
        self._group: _GroupUnderWay | None = None
        # The counts below come from the turns of sampled sessions.
        self.read_sessions = 0
        self.read_turns = 0
        self.malformed = SessionTally()
        self.tools = NamedTallies()
        self.missing = SessionTally()
        self.missing_programs: Counter[str] = Counter()
        self.program_seconds: Counter[str] = Counter()
        self.cut_replies = SessionTally()
        self.cache_misses = SessionTally()
        self.prompts = SessionTally()
        self.prompt_lines: dict[str, tuple[int, ChangedLine]] = {}
        self.system_changes = SessionTally()
        self.system_line: ChangedLine | None = None
        self.speeds: dict[str, Moments] = {}
        self.slowest: dict[str, list[tuple[float, str]]] = {}
        self.starts: list[EngineStart] = []
        self.versions: list[VersionUse] = []
        self.waits: list[CallWaits] = []
        self._heads: tuple[str, str, list[str]] | None = None

    def begin_group(self, row: GroupRow) -> None:
        self.groups += 1
        self.not_done += row.n - row.done
        self._group = _GroupUnderWay(row)

    def add_result(self, result: SessionResult) -> None:
        """Add the result of a session of the group for which `begin_group` was called last."""
        self.sessions += 1
        session_id, reason, tokens = result.session_id, result.stop_reason, result.tokens
        if reason not in OUTSIDE:
            self.counted += 1
            if result.error is not None:
                self.errors.at(f"{result.error.boundary.value}: {result.error.code}").add(1, 1, session_id)
            if reason in CUT_SHORT:
                self.cut_short.at(reason.value).add(1, 1, session_id)
            if reason in OUT_OF_TIME:
                self.out_of_time.at(reason.value).add(1, 1, session_id)
            self.exits.add(reason is StopReason.NONZERO_EXIT, 1, session_id)
        if tokens.sampled > 0:
            self.drift.add(tokens.drift > 0, 1, session_id)
            self.unsure.add(min(tokens.unsure, tokens.sampled), tokens.sampled, session_id)
            self.untrained.add(min(tokens.masked + tokens.dropped, tokens.sampled), tokens.sampled, session_id)
            self.ungraded.add(tokens.sampled * (result.verdict is None), tokens.sampled, session_id)
        if result.turns:
            forks = sum(result.forks.get(cause.value, 0) for cause in REWRITES)
            self.rewritten.add(min(forks, result.turns), result.turns, session_id)
        if result.regrades is None:
            self._add_seconds(result)
        if self._group is not None:
            self._group.add(result)

    def _add_seconds(self, result: SessionResult) -> None:
        seconds = result.seconds
        model = min(result.model_seconds, seconds.run)
        used = {
            "waiting": seconds.ready + seconds.eval_wait,
            "preparing": seconds.init,
            "model": model,
            "tools": seconds.run - model,
            "grading": seconds.eval,
            "stopping": seconds.stop,
        }
        total = sum(used.values())
        self.stage_seconds["queued"] += seconds.queued
        for name, part in used.items():
            self.stages[name].add(part, total, result.session_id)
            self.stage_seconds[name] += part
        if total:
            self.session_seconds.add(total)

    def end_group(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        row = group.row
        digest = int.from_bytes(blake2b(row.id.encode(), digest_size=8).digest(), "big")
        if group.sampled.sessions:
            _keep_lowest(self._sampled, (-digest, row.id, group.sampled), SAMPLED_GROUPS)
        if EVALUATION_LABEL in row.labels:
            return  # evaluations repeat the same tasks, and their rewards are not used for training
        if row.state is GroupState.DONE and not row.cancelled and group.rewards.count >= 2:
            self.equal_rewards.add(group.highest - group.lowest <= LEAST_SPREAD, 1, group.first)
        if group.rewards.count and row.state is GroupState.DONE:
            _keep_lowest(self._points, (-digest, row.id, group.point()), TREND_GROUPS)

    @property
    def points(self) -> list[GroupPoint]:
        """The groups whose rewards and lengths are compared over time, oldest first."""
        return sorted((point for _, _, point in self._points), key=lambda point: point.created)

    @property
    def seconds(self) -> RunSeconds:
        return RunSeconds(**self.stage_seconds)

    def to_read(self) -> list[tuple[str, list[tuple[str, int]]]]:
        """Return the sessions whose turns must be read: for each group id, a list of session ids with the numbers of
        their attempts."""
        each = max(LEAST_SIBLINGS, SAMPLED_SESSIONS // max(1, len(self._sampled)))
        chosen = sorted(self._sampled, key=lambda entry: -entry[0])
        return [(id, sorted(group.sessions.items())[:each]) for _, id, group in chosen]

    def add_facts(self, group_id: str, facts: SessionFacts) -> None:
        """Add the facts about a sampled session. All sessions of a group must be added before those of the next
        group."""
        session_id = facts.session_id
        self.read_sessions += 1
        self.read_turns += facts.turns
        self.malformed.add(facts.malformed, facts.calls, session_id)
        for name, counted in facts.tools.items():
            self.tools.at(name).add(counted.failed, counted.results, session_id)
        if facts.programs:
            self.missing.add(bool(facts.missing), 1, session_id)
            _count(self.missing_programs, dict.fromkeys(facts.missing, 1))
            _count(self.program_seconds, facts.programs)
        self.cut_replies.add(facts.cut > 0, facts.turns > 0, session_id)
        self.cache_misses.add(facts.missed, facts.cacheable, session_id)
        for engine, speed in facts.speeds.items():
            if speed.seconds > 0 and (engine in self.speeds or len(self.speeds) < MOST_NAMES):
                each = speed.seconds / speed.tokens
                self.speeds.setdefault(engine, Moments()).add(log(each))
                slowest = self.slowest.setdefault(engine, [])
                slowest.append((each, session_id))
                slowest.sort(reverse=True)
                del slowest[MOST_EXAMPLES:]
        if facts.engine is not None:
            self.starts.append(EngineStart(facts.engine, facts.began, session_id))
        if facts.oldest is not None and facts.newest is not None:
            self.versions.append(VersionUse(session_id, group_id, facts.oldest, facts.newest, facts.ended))
        waits = facts.waits if facts.first_wait is None else [facts.first_wait, *facts.waits]
        if waits:
            later = max(facts.waits, default=None)
            self.waits.append(CallWaits(session_id, median(waits), facts.first_wait, later))
        self._add_prompts(group_id, facts)

    def _add_prompts(self, group_id: str, facts: SessionFacts) -> None:
        if facts.turns:
            self.system_changes.add(facts.changed is not None, 1, facts.session_id)
            self.system_line = self.system_line or facts.changed
        if not facts.heads:
            return
        if self._heads is not None and self._heads[0] == group_id:
            change = _changed_head(self._heads[2], facts.heads)
            self.prompts.add(change is not None, 1, facts.session_id)
            if change is not None:
                count, first = self.prompt_lines.get(change.kind, (0, change))
                self.prompt_lines[change.kind] = (count + 1, first)
        self._heads = group_id, facts.session_id, facts.heads


class _GroupUnderWay:
    """Collects the results of one group, from `begin_group` to `end_group`."""

    def __init__(self, row: GroupRow) -> None:
        self.row = row
        self.rewards = Moments()
        self.highest = self.lowest = 0.0
        self.first = ""
        self.sampled = GroupSample(row.created)
        self._tokens = Moments()
        self._tests = Moments()
        self._best: dict[str, tuple[float, float, str]] = {}
        """The best session for each of "tests" and "tokens", as (negative reward, number of tests or tokens, id). It
        has the highest reward and, among equal rewards, the lowest number."""

    def add(self, result: SessionResult) -> None:
        if result.turns and len(self.sampled.sessions) < SAMPLED_SESSIONS:
            self.sampled.sessions[result.session_id] = result.attempt
        if result.verdict is None:
            return
        reward = result.verdict.reward
        self.first = self.first or result.session_id
        self.highest = reward if not self.rewards.count else max(self.highest, reward)
        self.lowest = reward if not self.rewards.count else min(self.lowest, reward)
        self.rewards.add(reward)
        if result.tokens.sampled > 0:
            self._tokens.add(log(result.tokens.sampled))
            self._note("tokens", reward, result.tokens.sampled, result.session_id)
        count = count_of_tests(result.verdict.metrics)
        if count is not None:
            self._tests.add(log(1 + count))
            self._note("tests", reward, count, result.session_id)

    def _note(self, kind: str, reward: float, count: float, session_id: str) -> None:
        entry = (-reward, count, session_id)
        self._best[kind] = min(self._best.get(kind, entry), entry)

    def point(self) -> GroupPoint:
        none = (0.0, 0.0, "")
        return GroupPoint(
            run=run_of(self.row),
            created=self.row.created,
            reward=self.rewards.mean,
            tokens=self._tokens.mean if self._tokens.count else nan,
            tests=self._tests.mean if self._tests.count else nan,
            fewest_tests=self._best.get("tests", none)[2],
            shortest=self._best.get("tokens", none)[2],
        )


def run_of(row: GroupRow) -> str:
    """Return the name of the run to which a group belongs: the group's tenant, its harness and, if there is one, the
    label that selects its bucket in the queue."""
    named = next((f"{name}={row.labels[name]}" for name in BUCKET_LABELS if row.labels.get(name)), "")
    return " ".join(filter(None, (row.tenant, row.harness, named)))


def count_of_tests(metrics: Mapping[str, float]) -> float | None:
    """Return the number of tests that ran, or None if no metric contains it. The first name in TEST_COUNTS takes
    precedence."""
    for wanted in TEST_COUNTS:
        for name, value in metrics.items():
            at = len(name) - len(wanted)
            if value >= 0 and name.endswith(wanted) and (at == 0 or name[at - 1] in "./:"):
                return value
    return None


def _count(counts: Counter[str], more: Mapping[str, float]) -> None:
    """Add the numbers in `more` to `counts`, which has at most MOST_NAMES names. Further names are ignored."""
    for name, count in more.items():
        if name in counts or len(counts) < MOST_NAMES:
            counts[name] += count  # type: ignore[assignment]  # a Counter also counts seconds


def _keep_lowest(heap: list[tuple[int, str, T]], entry: tuple[int, str, T], most: int) -> None:
    """Add `entry` to a heap that keeps only the `most` entries with the lowest digests. An entry consists of the
    negative digest, the group's id and a value."""
    if len(heap) < most:
        heapq.heappush(heap, entry)
    elif entry[:2] > heap[0][:2]:
        heapq.heapreplace(heap, entry)


def _changed_head(before: Sequence[str], after: Sequence[str]) -> ChangedLine | None:
    """Return the first line that differs between a conversation in `before` and a changed version of it in `after`.
    Returns None if no conversation in `after` is a changed version."""
    known = frozenset(before)
    for head in after:
        if head not in known:
            for other in before:
                change = changed_line(other, head)
                if change is not None:
                    return change
    return None
