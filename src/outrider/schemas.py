"""The replies of the control API: msgspec structs that the server writes and the client reads.

Times are seconds since the epoch, durations are seconds. The request bodies are in spec.py. Types
that requests and replies share are defined here, so that clients can import them without pydantic.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from outrider.errors import ErrorRecord, FailingChore
from outrider.lifecycle import GroupState, SessionState
from outrider.messages import Message
from outrider.trajectory import ChatRow, JsonSample, Sample, SessionResult, TokenMode, TurnTimings, Verdict, VersionSpan

R = TypeVar("R", bound=msgspec.Struct)

Role = Literal["read", "submit", "node", "admin"]
"""The rights of a token. `submit` includes `read`, `node` only allows a node to join, `admin` allows everything."""

Severity = Literal["error", "warning", "info"]
"""The severity of a finding: an `error` spoils training data or makes sessions fail, a `warning` wastes time or tokens,
an `info` is only worth knowing."""

PolicyPause = Literal["finish", "abort"]
"""The effect of a policy pause on the generations in flight: they run to their end, or are cut off and continued
later."""

MAX_INLINE_FILE = 16 << 20
"""Maximum number of characters of a file in a `write` step."""
EVALUATION_LABEL = "outrider.evaluation"
"""Label of groups that evaluate a policy, with the evaluation's name as its value. Exports for training leave out the
groups with this label."""


RETRY_LABEL = "outrider.retry"
"""Label of a group that runs sessions of an earlier group again, with the earlier group's id as its value."""


def reply_of(kind: type[R], row: msgspec.Struct, /, **others: Any) -> R:
    """Return a reply of the type `kind`. Its fields are `others` and, for every other name, the field of `row` with
    this name."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__ if name not in others}, **others)


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A lane (a bounded stage of sessions). `served` and `waited_seconds` are totals since the start."""

    name: str
    size: int
    in_use: int
    waiting: int
    served: int
    waited_seconds: float


class ResourceStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node's resources for its sandboxes, and how much of each is reserved (`..._set_aside`): processor time in
    processors, MiB of memory, and GPUs. `waiting` is the number of sessions that wait for resources; `served` and
    `waited_seconds` are totals since the start."""

    cpus: float
    cpus_set_aside: float = 0.0
    memory_mb: int
    memory_mb_set_aside: int = 0
    gpus: int = 0
    gpus_set_aside: int = 0
    waiting: int = 0
    served: int = 0
    waited_seconds: float = 0.0


class WarmStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes started ahead of time: `ready` are available now, `taken` counts sessions that used one, and `misses`
    counts sessions that found none."""

    ready: int = 0
    taken: int = 0
    misses: int = 0


class StallStats(msgspec.Struct, frozen=True, kw_only=True):
    """Stalls of a node's event loop for longer than 50 ms: their number, and the `total` and `longest` seconds. In
    `starved` stalls the process did not run, because it was stopped or the machine gave it no processor. In the others,
    work in the process blocked the loop.

    `held` is the longest processor time, in seconds, of the loop's own thread during a stall. In the rest of a stall,
    other threads or processes had the interpreter or the processor.
    """

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    held: float = 0.0
    starved: int = 0


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its number of running sessions, its maximum (`capacity`), its lanes and its resources. A `drained` node
    takes no new sessions. `failing` is the background work that fails on the node."""

    name: str
    drained: bool = False
    sessions: int
    capacity: int
    lanes: tuple[LaneStats, ...]
    resources: ResourceStats
    warm: WarmStats = WarmStats()
    stalls: StallStats = StallStats()
    failing: tuple[FailingChore, ...] = ()


class PulledImage(msgspec.Struct, frozen=True, kw_only=True):
    """The result of getting an image on one machine. `node` is a node of the machine. The result has the image's digest
    and the bytes of its files, or the error."""

    node: str
    digest: str | None = None
    bytes: int | None = None
    error: ErrorRecord | None = None


class PulledImages(msgspec.Struct, frozen=True):
    """The results of getting an image, one for each machine that runs sessions."""

    machines: tuple[PulledImage, ...]


class RefusedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node on another machine that was disconnected, at the time `at`, because of an impossible message. `token` is
    the name of the token with which the node joined."""

    name: str
    token: str
    at: float
    reason: str


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that run sessions. `refused` are the latest disconnected nodes, the oldest first."""

    nodes: tuple[NodeStats, ...]
    refused: tuple[RefusedNode, ...] = ()


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of an engine, from its pool.

    The pool counts: generations `in_flight`, `sessions` that stay with the engine, `assigned_tokens` of their contexts,
    and `generated_tokens` and `failures` since the engine was added. `serves` is the name of a frozen model, None for
    the policy. `advice` names better flags for the engine's server, if any were noticed. `suspect` describes the last
    invalid response of a suspect engine, and is None for any other; `misbehaved` counts invalid responses.
    """

    name: str
    kind: str
    serves: str | None = None
    url: str | None
    mode: TokenMode
    ok: bool
    detail: str
    draining: bool
    in_flight: int
    sessions: int
    assigned_tokens: int
    generated_tokens: int
    failures: int
    suspect: str | None = None
    misbehaved: int = 0
    advice: str = ""
    version: int
    model: str | None
    context_tokens: int | None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session. `result` is set once the session is done. `last_error` is the error after which the session was last
    queued again, None if the session never was queued again."""

    id: str
    group_id: str
    sample_index: int
    state: SessionState
    attempt: int
    node: str | None
    created: float
    updated: float
    last_error: ErrorRecord | None
    result: SessionResult | None


class GroupFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a single group and a group in a list have in common."""

    id: str
    state: GroupState
    cancelled: bool
    n: int
    priority: int
    created: float
    finished: float | None
    cursor: int | None
    labels: dict[str, str]
    submitted_by: str | None = None
    tenant: str | None = None


class GroupView(GroupFields, frozen=True, kw_only=True):
    """A group with its sessions in sample order. `cursor` is the group's position in the results, once the group is
    done; `samples` are its training rows, if requested; `submitted_by` is the name of the token that submitted the
    group, `tenant` its owner."""

    sessions: tuple[SessionView, ...]
    samples: tuple[Sample, ...] | None = None


class JsonGroupView(GroupFields, frozen=True, kw_only=True):
    """A `GroupView` as decoded from JSON: each sample is a `JsonSample`."""

    sessions: tuple[SessionView, ...]
    samples: tuple[JsonSample, ...] | None = None

    def view(self) -> GroupView:
        samples = None if self.samples is None else tuple(row.sample() for row in self.samples)
        return reply_of(GroupView, self, samples=samples)


class RegradedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was graded again, as session `regraded_as`: its old verdict `was`, and its new verdict `now`.
    Either verdict may be missing, for example if a grading failed; `error` is the error of the new grading."""

    session_id: str
    regraded_as: str
    was: Verdict | None
    now: Verdict | None
    error: ErrorRecord | None


class Regraded(msgspec.Struct, frozen=True):
    """Output of `outrider regrade --json`."""

    sessions: tuple[RegradedSession, ...]


class GroupSummary(GroupFields, frozen=True, kw_only=True):
    """A group in a list: how many of its `n` sessions are `done`, how many of the done sessions have an error, and the
    mean reward of the sessions with a reward."""

    done: int
    errors: int
    mean_reward: float | None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, newest first. `after` is the `after` of the next page, None for the last page."""

    groups: tuple[GroupSummary, ...]
    after: str | None = None


class QueryReply(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an SQL query, each with one value for each of `columns`: text, number or null. Bytes are hexadecimal
    digits, infinite numbers are text. `truncated`: there are more rows than the limits allow. `seconds` is the time
    that the query took."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate with its 95 % confidence interval; `low` and `high` are None with fewer than two tasks."""

    value: float
    low: float | None = None
    high: float | None = None


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: the sessions that `selector` names.

    `done` of the sessions are done, `graded` have a reward, and `solved` have a reward of at least the comparison's
    `passed`. `reward` is the mean over tasks of a task's mean reward, `pass_at` the unbiased estimates of pass@k by k;
    without a graded session, `reward` is None and `pass_at` is empty. `turns`, `tokens_sampled`, `tokens_trained`,
    `seconds` and `model_seconds` are means over the sessions that are done. `failures` counts the done sessions without
    a reward, by error code, or by stop reason if they have no error.
    """

    selector: str
    groups: int
    sessions: int
    done: int
    graded: int
    tasks: int
    solved: int
    reward: Estimate | None
    pass_at: dict[int, Estimate]
    turns: float | None
    tokens_sampled: float | None
    tokens_trained: float | None
    seconds: float | None
    model_seconds: float | None
    failures: dict[str, int]


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """Two sessions of the same task and place, of which one is solved and the other is not. `sample` is the place among
    the task's sessions on its side. `a` and `b` are ids of sessions."""

    task: str
    sample: int
    a: str
    b: str
    a_reward: float
    b_reward: float


class RunDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two runs. `reward` and `pass_at` are the differences b - a. `paired` is the number of tasks that
    have graded sessions on both sides; the differences are over these tasks alone, or over all tasks as two independent
    sets if `paired` is 0. `gained` pairs of sessions are solved in `b` only, `lost` in `a` only, and `flips` are the
    first of these pairs."""

    a: RunSide
    b: RunSide
    passed: float
    paired: int
    reward: Estimate | None
    pass_at: dict[int, Estimate]
    gained: int
    lost: int
    flips: tuple[Flip, ...]


class ChangedSessions(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cancellation or a retry of sessions. `matched` is the number of sessions that match, and
    `changed` the number of sessions that were cancelled or submitted again. A retry submits them in the new `groups`.
    `skipped` counts the matching sessions that were left as they are, by reason. `sessions` are the first 100 that
    match. With `dry_run` nothing was changed. `error` is the refusal at which a retry stopped."""

    matched: int
    changed: int
    skipped: dict[str, int]
    sessions: tuple[str, ...]
    groups: tuple[str, ...] = ()
    dry_run: bool = False
    error: ErrorRecord | None = None


class PauseView(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the queue since the time `since`, by the token `who`: sessions whose group has all `labels` and the
    `harness` are not started. `tenant` is None for a pause of all tenants."""

    labels: dict[str, str]
    harness: str | None
    tenant: str | None
    since: float
    who: str


class QueuePauses(msgspec.Struct, frozen=True, kw_only=True):
    """The pauses of the queue, the oldest first. `held` is the number of sessions that the pauses hold: those of the
    caller's tenant, or of all tenants for an admin. `changed` is the number of sessions that this request has held or
    released."""

    pauses: tuple[PauseView, ...]
    held: int
    changed: int = 0


class ResultsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Done groups in the order they finished. Request the next ones with `after=cursor`."""

    groups: tuple[GroupView, ...]
    cursor: int


class ConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader of a tenant's results, or of all tenants' results if `tenant` is None. The consumer has
    acknowledged the groups up to `cursor`, at most `lag` groups are left to read, and its last request was at
    `seen`."""

    name: str
    tenant: str | None = None
    cursor: int
    lag: int
    created: float
    seen: float


class ConsumerList(msgspec.Struct, frozen=True, kw_only=True):
    """The consumers of the caller's tenant, by name; for an admin the admins' consumers, then each tenant's."""

    consumers: tuple[ConsumerView, ...]


class CallbackView(msgspec.Struct, frozen=True, kw_only=True):
    """A callback that was given up after `tries` attempts; `fault` is the reason of the last failure. `url` omits the
    user and the query, which may be secret; `url` is only the host and port if the service lacks the key with which the
    URL was encrypted. The group was done at `since`."""

    group_id: str
    url: str
    tries: int
    since: float
    given_up: float
    fault: str


class CallbackList(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks that were given up, newest first."""

    callbacks: tuple[CallbackView, ...]


class Redelivered(msgspec.Struct, frozen=True, kw_only=True):
    """The number of retried callbacks."""

    callbacks: int


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a removal, or, with `dry_run`, of a trial: the number of removed `groups` and of their `sessions`,
    and the `bytes` of their tasks, turns, results and artifacts.

    Some groups are old enough, but are kept: `unacknowledged` is the number of groups that a consumer has not
    acknowledged, `undelivered` is the number of groups whose callback is not delivered yet. `stored_bytes` is the size
    of all finished groups now, images included. If `more` is true, groups are left to remove: repeat the request.
    """

    groups: int
    sessions: int
    bytes: int
    unacknowledged: int
    undelivered: int
    stored_bytes: int
    more: bool = False
    dry_run: bool = False


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the service's append-only log."""

    cursor: int
    at: float
    kind: str
    group_id: str
    session_id: str | None
    data: dict[str, Any]


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as text: `context` is the text added to the prompt by this turn, `sampled` is the model's output.

    `model` is the frozen model that was called, None for the policy; `index` and `parent` are numbers of turns, counted
    for each model separately. `kind`, `label` and `depth` describe the turn's branch; `step`, `altered` and `ignored`
    are as in `trajectory.Turn`. `tokens` is set if it was requested.
    """

    index: int
    parent: int | None
    step: int = 0
    model: str | None = None
    join: str
    cause: str | None
    forked_from: int | None
    kind: str = "main"
    label: str = ""
    depth: int = 0
    prompt_tokens: int
    output_tokens: int
    context: str
    sampled: str
    finish: str
    mode: str
    dialect: str
    engine: str
    tool_calls: int
    malformed_calls: int
    cached_tokens: int | None
    drift_tokens: int
    versions: tuple[VersionSpan, ...]
    sampling: dict[str, Any]
    altered: bool = False
    ignored: tuple[str, ...] = ()
    timings: TurnTimings
    tokens: TurnTokens | None = None


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a session. `ended` is None while the attempt is under way. `error` is the code of the error that
    ended the attempt, and `message` its text."""

    attempt: int
    began: float
    ended: float | None
    node: str | None
    error: str | None = None
    message: str = ""


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """An event or an activity in an attempt. `end` is None while the activity goes on. docs/timeline.md describes the
    kinds, and the `data` of each."""

    kind: str
    name: str
    start: float
    end: float | None
    data: dict[str, Any] = {}


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one attempt of a session. `now` is the time of the reply. `attempts` are all attempts of
    the session. `spans` are in the order of their starts. `left_out` has the number of entries that were not stored, by
    kind, because there were too many."""

    session_id: str
    group_id: str
    attempt: int
    state: SessionState
    now: float
    attempts: tuple[AttemptView, ...]
    spans: tuple[SpanView, ...]
    left_out: dict[str, int] = {}


class SessionEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose agent runs elsewhere, and how the agent reaches its model. `key` is the session's credential: the
    agent's API key. `model` is the name of the model. `base_urls` are the addresses under which the agent may reach the
    service, by the name of each address's network; `base_url` is the first address. `instruction` is that of the
    session's task. `variables` are environment variables for agent programs of all vendors, for `base_url`. `running`:
    the session takes calls now."""

    session: SessionView
    running: bool
    key: str
    model: str
    base_url: str
    base_urls: dict[str, str]
    instruction: str
    variables: dict[str, str]


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions by group, newest group first. `after` is the `after` of the next page, None for the last page."""

    sessions: tuple[SessionView, ...]
    after: str | None


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's tokens and messages. The turn's prompt is its parent's prompt, its parent's output, then `prompt_delta`.
    `logprobs` has one number for each of `output_ids`. `messages` are the messages that the request added to the
    conversation of the turn's parent; if the turn has no parent, all messages. `reply` is the message that the client
    was given, None if the client had hung up. `prompt_pieces` and `output_pieces` are the texts of the single tokens of
    `prompt_delta` and `output_ids`, if they were requested and the model's tokenizer is known. A character of several
    tokens is in the text of its last token."""

    prompt_delta: list[int]
    output_ids: list[int]
    logprobs: list[float]
    messages: tuple[Message, ...]
    reply: Message | None
    prompt_pieces: list[str] | None = None
    output_pieces: list[str] | None = None


class TurnList(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of an attempt in the order they finished, including frozen models' turns."""

    turns: tuple[TurnView, ...]


class SampleList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows."""

    samples: tuple[Sample, ...]


class ChatList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows as conversations."""

    rows: tuple[ChatRow, ...]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A kept file of a sandbox: its absolute path in the sandbox, its size in bytes, and the SHA-256 (hex) of its
    bytes."""

    path: str
    size: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not kept as an artifact, or a pattern that gave no files, and the reason. `path` is "" for all
    files that were not reached in time."""

    path: str
    reason: str


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts of one attempt. `attempt` is None if the caller named no attempt and no attempt of the session has
    stored a list."""

    session_id: str
    attempt: int | None
    artifacts: tuple[Artifact, ...]
    left_out: tuple[LeftOut, ...]


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of the policy and of the frozen models."""

    engines: tuple[EngineStatus, ...]


class PolicyEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the policy: the version of its weights, as last read, and whether it accepts generations while the
    policy is not paused."""

    name: str
    version: int
    ok: bool


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the policy. `paused` is None while the policy generates. `cancelled` are the groups that this
    request cancelled, because they began at too old a version."""

    version: int
    paused: PolicyPause | None
    engines: tuple[PolicyEngine, ...]
    cancelled: tuple[str, ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the service. `model` is the policy's name, `frozen` the names of the models beside it. `sessions`
    counts the sessions of the caller's tenant by state, or of all tenants for an admin; `cursor` is the cursor of the
    newest result of the same tenants, from which later results can be followed. `failing` is the background work that
    fails now, of the service and of its nodes. `may` has the roles that the caller may act in."""

    version: str
    model: str
    frozen: tuple[str, ...] = ()
    sessions: dict[str, int]
    cursor: int
    nodes: tuple[NodeStats, ...]
    engines: tuple[EngineStatus, ...]
    policy: PolicyStatus = PolicyStatus(version=0, paused=None, engines=())
    failing: tuple[FailingChore, ...] = ()
    may: tuple[Role, ...] = ()


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that a rule of the doctor of runs has found (docs/diagnosis.md).

    text: the fault, in one line. subject: what the finding is about, such as a tool, an engine or an error's code; ""
        for findings about all sessions.
    numbers: `value` is the estimate, `at_least` is the bound that is compared with `threshold`, `sessions` or `groups`
        is the number of independent units; others depend on the rule.
    sessions: up to 5 sessions that show the fault, the clearest first. next: the next step.
    """

    rule: str
    severity: Severity
    text: str
    subject: str = ""
    numbers: dict[str, float | str] = {}
    sessions: tuple[str, ...] = ()
    next: str


class RunSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run's done sessions by their use, summed. `queued` is the wait for a slot before the sandbox starts,
    without the time in the service's queue; `waiting` is the time in which a prepared sandbox waits for a slot; `tools`
    is the time of the run in which no model call is under way."""

    queued: float = 0.0
    waiting: float = 0.0
    preparing: float = 0.0
    model: float = 0.0
    tools: float = 0.0
    grading: float = 0.0
    stopping: float = 0.0


class RunDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The report of the doctor of runs: the amount of data that was read, and the findings, the most severe first.

    groups, sessions: the numbers of groups and of done sessions that were read. not_done: the number of sessions of
        these groups that are not done.
    truncated: true if there are more groups, which are older and were not read.
    read_sessions, read_turns: the size of the sample whose turns and timelines were read, in sessions and in model
        calls.
    """

    groups: int
    sessions: int
    not_done: int
    truncated: bool = False
    read_sessions: int
    read_turns: int
    seconds: RunSeconds
    findings: tuple[RunFinding, ...]


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the service between the previous point and the time `at`.

    sessions_done, sessions_failed, groups_done: sessions and groups that ended; the failed sessions are among the done.
    calls, calls_failed: model calls that were stored, and model calls that were answered with an error.
    tokens_sampled: tokens of the stored calls.
    queued, running: sessions at the time `at`. A session is running from its start to its end.
    """

    at: float
    sessions_done: int
    sessions_failed: int
    groups_done: int
    calls: int
    calls_failed: int
    tokens_sampled: int
    queued: int
    running: int


class RateList(msgspec.Struct, frozen=True, kw_only=True):
    """The points of the last hour, oldest first: one each `step_seconds`, since the service's start. A point may come
    late, if the store has failed meanwhile. `now` is the service's time."""

    now: float
    step_seconds: float
    points: tuple[RatePoint, ...]


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the control API, without its text. The token submits and sees the groups of `tenant`. `expires` is
    None for a token that does not expire; `revoked` is None until the token is revoked."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None
    created: float
    expires: float | None
    revoked: float | None


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """Every token, including expired and revoked ones, oldest first."""

    tokens: tuple[TokenView, ...]


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A new token and its text, shown only once."""

    token: TokenView
    text: str
