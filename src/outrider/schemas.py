"""The replies of the control API, as msgspec structs that the server writes and the client reads.

Times are seconds since the epoch, and durations are seconds. spec.py has the request bodies. Types that requests and
replies share are defined here, so that clients can import them without pydantic.
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
"""The role of a token. `submit` includes the rights of `read`. `node` can only join a node to the service. `admin` can
do everything."""

Severity = Literal["error", "warning", "info"]
"""How bad a finding is. An `error` spoils training data or makes sessions fail, a `warning` wastes time or tokens, and
an `info` needs no action."""

PolicyPause = Literal["finish", "abort"]
"""What a pause of the policy does to running generations. With `finish`, they run to their end. With `abort`, they are
cut off, and continued after the pause."""

MAX_INLINE_FILE = 16 << 20
"""Maximum number of characters that a `write` step writes into a file."""
EVALUATION_LABEL = "outrider.evaluation"
"""The label of a group that evaluates a policy. Its value is the name of the evaluation. Exports for training leave out
groups with this label."""


RETRY_LABEL = "outrider.retry"
"""The label of a group that repeats sessions of an earlier group. Its value is the id of the earlier group."""


def reply_of(kind: type[R], row: msgspec.Struct, /, **others: Any) -> R:
    """Make a reply of the type `kind`. A field that is in `others` has the value given there. Every other field has the
    value of the field of `row` with the same name."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__ if name not in others}, **others)


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A lane, which limits the number of sessions in one stage. `served` is the number of sessions that got a
    slot since the node's start, and `waited_seconds` is their total wait."""

    name: str
    size: int
    in_use: int
    waiting: int
    served: int
    waited_seconds: float


class ResourceStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node's resources for sandboxes: processors, MiB of memory, and GPUs. `..._set_aside` is how much of each is
    reserved. `waiting` is the number of sessions that wait for resources. `served` is the number of sessions that got
    resources since the node's start, and `waited_seconds` is their total wait."""

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
    """Sandboxes started ahead of time. `ready` is how many are available now. `taken` is the number of sessions that
    got one, and `misses` the number of sessions that did not."""

    ready: int = 0
    taken: int = 0
    misses: int = 0


class StallStats(msgspec.Struct, frozen=True, kw_only=True):
    """Stalls of a node's event loop that took longer than 50 ms.

    - `count`, `total`, `longest`: the number of stalls, and the sum and the maximum of their seconds.
    - `starved`: the number of stalls in which the process itself did not run, because it was stopped or got no
      processor. In other stalls, work in the process blocked the loop.
    - `held`: the longest processor time, in seconds, that the loop's own thread used during a stall. For the rest of
      the stall, other threads or processes had the interpreter or the processor.
    """

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    held: float = 0.0
    starved: int = 0


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node, which runs sessions. `sessions` is the number of its running sessions, and `capacity` the maximum. A
    `drained` node takes no new sessions. `failing` is background work that currently fails on the node."""

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
    """The result of pulling an image on one machine. `node` is a node of this machine. After a success, `digest` is the
    image's digest and `bytes` the size of its files. Otherwise `error` is set."""

    node: str
    digest: str | None = None
    bytes: int | None = None
    error: ErrorRecord | None = None


class PulledImages(msgspec.Struct, frozen=True):
    """The results of pulling an image, one for each machine that runs sessions."""

    machines: tuple[PulledImage, ...]


class RefusedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node on another machine that the service disconnected at the time `at`, because the node sent an impossible
    message. `token` is the name of the token with which it had joined."""

    name: str
    token: str
    at: float
    reason: str


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that run sessions. `refused` lists the nodes that the service disconnected most recently, oldest
    first."""

    nodes: tuple[NodeStats, ...]
    refused: tuple[RefusedNode, ...] = ()


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of an engine, as its pool knows it.

    - `serves`: the name of the frozen model that the engine serves. None if the engine serves the policy.
    - `in_flight`: the number of running generations.
    - `sessions`: the number of sessions that use this engine.
    - `assigned_tokens`: the total size of these sessions' contexts, in tokens.
    - `generated_tokens`, `failures`: totals since the engine was added.
    - `advice`: better flags for the engine's server, if the pool has noticed any.
    - `suspect`: the last invalid response, while the pool suspects the engine because of it; otherwise None.
    - `misbehaved`: the number of invalid responses.
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
    """A session. `result` is set when the session is done. `last_error` is the error of the latest attempt that was
    retried, or None."""

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
    """The fields that `GroupView` and `GroupSummary` have in common.

    `cursor` is the group's position in the list of results, None until it is finished. `submitted_by` is the name of
    the token that submitted the group, and `tenant` is the group's owner.
    """

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
    """A group with its sessions in sample order. `samples` has its training rows, if requested."""

    sessions: tuple[SessionView, ...]
    samples: tuple[Sample, ...] | None = None


class JsonGroupView(GroupFields, frozen=True, kw_only=True):
    """A `GroupView` as decoded from JSON, in which each sample is a `JsonSample`."""

    sessions: tuple[SessionView, ...]
    samples: tuple[JsonSample, ...] | None = None

    def view(self) -> GroupView:
        samples = None if self.samples is None else tuple(row.sample() for row in self.samples)
        return reply_of(GroupView, self, samples=samples)


class RegradedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was graded again, by the session `regraded_as`. `was` is the old verdict and `now` the new one.
    Either is None if that grading failed. `error` is the error of the new grading."""

    session_id: str
    regraded_as: str
    was: Verdict | None
    now: Verdict | None
    error: ErrorRecord | None


class Regraded(msgspec.Struct, frozen=True):
    """The output of `outrider regrade --json`."""

    sessions: tuple[RegradedSession, ...]


class GroupSummary(GroupFields, frozen=True, kw_only=True):
    """A group in a list. `done` is the number of its finished sessions, and `errors` how many of these have an error.
    `mean_reward` is the mean over the sessions with a reward."""

    done: int
    errors: int
    mean_reward: float | None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, newest first. Send `after` with the next request to get the next page. `after` is None on the last
    page."""

    groups: tuple[GroupSummary, ...]
    after: str | None = None


class QueryReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an SQL query. Each row has one value per column: text, a number or null. Bytes are written as
    hexadecimal digits, and infinite numbers as text. `truncated` is True if limits cut off rows. `seconds` is the
    query's duration."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate with its 95 % confidence interval. `low` and `high` are None if there are fewer than two tasks."""

    value: float
    low: float | None = None
    high: float | None = None


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: the sessions that `selector` selects.

    - `done`, `graded`, `solved`: the numbers of sessions that are done, that have a reward, and whose reward is at
      least `RunDiff.passed`.
    - `reward`: the mean reward of each task, averaged over the tasks; None if no session is graded.
    - `pass_at`: unbiased estimates of pass@k, by k; empty if no session is graded.
    - `turns`, `tokens_sampled`, `tokens_trained`, `seconds`, `model_seconds`: means over the sessions that are done.
    - `failures`: the number of done sessions without a reward, by error code, or by stop reason if there is no error.
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
    """Two sessions of the same task, one from each side of a comparison. Only one of them is solved. Both have the
    position `sample` among their side's sessions of the task."""

    task: str
    sample: int
    a: str
    b: str
    a_reward: float
    b_reward: float


class RunDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two runs, `a` and `b`.

    - `reward`, `pass_at`: the differences b - a over the tasks counted in `paired`. If `paired` is 0, all tasks of `a`
      are compared with all tasks of `b`.
    - `paired`: the number of tasks with graded sessions on both sides.
    - `gained`, `lost`: how many pairs of sessions are solved only in `b`, and how many only in `a`.
    - `flips`: the first of the pairs counted in `gained` and `lost`.
    """

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
    """The result of cancelling or retrying sessions.

    - `matched`: the number of sessions that match the request.
    - `changed`: the number of sessions that were cancelled or submitted again. A retry submits them in the new
      `groups`.
    - `skipped`: the number of matching sessions that were left unchanged, by reason.
    - `sessions`: the first 100 matching sessions.
    - `dry_run`: True if the request asked for a dry run. Nothing was changed then.
    - `error`: the error that stopped a retry.
    """

    matched: int
    changed: int
    skipped: dict[str, int]
    sessions: tuple[str, ...]
    groups: tuple[str, ...] = ()
    dry_run: bool = False
    error: ErrorRecord | None = None


class PauseView(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the queue, made at the time `since` with the token `who`. A session is not started if its group has
    all `labels` and, if `harness` is set, this harness. `tenant` is None for a pause of all tenants."""

    labels: dict[str, str]
    harness: str | None
    tenant: str | None
    since: float
    who: str


class QueuePauses(msgspec.Struct, frozen=True, kw_only=True):
    """The pauses of the queue, oldest first. `held` is how many sessions the pauses hold back. It counts the sessions
    of the caller's tenant, or, for an admin, of all tenants. `changed` is how many sessions this request held or
    released."""

    pauses: tuple[PauseView, ...]
    held: int
    changed: int = 0


class ResultsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in the order in which they finished. To get the next groups, send `after=cursor`."""

    groups: tuple[GroupView, ...]
    cursor: int


class ConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer: a named reader of one tenant's results, or of all results if `tenant` is None. It has acknowledged
    the groups up to `cursor` and has at most `lag` groups left to read. It sent its last request at `seen`."""

    name: str
    tenant: str | None = None
    cursor: int
    lag: int
    created: float
    seen: float


class ConsumerList(msgspec.Struct, frozen=True, kw_only=True):
    """The consumers of the caller's tenant, by name. An admin gets the consumers of the admins, then those of each
    tenant."""

    consumers: tuple[ConsumerView, ...]


class CallbackView(msgspec.Struct, frozen=True, kw_only=True):
    """A callback that the service stopped sending after `tries` attempts. `fault` is the reason of the last failure.
    `url` is the address without its user and query, which may be secret. If the service cannot decrypt the address,
    `url` is only the host and port. The group was done at `since`."""

    group_id: str
    url: str
    tries: int
    since: float
    given_up: float
    fault: str


class CallbackList(msgspec.Struct, frozen=True, kw_only=True):
    """The callbacks that the service stopped sending, newest first."""

    callbacks: tuple[CallbackView, ...]


class Redelivered(msgspec.Struct, frozen=True, kw_only=True):
    """The number of failed callbacks that the service now sends again."""

    callbacks: int


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of removing finished groups. With `dry_run`, nothing was removed, and the numbers show what would be
    removed.

    - `groups`, `sessions`: the numbers of removed groups and sessions.
    - `bytes`: the size of the removed tasks, turns, results and artifacts.
    - `unacknowledged`: old groups that are kept, because a consumer has not acknowledged them.
    - `undelivered`: old groups that are kept, because their callback is not delivered yet.
    - `stored_bytes`: the size of all finished groups now, including images.
    - `more`: True if another request can remove more groups.
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
    """One model call as text.

    - `index`, `parent`: the numbers of the turn and of its parent. Each model's turns are numbered separately.
    - `model`: the frozen model that was called, None for the policy.
    - `context`: the text that this turn added to the prompt.
    - `sampled`: the model's output.
    - `kind`, `label`, `depth`: see `trajectory.SampleFields`.
    - `step`, `altered`, `ignored`: see `trajectory.Turn`.
    - `tokens`: the turn's token ids and messages, only if requested.
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
    """An attempt of a session. `ended` is None while the attempt runs. `error` and `message` are the code and the text
    of the error that ended it, if any."""

    attempt: int
    began: float
    ended: float | None
    node: str | None
    error: str | None = None
    message: str = ""


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a timeline: an event or an activity. `end` is None while the activity goes on. docs/timeline.md
    describes the kinds of entries and their `data`."""

    kind: str
    name: str
    start: float
    end: float | None
    data: dict[str, Any] = {}


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one attempt of a session.

    attempts: all attempts of the session.
    spans: the entries of the timeline, ordered by their start.
    left_out: the number of entries that were not stored because there were too many, by kind.
    now: the time of the reply."""

    session_id: str
    group_id: str
    attempt: int
    state: SessionState
    now: float
    attempts: tuple[AttemptView, ...]
    spans: tuple[SpanView, ...]
    left_out: dict[str, int] = {}


class SessionEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose agent runs elsewhere, and how the agent reaches its model.

    - `running`: True if the session accepts model calls now.
    - `key`: the session's credential, which is the agent's API key.
    - `base_urls`: the addresses at which the agent may reach the service, by network name. `base_url` is the first.
    - `variables`: environment variables that configure agent programs of all vendors for `base_url`.
    """

    session: SessionView
    running: bool
    key: str
    model: str
    base_url: str
    base_urls: dict[str, str]
    instruction: str
    variables: dict[str, str]


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions by group, newest group first. Send `after` with the next request to get the next page. `after` is None
    on the last page."""

    sessions: tuple[SessionView, ...]
    after: str | None


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's tokens and messages.

    - `prompt_delta`: the ids of the turn's prompt that come after the parent's prompt and output.
    - `logprobs`: one number for each of `output_ids`.
    - `messages`: the messages that the request added to the conversation of the turn's parent; all messages if there is
      no parent.
    - `reply`: the message that the client received. None if the client had closed the connection.
    - `prompt_pieces`, `output_pieces`: the text of each token of `prompt_delta` and `output_ids`, if requested and if
      the model's tokenizer is known. A character that several tokens encode is in the text of the last of them.
    """

    prompt_delta: list[int]
    output_ids: list[int]
    logprobs: list[float]
    messages: tuple[Message, ...]
    reply: Message | None
    prompt_pieces: list[str] | None = None
    output_pieces: list[str] | None = None


class TurnList(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of an attempt in the order in which they finished, including those of frozen models."""

    turns: tuple[TurnView, ...]


class SampleList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows."""

    samples: tuple[Sample, ...]


class ChatList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows as conversations."""

    rows: tuple[ChatRow, ...]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was kept from a sandbox. `path` is its absolute path in the sandbox, `size` its bytes, and `sha256`
    its SHA-256 (hex)."""

    path: str
    size: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not kept, or a pattern that gave no files, with the reason. The `path` "" stands for all files
    that were not read in time."""

    path: str
    reason: str


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts of one attempt. If the request named no attempt, `attempt` is None until a list of artifacts of the
    session is stored."""

    session_id: str
    attempt: int | None
    artifacts: tuple[Artifact, ...]
    left_out: tuple[LeftOut, ...]


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of the policy and of the frozen models."""

    engines: tuple[EngineStatus, ...]


class PolicyEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the policy. `version` is the last known version of its weights. `ok` is True if the engine accepts
    generations whenever the policy is not paused."""

    name: str
    version: int
    ok: bool


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the policy. `paused` is None while the policy generates. `cancelled` lists the groups that this
    request cancelled because the version at which they began was too old."""

    version: int
    paused: PolicyPause | None
    engines: tuple[PolicyEngine, ...]
    cancelled: tuple[str, ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the service.

    - `model`, `frozen`: the names of the policy and of the frozen models.
    - `sessions`: the number of sessions of the caller's tenant, by state. For an admin, the sessions of all tenants.
    - `cursor`: the position of the newest result of these sessions. A client can follow later results from there.
    - `failing`: background work that currently fails, in the service or on its nodes.
    - `may`: the roles that the caller may act in.
    """

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
    """A problem in the sessions of a run, found by a rule of docs/diagnosis.md.

    text: the problem, in one line.
    subject: what the finding is about, such as a tool, an engine or an error code; "" if it is about all sessions.
    numbers: `value` is the estimate. `at_least` is its conservative bound, which the rule compares with `threshold`.
        `sessions` or `groups` is the number of independent units. Other numbers depend on the rule.
    sessions: up to 5 sessions that show the problem, the clearest first.
    next: what to do next.
    """

    rule: str
    severity: Severity
    text: str
    subject: str = ""
    numbers: dict[str, float | str] = {}
    sessions: tuple[str, ...] = ()
    next: str


class RunSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's done sessions spent their time, in seconds summed over the sessions.

    - `queued`: waiting for an image, resources or a slot before the sandbox starts, not counting the time in the
      service's queue.
    - `waiting`: waiting for a slot after the sandbox was prepared.
    - `tools`: the part of the agent's run during which no model call is running.
    """

    queued: float = 0.0
    waiting: float = 0.0
    preparing: float = 0.0
    model: float = 0.0
    tools: float = 0.0
    grading: float = 0.0
    stopping: float = 0.0


class RunDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a run (docs/diagnosis.md): how much data was read, and the findings, most severe first.

    groups: the number of groups.
    sessions, not_done: how many sessions of these groups are done, and how many are not done.
    truncated: True if there are older groups that were not read.
    read_sessions, read_turns: how many sessions and model calls are in the sample. Turns and timelines were read only
        for this sample.
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

    sessions_done, sessions_failed, groups_done: sessions and groups that ended. Failed sessions are also counted as
        done.
    calls, calls_failed: model calls that were stored, and model calls that got an error reply.
    tokens_sampled: tokens of the stored calls.
    queued, running: sessions in the queue, and running sessions, at the time `at`. A session is running from its start
        to its end.
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
    """The points of the last hour, or since the service's start, oldest first. There is one every `step_seconds`, but a
    point may be late if the store failed. `now` is the service's time."""

    now: float
    step_seconds: float
    points: tuple[RatePoint, ...]


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the control API, without its text. It can submit and see groups of `tenant`. `expires` is None if the
    token does not expire, and `revoked` is None if it is not revoked."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None
    created: float
    expires: float | None
    revoked: float | None


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens, including expired and revoked ones, oldest first."""

    tokens: tuple[TokenView, ...]


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A new token. `text` is the token itself, which no other reply contains."""

    token: TokenView
    text: str
