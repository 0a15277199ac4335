"""What a rollout leaves behind: turns, branches, verdicts and training samples.

Token ids are packed little-endian int32 (`pack_ids`), log-probabilities packed float64 (natural log, of the
sampled token, exactly the numbers the engine gave). Nothing here samples, renders or stores.
Invariant: a turn's prompt is its parent's prompt + its parent's output + its own `prompt_delta`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.errors import ErrorRecord
from outrider.lifecycle import StopReason
from outrider.messages import Message

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float64]


def pack_ids(ids: Iterable[int] | Ids) -> bytes:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, dtype="<i4")


def pack_logprobs(logprobs: Iterable[float] | Logprobs) -> bytes:
    return np.asarray(logprobs if isinstance(logprobs, np.ndarray) else list(logprobs), dtype="<f8").tobytes()


def unpack_logprobs(packed: bytes) -> Logprobs:
    return np.frombuffer(packed, dtype="<f8")


class JoinKind(StrEnum):
    """How a request joined its session's token tree."""

    ROOT = "root"
    APPEND = "append"
    FORK = "fork"
    RETRY = "retry"


class ForkCause(StrEnum):
    """Why a request could not simply append."""

    SIBLING = "sibling"  # the parent already has a different continuation; the parent's ids are kept
    HISTORY_REWRITTEN = "history_rewritten"  # the client changed or dropped messages the model saw or sampled
    TOOLS_CHANGED = "tools_changed"  # a recorded history goes on with other tools
    SYSTEM_CHANGED = "system_changed"  # a recorded history goes on with another system prompt
    TOOLS_AND_SYSTEM_CHANGED = "tools_and_system_changed"  # both, as when another agent takes over
    BRIDGE_REFUSED = "bridge_refused"  # the renderer cannot prove that the new messages only append
    TEMPLATE_HISTORY = "template_history"  # history="template": the template drops earlier reasoning
    CAPTURE_DRIFT = "capture_drift"  # capture mode: the engine's own prompt does not extend the record


HEAD_CHANGES = frozenset({ForkCause.TOOLS_CHANGED, ForkCause.SYSTEM_CHANGED, ForkCause.TOOLS_AND_SYSTEM_CHANGED})
"""What stands before the history is another; the history is a recorded one and goes on."""


class BranchKind(StrEnum):
    """What a branch is for; `tokens/branches/classify.py` tells them apart."""

    MAIN = "main"  # the conversation that does the task's work
    SUBAGENT = "subagent"  # a conversation that another one started
    COMPACTION = "compaction"  # writes a summary of a history, or goes on from one
    AUXILIARY = "auxiliary"  # a side call, such as for a title
    RETRY = "retry"  # an answer to a request that was asked again, and not gone on with
    ABORTED = "aborted"  # its last turn was cut off by the client: the agent never saw the tokens


class BranchPolicy(StrEnum):
    TRAIN = "train"
    MASK = "mask"
    DROP = "drop"


class TokenMode(StrEnum):
    """Where a turn's ids come from."""

    TOKENS = "tokens"  # the engine was given exactly the recorded ids
    CAPTURE = "capture"  # the engine was given text and reported its ids
    TEXT = "text"  # no ids at all: never trainable


class LogprobKind(StrEnum):
    RAW = "raw"  # log-softmax of the logits, before temperature and truncation
    SAMPLING = "sampling"  # of the distribution that was sampled from
    NONE = "none"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by policy `version`."""

    version: int
    start: int
    end: int


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall clock, seconds since the epoch; `first_token` is None when no token came."""

    received: float
    first_token: float | None
    finished: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `index` counts a session attempt's turns in the order they were committed.

    `conversation` is 0 for the session's first conversation; those that began independently of it, or with other tools
    or another system prompt, count up. `forked_from` is, where one of those two changed, the turn whose history the
    request goes on from. `tools` tells the tools of requests apart, empty where there were none. `agent_id`,
    `parent_agent_id` and `purpose` are what the client said about its caller.
    `sampling` is all that the engine was told about sampling, and whether the model was to think; `altered` says that
    tokens were drawn from another distribution than temperature and truncation make of the logits (penalties, a bias, a
    minimum length, a form that the reply was held to). `ignored` names what the client asked for that had no effect.
    `messages` are what the request added to its parent's conversation (all of them without a parent), `reply` is
    what the client was told, None when it had left.
    """

    index: int
    parent: int | None
    conversation: int = 0
    tools: bytes = b""
    agent_id: str | None = None
    parent_agent_id: str | None = None
    purpose: str | None = None
    join: JoinKind
    cause: ForkCause | None = None
    forked_from: int | None = None
    prompt_length: int
    prompt_delta: bytes
    output_ids: bytes
    logprobs: bytes
    logprob_kind: LogprobKind
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    stop_match: int | str | None = None
    mode: TokenMode = TokenMode.TOKENS
    dialect: str
    engine: str
    sampling: dict[str, Any]
    altered: bool = False
    ignored: tuple[str, ...] = ()
    cached_tokens: int | None = None
    drift_tokens: int = 0
    messages: tuple[Message, ...] = ()
    reply: Message | None = None
    malformed_calls: int = 0
    timings: TurnTimings


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluator's finding. `reward` is finite; `metrics` are named finite numbers."""

    reward: float
    metrics: dict[str, float] = {}
    reason: str | None = None


class SampleImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image among a row's ids. `turn` is the turn that added it, `message` the position of its message, from 0, in
    the conversation of the row's turns, replies counted.

    `digest` is the SHA-256 (hex) of its `size` bytes, which the service keeps. An image that the client sent by
    address has that as `url`; its digest is then the address's, and its bytes are nowhere.
    """

    turn: int
    message: int
    digest: str
    media_type: str
    size: int
    url: str | None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training row: `ids`, `loss_mask`, `logprobs` and `versions` have equal length.

    Positions with mask 0 (context, and sampled tokens that another sample trains on) have log-probability 0.0
    and version -1. `prompt_length` is the number of ids before the first sampled one. `reward` is None when
    the session has no verdict, or its task lets no branch of this kind train: such a row must not be trained on.
    `parent` is the turn that the branch forked from or was started by, None where there is none; `depth` is 0 for the
    main branches and one more than the parent's for others; `label` says more than `kind`, as in "title". `altered`
    are those of its turns whose tokens no softmax of logits over a temperature explains (`Turn.altered`). `images` are
    in the order in which the ids show them, one that is shown twice twice.
    """

    group_id: str
    session_id: str
    attempt: int
    sample_index: int
    row: int
    rows: int
    kind: BranchKind
    parent: int | None = None
    depth: int = 0
    label: str = ""
    turns: tuple[int, ...]
    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_length: int
    reward: float | None
    metrics: dict[str, float] = {}
    mode: TokenMode
    logprob_kind: LogprobKind
    stop_reason: StopReason
    min_version: int
    max_version: int
    labels: dict[str, str] = {}
    images: tuple[SampleImage, ...] = ()
    altered: tuple[int, ...] = ()


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session's sampled tokens went: sampled = trained + masked + dropped."""

    sampled: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    drift: int = 0


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a session spent in each stage; waiting for a lane is apart from working in it. `stop` is also the keeping
    of artifacts."""

    queued: float = 0.0
    init: float = 0.0
    ready: float = 0.0
    run: float = 0.0
    eval_wait: float = 0.0
    eval: float = 0.0
    stop: float = 0.0


class HarnessExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent program ended that exited with another `code` than 0 and was graded all the same, and the end of
    its output."""

    code: int
    log_tail: str


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one session ended, once and for all. `policy` is the task's for its branches; a kind that is not in it has
    the default one. `harness_exit` is there where an agent program failed and was graded. `ignored` counts the turns in
    which a client asked for something that had no effect, by its name."""

    session_id: str
    group_id: str
    sample_index: int
    attempt: int
    stop_reason: StopReason
    verdict: Verdict | None = None
    error: ErrorRecord | None = None
    harness_exit: HarnessExit | None = None
    turns: int = 0
    forks: dict[str, int] = {}
    tokens: TokenCounts = TokenCounts()
    seconds: StageSeconds = StageSeconds()
    samples: int = 0
    policy: dict[BranchKind, BranchPolicy] = {}
    ignored: dict[str, int] = {}
    labels: dict[str, str] = {}
