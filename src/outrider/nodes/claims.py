"""Checks that what a node reports about its sessions fits the service's own records.

A node on another machine may be any program that has a node's token. This token permits the program only to run
sessions and to write their data. docs/nodes.md lists the rules for this data. When a node breaks a rule, the service
closes its connection and runs its sessions on other nodes. Invariant: data that passes these checks can be stored,
added up, made into training samples, and shown.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import lt
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from outrider.counts import SECONDS, NodeCounts
from outrider.engines.base import MAX_COUNT
from outrider.engines.pool.checks import LOWEST, ROUNDING
from outrider.engines.pool.placement import EngineUse
from outrider.engines.relay.messages import MAX_DETAIL
from outrider.errors import MAX_TEXT, bounded
from outrider.evaluators.verdict import MAX_METRIC_NAME, MAX_REASON, MAX_REWARD
from outrider.lifecycle import StopReason
from outrider.messages import image_from_url, images_in
from outrider.nodes.messages import AddTurn, KeepIndex, Report
from outrider.schemas import NodeStats
from outrider.sessions.artifacts import ArtifactLimits
from outrider.sessions.attempt import MAX_ANSWER, Attempt
from outrider.sessions.step_verdicts import MAX_METRICS as MAX_METRICS_OF_STEPS
from outrider.spec import TaskSpec, steps_of
from outrider.store.artifacts import FOR_GRADERS
from outrider.tokens.rendering.tokenizer import Vocabulary
from outrider.tokens.samples import policy_of
from outrider.trajectory import BranchPolicy, LogprobKind, SessionResult, TokenMode, Turn, unpack_ids, unpack_logprobs
from outrider.wire.link_protocol import Nonsense

MAX_NUMBER = 1 << 53
"""Counts and seconds must be below this number. Up to this number, a floating-point number represents every integer
exactly."""
MAX_TURNS = 1 << 20
"""Maximum number of turns with one model in an attempt. This is ten times the highest limit that a task can set."""
MAX_SESSIONS = 100_000
"""Maximum number of concurrent sessions that a node may report as its capacity."""
MAX_LANES = 16
MAX_FAILING = 64
"""Maximum number of failing background tasks that are shown for a node. Further tasks are left out."""
MAX_COUNTED = 256
"""Maximum number of entries in a node's tables of counts: sandbox runtimes, API dialects, and error codes of a
dialect."""
MAX_NAME = 256
MAX_PATH = 4096
MAX_METRICS = 2 * MAX_METRICS_OF_STEPS
"""Maximum number of metrics in a result. A result has the metrics of all steps of a task, and filters add some."""
MAX_TABLE_ENTRIES = 256
"""Maximum number of entries in each table of a result."""
LIMITS = ArtifactLimits()
MAX_KEPT_BYTES = LIMITS.total_bytes + (len(FOR_GRADERS) + 1) * LIMITS.file_bytes + (1 << 20)
"""Maximum bytes of an attempt's artifacts: the collected files, the data carried from the agent's sandbox to the
grading, the record of network requests, and the grading log (1 MiB)."""

GRADED = frozenset(
    {
        StopReason.COMPLETED,
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.CONTEXT_OVERFLOW,
        StopReason.AGENT_TIMEOUT,
        StopReason.NONZERO_EXIT,
        StopReason.AGENT_EXCESS,
    }
)
"""Stop reasons with which an attempt can have a verdict."""
ENDS = GRADED | {StopReason.SESSION_TIMEOUT, StopReason.ERROR}
"""Stop reasons that a node may report. The service itself sets the others."""

T = TypeVar("T")


class ClaimRule(NamedTuple, Generic[T]):
    """A check of a value that a node has sent. `holds` returns True if the value passes, given the service's records of
    the attempt. The error message is "`what` must be `bound`"."""

    what: str
    bound: str
    holds: Callable[[T, AttemptRecords], bool]


class AttemptRecords:
    """The service's records of an attempt that runs on a node: what the service sent to the node, and the turns and
    artifacts stored since then."""

    def __init__(self, attempt: Attempt, vocabularies: Mapping[str | None, Vocabulary], *, kept_here: bool) -> None:
        self.attempt = attempt
        self.vocabularies = vocabularies
        """Vocabularies of the service's models; the policy's key is None."""
        self.kept_here = kept_here
        """True if the artifacts of the attempt arrive over the connection. A node on the service's machine writes them
        to the disk itself instead."""
        self.began_here = attempt.stored is None
        """True if all turns of the attempt arrive over the present connection. False if the attempt only grades an
        earlier run, because the turns of that run are already stored."""
        self.certain = True
        """False after an error while a turn was being stored: that turn may or may not be in the store."""
        self.indexes: dict[str | None, set[int]] = {}
        self.tokens: dict[str | None, int] = {}
        self.storing: dict[str | None, int] = {}
        """Numbers of sampled tokens in the turns that are being stored, by model."""
        self.kept: dict[str, int] = {}
        """Sizes in bytes of the attempt's artifacts by SHA-256."""
        self.kept_bytes = 0

    @property
    def task(self) -> TaskSpec:
        return self.attempt.task

    @contextmanager
    def storing_turn(self, call: AddTurn) -> Iterator[None]:
        """Count the tokens of a turn as being stored while the block runs."""
        sampled = len(call.turn.output_ids) // 4
        self.storing[call.model] = self.storing.get(call.model, 0) + sampled
        try:
            yield
        finally:
            self.storing[call.model] -= sampled

    def note_turn(self, call: AddTurn) -> None:
        """Count a stored turn and its sampled tokens."""
        self.indexes.setdefault(call.model, set()).add(call.turn.index)
        self.tokens[call.model] = self.tokens.get(call.model, 0) + len(call.turn.output_ids) // 4

    def has_turns(self, counted: Mapping[str | None, int], *, verdict: bool) -> bool:
        """Return True if `counted`, the number of turns in a result by model, fits the turns that the service has
        stored.

        If the attempt was graded (`verdict`), the numbers must be equal, and the turns' indexes must have no gaps. If
        it was not graded, the attempt has failed, and its result may leave out stored turns: a number may be lower than
        the service's number, but not higher. Always returns True if the service's records may lack a stored turn.
        """
        if not self.certain or not self.began_here:
            return True
        for model in {*counted, *self.indexes}:
            stored, number = self.indexes.get(model, set()), counted.get(model, 0)
            if number > len(stored) or (verdict and (number < len(stored) or stored != set(range(len(stored))))):
                return False
        return True

    def has_tokens(self, counted: Mapping[str | None, int], *, verdict: bool) -> bool:
        """Return True if the numbers of sampled tokens in a result fit the stored turns, by the rules of
        `has_turns`."""
        if not self.certain or not self.began_here:
            return True
        return all(
            number == self.tokens.get(model, 0) if verdict else number <= self.tokens.get(model, 0)
            for model, number in counted.items()
        )


def _is_same(result: SessionResult, records: AttemptRecords) -> bool:
    session, regrades = records.attempt.session, records.attempt.regrades
    reported = (result.session_id, result.group_id, result.sample_index, result.attempt, result.labels, result.regrades)
    none_read = result.stop_reason is StopReason.ERROR and not result.labels and result.regrades is None
    known = (session.id, session.group_id, session.sample_index, session.attempt, records.task.labels, regrades)
    return reported == known or (none_read and reported[:4] == known[:4])


def _rewards_turns(result: SessionResult, records: AttemptRecords) -> bool:
    verdict = result.verdict
    if verdict is None:
        return True
    numbers = (verdict.reward, *verdict.turns.values(), *verdict.rows.values())
    return (
        # This also refuses NaN, because every comparison with NaN is false.
        all(abs(number) <= MAX_REWARD for number in numbers)
        and all(0 <= index < result.turns for index in verdict.turns)
        and all(0 <= row < result.samples for row in verdict.rows)
    )


def _metrics_fit(result: SessionResult, records: AttemptRecords) -> bool:
    metrics = {} if result.verdict is None else result.verdict.metrics
    return len(metrics) <= MAX_METRICS and all(
        len(name) <= 2 * MAX_METRIC_NAME and math.isfinite(number) for name, number in metrics.items()
    )


def _counts_turns(result: SessionResult, records: AttemptRecords) -> bool:
    counted = {None: result.turns} | {model: use.turns for model, use in result.frozen.items()}
    return records.has_turns(counted, verdict=result.verdict is not None)


def _counts_tokens(result: SessionResult, records: AttemptRecords) -> bool:
    tokens = result.tokens
    counted = {None: tokens.sampled} | {model: use.tokens for model, use in result.frozen.items()}
    return tokens.sampled == tokens.trained + tokens.masked + tokens.dropped and records.has_tokens(
        counted, verdict=result.verdict is not None
    )


def _uses_no_more(result: SessionResult, records: AttemptRecords) -> bool:
    order, chosen = list(BranchPolicy), policy_of(records.task.branches)
    return all(order.index(policy) >= order.index(chosen[kind]) for kind, policy in result.policy.items())


def _is_short(result: SessionResult, records: AttemptRecords) -> bool:
    reason = result.verdict.reason if result.verdict is not None else None
    tables: tuple[Mapping[Any, Any], ...] = (result.forks, result.ignored, result.failed_calls, result.frozen)
    return (
        len(reason or "") <= MAX_REASON
        and len(result.answer or "") <= MAX_ANSWER
        and all(len(table) <= MAX_TABLE_ENTRIES for table in tables)
    )


RESULT_RULES: tuple[ClaimRule[SessionResult], ...] = (
    ClaimRule(
        "session, group, sample, attempt, labels, `regrades`", "those of the attempt that the node was given", _is_same
    ),
    ClaimRule(
        "`stop_reason`",
        "an end of an agent's run, `session_timeout` or `error`; an `error` record exactly with `error`",
        lambda result, records: (
            result.stop_reason in ENDS and (result.error is None) == (result.stop_reason is not StopReason.ERROR)
        ),
    ),
    ClaimRule(
        "verdict",
        "only with an end that is graded",
        lambda result, records: result.verdict is None or result.stop_reason in GRADED,
    ),
    ClaimRule(
        "rewards",
        f"finite, between -{MAX_REWARD:g} and {MAX_REWARD:g}; of turns and rows that the session has",
        _rewards_turns,
    ),
    ClaimRule("metrics", f"finite; {MAX_METRICS:,} at most", _metrics_fit),
    ClaimRule(
        "`turns`, `frozen`", "with a verdict, exactly the turns that are stored; without one, no more", _counts_turns
    ),
    ClaimRule(
        "`tokens`",
        "sampled = trained + masked + dropped; with a verdict, exactly the tokens of the stored turns",
        _counts_tokens,
    ),
    ClaimRule(
        "all other numbers",
        "finite, 0 or more, below 2^53; no more rows than turns",
        lambda result, records: (
            _all_counts(msgspec.structs.replace(result, verdict=None, harness_exit=None))
            and result.samples <= result.turns
        ),
    ),
    ClaimRule(
        "exit code",
        "a signed number of 32 bits",
        lambda result, records: result.harness_exit is None or -MAX_COUNT <= result.harness_exit.code <= MAX_COUNT,
    ),
    ClaimRule("`policy`", "uses no more of a kind of branch than the task does", _uses_no_more),
    ClaimRule(
        "`artifact_bytes`",
        "no more than was kept for the attempt",
        lambda result, records: not records.kept_here or result.artifact_bytes <= records.kept_bytes,
    ),
    ClaimRule(
        "texts and tables",
        f"a verdict's reason {MAX_REASON:,} characters, an answer {MAX_ANSWER:,}, a table {MAX_TABLE_ENTRIES} lines;"
        " errors and logs are cut",
        _is_short,
    ),
)
"""Rules for the result of an attempt."""


def _links_back(call: AddTurn, records: AttemptRecords) -> bool:
    turn = call.turn
    return 0 <= turn.index < MAX_TURNS and all(
        before is None or 0 <= before < turn.index for before in (turn.parent, turn.forked_from)
    )


def _fits_together(call: AddTurn, records: AttemptRecords) -> bool:
    turn = call.turn
    delta, output, logprobs = len(turn.prompt_delta), len(turn.output_ids), len(turn.logprobs)
    return (
        delta % 4 == output % 4 == 0
        and logprobs in (0, 2 * output)
        and delta // 4 <= turn.prompt_length <= MAX_COUNT
        and _tiles(turn, output // 4)
    )


def _could_be_sampled(call: AddTurn, records: AttemptRecords) -> bool:
    """Return True if the turn passes the checks of `engines.pool.checks`. The service repeats these checks because the
    node, not the service, received the engine's reply."""
    turn = call.turn
    prompt, output = unpack_ids(turn.prompt_delta), unpack_ids(turn.output_ids)
    if len(prompt) and prompt.min() < 0:
        return False
    if not len(output):
        return True
    logprobs = unpack_logprobs(turn.logprobs)
    if not len(logprobs) and turn.logprob_kind is not LogprobKind.NONE:
        return False
    possible = bool(((logprobs > LOWEST) & (logprobs <= ROUNDING)).all())  # NaN fails both comparisons
    return possible and records.vocabularies[call.model].contains_all(output.tolist())


def _tiles(turn: Turn, tokens: int) -> bool:
    edge = 0
    for span in turn.versions:
        if span.start != edge or span.end < edge or not 0 <= span.version <= MAX_COUNT:
            return False
        edge = span.end
    return not turn.versions or edge == tokens


def _within_limits(call: AddTurn, records: AttemptRecords) -> bool:
    # Turns that are being stored count, too: a node may send many turns before the first is stored.
    before = records.tokens.get(call.model, 0) + records.storing.get(call.model, 0)
    sampled = before + len(call.turn.output_ids) // 4
    # Count only turns of engines that take and return token ids. A chat engine reports the number of its tokens only
    # after the call, so concurrent calls may together exceed `response_tokens`.
    counted = call.model is None and call.turn.mode is TokenMode.TOKENS
    return not counted or sampled <= records.task.limits.response_tokens


def _reports(call: AddTurn, records: AttemptRecords) -> bool:
    report = call.turn.report
    if report is None:
        return True
    output = len(report.output_ids)
    fits = output % 4 == 0 and len(report.logprobs) == 2 * output
    # The times come from an inference worker, in any unit. If its clock was set back, a duration is negative.
    finite = all(time is None or math.isfinite(time) for time in report.timing.values())
    return fits and (not output or call.turn.mode is TokenMode.TEXT) and finite


def _has_json_values(call: AddTurn, records: AttemptRecords) -> bool:
    """Return True if JSON can represent the sampling, the rank info and the tools of the turn. Otherwise the service
    could not encode a reply with the session's turns."""
    turn = call.turn
    try:
        msgspec.json.encode((turn.sampling, turn.report and turn.report.rank_info, turn.tool_specs))
    except (TypeError, ValueError):
        return False
    return True


def has_image_bytes(turn: Turn) -> bool:
    return any(image.data for message in turn.messages for image in images_in(message))


def _images_are_true(call: AddTurn, records: AttemptRecords) -> bool:
    """Return True if each image has the digest and the size of its bytes, and a possible position in the prompt. The
    store keeps the bytes once for each digest, for all sessions."""
    turn = call.turn
    for message in turn.messages:
        for image in images_in(message):
            if image.url is not None:
                true = not image.data and image == msgspec.structs.replace(image_from_url(image.url), grid=image.grid)
            else:
                true = not image.data or (
                    image.digest == hashlib.sha256(image.data).hexdigest() and image.size == len(image.data)
                )
            if not true or not 0 <= image.size <= MAX_COUNT or not _is_grid(image.grid):
                return False
    return all(
        place.start >= 0
        and place.length > 0
        and place.start + place.length <= turn.prompt_length
        and _is_grid(place.grid)
        for place in turn.images
    )


def _is_grid(grid: tuple[int, int, int] | None) -> bool:
    return grid is None or all(0 < count <= MAX_COUNT for count in grid)


IMAGE_RULES: tuple[ClaimRule[AddTurn], ...] = (
    ClaimRule("images", "digests and sizes those of their bytes; positions within the prompt", _images_are_true),
)
"""Rules for the images of a turn. They are checked in a thread if the turn has the bytes of images, because a turn may
have megabytes of them."""

TURN_RULES: tuple[ClaimRule[AddTurn], ...] = (
    ClaimRule(
        "model",
        "the policy, or a frozen model of the service",
        lambda call, records: call.model in records.vocabularies,
    ),
    ClaimRule("`index`, `parent`, `forked_from`", f"0 to {MAX_TURNS:,}; a parent comes before its child", _links_back),
    ClaimRule("ids, log-probabilities, versions", "of matching lengths; versions cover the output", _fits_together),
    ClaimRule("ids, log-probabilities", "[as those of any engine](engines.md#what-is-not-believed)", _could_be_sampled),
    ClaimRule(
        "`step`",
        "one of the task's",
        lambda call, records: 0 <= call.turn.step < len(steps_of(records.task)),
    ),
    ClaimRule("tokens of all turns", "the task's `response_tokens` at most", _within_limits),
    ClaimRule(
        "all other numbers",
        "finite, 0 or more, below 2^53",
        lambda call, records: _all_counts(
            (
                call.turn.conversation,
                call.turn.cached_tokens,
                call.turn.drift_tokens,
                call.turn.malformed_calls,
                call.turn.timings,
            )
        ),
    ),
    ClaimRule(
        "names",
        f"{MAX_NAME} characters",
        lambda call, records: max(len(call.turn.engine), len(call.turn.dialect)) <= MAX_NAME,
    ),
    ClaimRule("`report`", "ids only for a text, with a log-probability for each; finite times", _reports),
    ClaimRule("`sampling`, `rank_info`, tools", "values that JSON can represent", _has_json_values),
)
"""Rules for every turn that a node asks the service to store."""


def _lists_what_is_kept(call: KeepIndex, records: AttemptRecords) -> bool:
    return all(records.kept.get(each.sha256) == each.size for each in call.listed.artifacts)


def _lists_few(call: KeepIndex, records: AttemptRecords) -> bool:
    most = (len(records.task.artifacts) + 1) * (LIMITS.matches + len(FOR_GRADERS))
    paths = [*(each.path for each in call.listed.artifacts), *(each.path for each in call.listed.left_out)]
    reasons = (each.reason for each in call.listed.left_out)
    return (
        len(paths) <= 2 * most
        and all(len(path) <= MAX_PATH for path in paths)
        and all(len(reason) <= MAX_PATH for reason in reasons)
    )


INDEX_RULES: tuple[ClaimRule[KeepIndex], ...] = (
    ClaimRule("files", "kept for this attempt, of these sizes", _lists_what_is_kept),
    ClaimRule(
        "lines", f"{LIMITS.matches:,} for each pattern of the task; paths of {MAX_PATH:,} characters", _lists_few
    ),
)
"""Rules for the list of an attempt's artifacts."""


def check(thing: T, rules: tuple[ClaimRule[T], ...], records: AttemptRecords) -> None:
    """Raise Nonsense if `thing` breaks a rule. The error names the first such rule."""
    for rule in rules:
        if not rule.holds(thing, records):
            name = records.attempt.name
            raise Nonsense(f"attempt {name}: {rule.what} must be {rule.bound}")


def shortened(result: SessionResult) -> SessionResult:
    """Return the result with its error and its log shortened to their maximum lengths."""
    ended = result.harness_exit
    if ended is not None:
        ended = msgspec.structs.replace(ended, log_tail=ended.log_tail[-MAX_REASON:])
    error = None if result.error is None else bounded(result.error)
    return msgspec.structs.replace(result, error=error, harness_exit=ended)


def checked_stats(name: str, report: Report) -> NodeStats:
    """Return the statistics of a node's report, under the name that the service has for the node. The list of failures
    and its texts are shortened. Raises Nonsense for impossible numbers, too many lanes (stages of sessions), or a
    lane's name that is too long."""
    stats = report.stats
    names_fit = all(len(lane.name) <= MAX_NAME for lane in stats.lanes)
    if not (_all_counts(stats) and len(stats.lanes) <= MAX_LANES and names_fit and stats.capacity <= MAX_SESSIONS):
        raise Nonsense("a report with impossible numbers")
    failing = tuple(
        msgspec.structs.replace(each, name=each.name[:MAX_NAME], node=name, error=each.error[:MAX_DETAIL])
        for each in stats.failing[:MAX_FAILING]
    )
    return msgspec.structs.replace(stats, name=name, drained=False, failing=failing)


def checked_counts(report: Report, before: NodeCounts) -> NodeCounts:
    """Return the counts of a node's report. `before` are the counts of its previous report. Raises Nonsense in these
    cases:

    - A number is impossible, or smaller than in the previous report.
    - There are too many names, or a name is too long.
    - A histogram has other buckets than SECONDS."""
    counts = report.counts
    names: list[Mapping[str, object]] = [counts.sandboxes, counts.failed_calls, *counts.failed_calls.values()]
    if (
        not _all_counts(counts)
        or any(len(each) > MAX_COUNTED or any(len(name) > MAX_NAME for name in each) for each in names)
        or any(len(each.started.counts) not in (0, len(SECONDS) + 1) for each in counts.sandboxes.values())
        or not _grows(before, counts)
    ):
        raise Nonsense("a report with impossible counts")
    return counts


def _grows(before: NodeCounts, counts: NodeCounts) -> bool:
    """Return True if no count is smaller than before. The service exports the sum of all nodes' counts as a metric, and
    this metric must never decrease."""
    for runtime, was in before.sandboxes.items():
        now = counts.sandboxes.get(runtime)
        if now is None or now.failed < was.failed or now.started.total < was.started.total:
            return False
        if any(map(lt, now.started.counts or (0,) * len(was.started.counts), was.started.counts)):
            return False
    return all(
        counts.failed_calls.get(dialect, {}).get(code, 0) >= number
        for dialect, codes in before.failed_calls.items()
        for code, number in codes.items()
    )


def checked_uses(engines: Mapping[str, EngineUse], *, stranger: bool) -> dict[str, EngineUse]:
    """Return a node's use of the engines, with texts shortened for the status. `stranger` is True for a node on another
    machine. For such a node, the measured speed (`pace`) is left out, because the service would use it to judge
    sessions of other nodes."""
    return {
        name: msgspec.structs.replace(
            use, suspect=use.suspect and use.suspect[:MAX_TEXT], pace=None if stranger else use.pace
        )
        for name, use in engines.items()
    }


def _all_counts(thing: object) -> bool:
    """Return True if all numbers in `thing` are finite, not negative, and below MAX_NUMBER."""
    return all(0 <= number < MAX_NUMBER for number in _numbers(thing))


def _numbers(thing: object) -> Iterator[float]:
    if isinstance(thing, int | float):
        yield thing
    elif isinstance(thing, msgspec.Struct):
        for field in thing.__struct_fields__:
            yield from _numbers(getattr(thing, field))
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _numbers(value)
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from _numbers(value)
