"""Counts a service's model calls, sessions and groups since its start, for the metrics.

Counting a call takes only a few additions. Invariant: the memory is limited. Engines have their own counts within
`CountLimits`, and all other names come from fixed sets. Records of unfinished sessions and groups are kept within these
limits, too; the oldest are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from outrider.counts import OTHER, Histogram
from outrider.errors import Boundary, ErrorRecord, known_codes
from outrider.lifecycle import StopReason
from outrider.store.store import AddedTurn
from outrider.trajectory import FinishReason, ForkCause, SessionResult, StageSeconds, Turn

if TYPE_CHECKING:
    from outrider.service.scheduler import SessionEnd

K = TypeVar("K")
V = TypeVar("V")

TURNS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Upper bounds of the buckets in the histogram of turns per session."""
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Upper bounds of the buckets in the histogram of staleness. A session's staleness is the number of policy versions by
which its oldest token is behind when its group is done. Sessions without tokens to train on are left out."""


class CountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what is counted separately and remembered.

    - `named`: maximum number of engines, and of nodes, with their own values in the metrics. All others are counted
      together.
    - `remembered`: maximum number of unfinished sessions, and of unfinished groups, for which a record is kept.
    - `prompt_bytes`: maximum total bytes of the first prompts that are kept. The first prompt of one session is kept
      for each group, to be compared with those of the group's other sessions.
    """

    named: int = 200
    remembered: int = 100_000
    prompt_bytes: int = 32 << 20


LIMITS = CountLimits()


class DialectCounts:
    """The calls of one dialect (request format): the seconds from the request to the end of the reply, and to the first
    sampled token."""

    __slots__ = ("first_token", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram()
        self.first_token = Histogram()


class EngineCounts:
    """The calls that one engine has answered. `cached_tokens` counts prompt tokens from the engine's prefix cache.
    `reported_tokens` counts all prompt tokens of those calls for which the engine reported its cached tokens."""

    __slots__ = ("cached_tokens", "calls", "prompt_tokens", "reported_tokens", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reported_tokens = 0


class _Versions:
    """The lowest and highest policy version among the sampled tokens of a session's newest attempt."""

    __slots__ = ("attempt", "high", "low")

    def __init__(self, attempt: int, version: int) -> None:
        self.attempt = attempt
        self.low = self.high = version


class _GroupProgress:
    """The finished sessions of a group: their number, the number and range of their rewards, and the oldest policy
    version of each session that has tokens to train on."""

    __slots__ = ("done", "high", "low", "rewarded", "versions")

    def __init__(self) -> None:
        self.done = self.rewarded = 0
        self.low = self.high = 0.0
        self.versions: list[int] = []

    def note(self, result: SessionResult, versions: _Versions | None) -> None:
        self.done += 1
        if result.verdict is not None:
            reward = result.verdict.reward
            self.low = min(self.low, reward) if self.rewarded else reward
            self.high = max(self.high, reward) if self.rewarded else reward
            self.rewarded += 1
        if versions is not None and result.tokens.trained:
            self.versions.append(versions.low)

    def spread(self, n: int | None) -> str:
        """Return the spread of the group's rewards: "zero" if all are equal, otherwise "some". Returns "unknown" if
        fewer than two sessions have a reward, or if not all `n` sessions have ended since the service's start."""
        if self.rewarded < 2 or self.done != n:
            return "unknown"
        return "zero" if self.low == self.high else "some"


class ServiceCounts:
    """Counts the turns, attempts and sessions that the store and the scheduler publish.

    dialects: the names of the dialects (request formats).
    has_engine: returns True for the name of an engine of the service.
    policy_version: returns the policy's current version."""

    def __init__(
        self,
        dialects: Iterable[str],
        *,
        has_engine: Callable[[str], bool],
        policy_version: Callable[[], int],
        limits: CountLimits = LIMITS,
    ) -> None:
        self.limits = limits
        self._has_engine = has_engine
        self._policy_version = policy_version
        self.dialects = {name: DialectCounts() for name in (*dialects, OTHER)}
        self.engines: dict[str, EngineCounts] = {OTHER: EngineCounts()}
        self.calls = {model: dict.fromkeys(FinishReason, 0) for model in ("policy", "frozen")}
        self.sampled_tokens = {"policy": 0, "frozen": 0}
        self.forks = dict.fromkeys(ForkCause, 0)
        self.drift_tokens = 0
        self.malformed_calls = 0
        self.first_prompt_tokens = self.shared_prompt_tokens = 0
        self.ended = dict.fromkeys(StopReason, 0)
        self.errors: dict[tuple[Boundary, str], int] = {}
        self.failed_attempts: dict[tuple[Boundary, str], int] = {}
        self.stage_seconds = dict.fromkeys(StageSeconds.__struct_fields__, 0.0)
        self.model_seconds = self.tool_seconds = 0.0
        self.turns = Histogram(TURNS)
        self.trained_tokens = self.masked_tokens = self.dropped_tokens = self.unsure_tokens = 0
        self.samples = 0
        self.trained_sessions = {"one": 0, "several": 0}
        self.groups = {"some": 0, "zero": 0, "unknown": 0}
        self.staleness = Histogram(VERSIONS)
        self._versions: OrderedDict[str, _Versions] = OrderedDict()
        self._groups: OrderedDict[str, _GroupProgress] = OrderedDict()
        self._prompts: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        """For each group, its first session and this session's first prompt. The key is the group's part of a
        session id (`_siblings`)."""
        self._prompt_bytes = 0

    def note_turn(self, added: AddedTurn) -> None:
        """Count a stored model call."""
        turn = added.turn
        times, prompt, output = turn.timings, turn.prompt_length, len(turn.output_ids) // 4
        seconds = times.finished - times.received
        dialect = self.dialects.get(turn.dialect) or self.dialects[OTHER]
        dialect.seconds.add(seconds)
        if times.first_token is not None:
            dialect.first_token.add(times.first_token - times.received)
        engine = self.engines.get(turn.engine) or self._engine(turn.engine)
        engine.calls += 1
        engine.seconds += seconds
        engine.prompt_tokens += prompt
        if (cached := turn.cached_tokens) is not None:
            engine.reported_tokens += prompt
            engine.cached_tokens += min(cached, prompt)
        model = "policy" if added.model is None else "frozen"
        self.calls[model][turn.finish] += 1
        self.sampled_tokens[model] += output
        if added.model is not None:
            return
        if turn.cause is not None:
            self.forks[turn.cause] += 1
        self.drift_tokens += turn.drift_tokens
        self.malformed_calls += turn.malformed_calls
        for span in turn.versions:
            self._note_version(added.session_id, added.attempt, span.version)
        if turn.index == 0 and turn.prompt_delta:
            self._note_first_prompt(added.session_id, turn)

    def note_failed_attempt(self, error: ErrorRecord) -> None:
        """Count a failed attempt whose session was queued again."""
        self._note_error(self.failed_attempts, error)

    def note_session(self, end: SessionEnd) -> None:
        """Count a session that is done. If all sessions of its group are now done, also count the group."""
        result, session_id = end.result, end.session.id
        self.ended[result.stop_reason] += 1
        if result.error is not None:
            self._note_error(self.errors, result.error)
        for stage in self.stage_seconds:
            self.stage_seconds[stage] += getattr(result.seconds, stage)
        self.samples += result.samples
        tokens = result.tokens
        # A session that regrades an earlier one has run no agent itself. The run was counted with the earlier session.
        if result.regrades is None:
            self.model_seconds += result.model_seconds
            self.tool_seconds += max(0.0, result.seconds.run - result.model_seconds)
            self.turns.add(result.turns)
            self.trained_tokens += tokens.trained
            self.masked_tokens += tokens.masked
            self.dropped_tokens += tokens.dropped
            self.unsure_tokens += tokens.unsure
        versions = self._versions.pop(session_id, None)
        if versions is not None and tokens.trained:
            self.trained_sessions["one" if versions.low == versions.high else "several"] += 1
        group = self._groups.get(result.group_id) or self._remember(self._groups, result.group_id, _GroupProgress())
        group.note(result, versions)
        if end.group_done:
            del self._groups[result.group_id]
            self._forget_prompt(_siblings(session_id))
            self.groups[group.spread(end.n)] += 1
            now = self._policy_version()
            for version in group.versions:
                self.staleness.add(now - version)

    @property
    def failed_sessions(self) -> int:
        return self.ended[StopReason.ERROR]

    @property
    def done_sessions(self) -> int:
        return sum(self.ended.values())

    def _engine(self, name: str) -> EngineCounts:
        """Return the counts for an engine that is not in `engines` yet. Unknown engines, and engines beyond the limit,
        share their counts."""
        if len(self.engines) > self.limits.named or not self._has_engine(name):
            return self.engines[OTHER]
        return self.engines.setdefault(name, EngineCounts())

    def _note_version(self, session_id: str, attempt: int, version: int) -> None:
        known = self._versions.get(session_id)
        if known is None or known.attempt != attempt:
            self._remember(self._versions, session_id, _Versions(attempt, version))
        elif version < known.low:
            known.low = version
        elif version > known.high:
            known.high = version

    def _note_first_prompt(self, session_id: str, turn: Turn) -> None:
        """Compare the first prompt of a session with that of the first session in its group."""
        key, prompt = _siblings(session_id), turn.prompt_delta
        self.first_prompt_tokens += len(prompt) // 4
        if (known := self._prompts.get(key)) is None:
            self._prompts[key] = session_id, prompt
            self._prompt_bytes += len(prompt)
            while self._prompt_bytes > self.limits.prompt_bytes:
                self._forget_prompt(next(iter(self._prompts)))
        elif known[0] != session_id:  # not for a later attempt of the same session
            self.shared_prompt_tokens += common_length(known[1], prompt)

    def _forget_prompt(self, key: str) -> None:
        if (known := self._prompts.pop(key, None)) is not None:
            self._prompt_bytes -= len(known[1])

    def _remember(self, known: OrderedDict[K, V], key: K, value: V) -> V:
        known[key] = value
        if len(known) > self.limits.remembered:
            known.popitem(last=False)
        return value

    def _note_error(self, counts: dict[tuple[Boundary, str], int], error: ErrorRecord) -> None:
        key = error.boundary, error.code
        if key not in counts and error.code not in known_codes():
            key = error.boundary, OTHER
        counts[key] = counts.get(key, 0) + 1


def common_length(first: bytes, second: bytes) -> int:
    """Return how many ids two sequences (packed as int32) have in common at the beginning."""
    count = min(len(first), len(second)) // 4
    different = np.frombuffer(first, "<i4", count) != np.frombuffer(second, "<i4", count)
    at = int(different.argmax()) if count else 0
    return at if count and different[at] else count


def _siblings(session_id: str) -> str:
    """Return the part of a session id that all sessions of the group have in common."""
    return session_id.rpartition("-")[0]
