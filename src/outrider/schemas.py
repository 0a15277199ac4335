"""What the control API answers: the shapes that the server writes and the client reads.

Times are seconds since the epoch, durations seconds. The request shapes are in spec.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState
from outrider.trajectory import Sample, SessionResult, TokenMode, TurnTimings, VersionSpan


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """`waited_seconds` and `served` are totals since the start."""

    name: str
    size: int
    in_use: int
    waiting: int
    served: int
    waited_seconds: float


class ResourceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has for its sandboxes, and what of it is set aside for those that ask: processors' worth of time and
    MiB of memory. `waiting` sessions ask for more than is left; `waited_seconds` and `served` are totals."""

    cpus: float
    cpus_set_aside: float = 0.0
    memory_mb: int
    memory_mb_set_aside: int = 0
    waiting: int = 0
    served: int = 0
    waited_seconds: float = 0.0


class WarmStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes that a node has made ahead: how many are `ready` now, how often one was `taken`, and how often none was
    there to be taken."""

    ready: int = 0
    taken: int = 0
    misses: int = 0


class StallStats(msgspec.Struct, frozen=True, kw_only=True):
    """How often a node's event loop stood still for longer than 50 ms, for how long in all and at the longest, in
    seconds. `held` is the longest that the loop's own thread was at work meanwhile; the rest is time in which others
    had the interpreter or the processor."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    held: float = 0.0


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the scheduler and the status page see it."""

    name: str
    sessions: int
    capacity: int
    lanes: tuple[LaneStats, ...]
    resources: ResourceStats
    warm: WarmStats = WarmStats()
    stalls: StallStats = StallStats()


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as its pool sees it. Counts are of this pool's making: `in_flight` generations, `sessions`
    that keep to it, `assigned_tokens` of their context, `generated_tokens` and `failures` since it was added.

    `suspect` is what it sent last that no engine may, None while it is trusted; `misbehaved` counts such replies.
    """

    name: str
    kind: str
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
    version: int
    model: str | None
    context_tokens: int | None


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it stands. `result` is there once it is done, `last_error` once an attempt has failed."""

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
    """A group and its sessions in sample order. `cursor` is its place in the results once it is done;
    `samples` are its training rows when they were asked for."""

    id: str
    state: GroupState
    cancelled: bool
    n: int
    priority: int
    created: float
    finished: float | None
    cursor: int | None
    labels: dict[str, str]
    sessions: tuple[SessionView, ...]
    samples: tuple[Sample, ...] | None = None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list: how many of its `n` sessions are `done`, how many of these with an error, and the mean reward
    of those that have one."""

    id: str
    state: GroupState
    cancelled: bool
    n: int
    priority: int
    created: float
    finished: float | None
    cursor: int | None
    labels: dict[str, str]
    done: int
    errors: int
    mean_reward: float | None


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, newest first."""

    groups: tuple[GroupSummary, ...]


class ResultsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Done groups in the order they finished. Ask again with `after=cursor` for what comes next."""

    groups: tuple[GroupView, ...]
    cursor: int


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the service's append-only log."""

    cursor: int
    at: float
    kind: str
    group_id: str
    session_id: str | None
    data: dict[str, Any]


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, readable: `context` is the text of the ids this turn added to its prompt, `sampled` the
    text of what the model said. `kind`, `label` and `depth` are those of the branch that it is for. `altered` and
    `ignored` are the turn's (`trajectory.Turn`)."""

    index: int
    parent: int | None
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
    """An attempt's turns in the order they finished."""

    turns: tuple[TurnView, ...]


class SampleList(msgspec.Struct, frozen=True, kw_only=True):
    """A session's training rows."""

    samples: tuple[Sample, ...]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file that an agent left and that was kept: its absolute path in the sandbox, its bytes, their SHA-256 (hex)."""

    path: str
    size: int
    sha256: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A path, or a pattern of the task, that was not kept, and why."""

    path: str
    reason: str


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt of a session left of what its task wants kept; `attempt` is None when none has ended its run."""

    session_id: str
    attempt: int | None
    artifacts: tuple[Artifact, ...]
    left_out: tuple[LeftOut, ...]


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's engines."""

    engines: tuple[EngineStatus, ...]


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole service at a glance. `sessions` counts them by state."""

    version: str
    model: str
    sessions: dict[str, int]
    nodes: tuple[NodeStats, ...]
    engines: tuple[EngineStatus, ...]
