"""The replies of the control API: msgspec structs that the server writes and the client reads.

Times are seconds since the epoch, durations are seconds. The request bodies are in spec.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState
from outrider.spec import Role
from outrider.trajectory import ChatRow, Sample, SessionResult, TokenMode, TurnTimings, Verdict, VersionSpan

PolicyPause = Literal["finish", "abort"]
"""What a pause of the policy does with generations in flight: let them end, or cut them off and continue them later."""


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A lane (a bounded stage of sessions). `served` and `waited_seconds` are totals since the start."""

    name: str
    size: int
    in_use: int
    waiting: int
    served: int
    waited_seconds: float


class ResourceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has for its sandboxes, and how much of it is reserved (`..._set_aside`): processors' worth of time,
    MiB of memory, and GPUs. `waiting` sessions ask for more than is free; `served` and `waited_seconds` are totals."""

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
    """Sandboxes that a node starts ahead of time: how many are `ready` now, how often a session has `taken` one, and
    how often it found none (`misses`)."""

    ready: int = 0
    taken: int = 0
    misses: int = 0


class StallStats(msgspec.Struct, frozen=True, kw_only=True):
    """How often a node's event loop stood still for longer than 50 ms: `total` and `longest` seconds. In `starved` of
    these stalls the process did not run, because the machine gave it no processor or it was stopped; in the others
    something in it blocked the loop.

    `held` is the longest processor time that the loop's own thread used during one; the rest of a stall is time in
    which other threads or processes had the interpreter or the processor.
    """

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    held: float = 0.0
    starved: int = 0


class FailingChore(msgspec.Struct, frozen=True, kw_only=True):
    """Background work that fails and is tried again: it has failed `count` times, first at `since` and last at `last`
    (seconds since the epoch), the last time with `error`. `node` is the node whose work it is, None for the service's
    own. It is listed until it succeeds."""

    name: str
    node: str | None = None
    since: float
    last: float
    count: int
    error: str


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node: how many sessions it runs, how many it can take, and its lanes and resources. One that is `drained` takes
    no new sessions. `failing` is the background work that fails there."""

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
    """What became of an image on a machine, which `node` got it for: its digest and the bytes of its files, or why it
    is not there."""

    node: str
    digest: str | None = None
    bytes: int | None = None
    error: ErrorRecord | None = None


class PulledImages(msgspec.Struct, frozen=True):
    """An image on every machine that runs sessions."""

    machines: tuple[PulledImage, ...]


class RefusedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node on another machine that was cut off, `at` that time, because it said what cannot be. `token` is the name
    of the one that it came with."""

    name: str
    token: str
    at: float
    reason: str


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that run sessions. `refused` are the latest that were cut off, the oldest first."""

    nodes: tuple[NodeStats, ...]
    refused: tuple[RefusedNode, ...] = ()


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as its pool sees it.

    The pool counts: generations `in_flight`, `sessions` that stay with the engine, `assigned_tokens` of their contexts,
    and `generated_tokens` and `failures` since the engine was added. `serves` is the name of a frozen model, None for
    the policy. `advice` says what its server should be started with to do better, where that was noticed. `suspect`
    describes the last invalid reply of an engine that is not trusted, and is None for one that is; `misbehaved` counts
    invalid replies.
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
    """A session. `result` is set once it is done, `last_error` once an attempt has failed."""

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


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group with its sessions in sample order. `cursor` is its place in the results once it is done; `samples` are
    its training rows if they were asked for; `submitted_by` is the name of the token that it was submitted with,
    `tenant` whose it is."""

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
    sessions: tuple[SessionView, ...]
    samples: tuple[Sample, ...] | None = None


class RegradedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was graded again, as session `regraded_as`: its old and its new verdict. One of them may be
    missing, as where grading failed with an `error`."""

    session_id: str
    regraded_as: str
    was: Verdict | None
    now: Verdict | None
    error: ErrorRecord | None


class Regraded(msgspec.Struct, frozen=True):
    """What `outrider regrade --json` writes."""

    sessions: tuple[RegradedSession, ...]


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list: how many of its `n` sessions are `done`, how many of these have an error, and the mean reward
    of those with a reward."""

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
    done: int
    errors: int
    mean_reward: float | None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, newest first."""

    groups: tuple[GroupSummary, ...]


class ResultsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Done groups in the order they finished. Ask again with `after=cursor` for the next ones."""

    groups: tuple[GroupView, ...]
    cursor: int


class ConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader of a tenant's results; of everybody's, where `tenant` is None. It has acknowledged the groups up
    to `cursor`, at most `lag` are left for it, and it was last heard of at `seen`."""

    name: str
    tenant: str | None = None
    cursor: int
    lag: int
    created: float
    seen: float


class ConsumerList(msgspec.Struct, frozen=True, kw_only=True):
    """The consumers of the caller's tenant, by name; for an admin those of admins, then those of each tenant."""

    consumers: tuple[ConsumerView, ...]


class CallbackView(msgspec.Struct, frozen=True, kw_only=True):
    """A callback that was given up after so many `tries`; `fault` is why the last one failed. `url` is without what may
    be secret: the user and the query. The group was done at `since`."""

    group_id: str
    url: str
    tries: int
    since: float
    given_up: float
    fault: str


class CallbackList(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks that were given up, the newest first."""

    callbacks: tuple[CallbackView, ...]


class Redelivered(msgspec.Struct, frozen=True, kw_only=True):
    """How many callbacks are tried anew."""

    callbacks: int


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, or with `dry_run` would be: `groups`, their `sessions`, and `bytes` of their tasks, turns,
    results and artifacts.

    Kept, although they are old enough: groups that are `unacknowledged` by a consumer, and those with an `undelivered`
    callback. `stored_bytes` is what all finished groups take now, images included. If there is `more` to remove, ask
    again.
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
    """One model call as text: `context` is what this turn added to the prompt, `sampled` is the model's output.

    `model` is the frozen model that was called, None for the policy; `index` and `parent` count the turns of one model.
    `kind`, `label` and `depth` describe the turn's branch; `step`, `altered` and `ignored` are those of
    `trajectory.Turn`.
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


class TurnList(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of an attempt in the order they finished, those of frozen models among them."""

    turns: tuple[TurnView, ...]


class SampleList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows."""

    samples: tuple[Sample, ...]


class ChatList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows as conversations."""

    rows: tuple[ChatRow, ...]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a sandbox that was kept: its absolute path there, its size in bytes, and their SHA-256 (hex)."""

    path: str
    size: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A path or pattern that the task names as an artifact, but that was not kept, and why."""

    path: str
    reason: str


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts of an attempt; `attempt` is None if no attempt of the session has ended its run."""

    session_id: str
    attempt: int | None
    artifacts: tuple[Artifact, ...]
    left_out: tuple[LeftOut, ...]


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of the policy and of the frozen models."""

    engines: tuple[EngineStatus, ...]


class PolicyEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the policy: the version that it serves, as last known, and whether it takes generations (once the
    policy is not paused)."""

    name: str
    version: int
    ok: bool


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that the engines serve. `paused` is None while it generates. `cancelled` are the groups that this
    request cancelled for their age."""

    version: int
    paused: PolicyPause | None
    engines: tuple[PolicyEngine, ...]
    cancelled: tuple[str, ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the service. `model` is the policy's name, `frozen` those of the models beside it. `sessions`
    counts the caller's tenant's sessions by state, and an admin's call everybody's; `cursor` is that of the newest
    result among the same, from which the results to come can be followed. `failing` is the
    background work that fails now, that of the nodes included."""

    version: str
    model: str
    frozen: tuple[str, ...] = ()
    sessions: dict[str, int]
    cursor: int
    nodes: tuple[NodeStats, ...]
    engines: tuple[EngineStatus, ...]
    policy: PolicyStatus = PolicyStatus(version=0, paused=None, engines=())
    failing: tuple[FailingChore, ...] = ()


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the control API, without its text. It submits and sees the groups of `tenant`. `expires` and `revoked`
    are None where it does not, or is not."""

    name: str
    role: Role
    tenant: str
    max_queued: int | None
    created: float
    expires: float | None
    revoked: float | None


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """Every token, also expired and revoked ones, oldest first."""

    tokens: tuple[TokenView, ...]


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was made, and its text, which is shown this once."""

    token: TokenView
    text: str
