"""The records of a rollout: turns, branch kinds, verdicts, training samples and session results.

Token ids are packed little-endian int32 (`pack_ids`). Log-probabilities are packed float64: the natural log of the
sampled token's probability, exactly as the engine reported it. The module does not sample, render or store. Invariant:
a turn's prompt is its parent's prompt, its parent's output, then its own `prompt_delta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import StopReason
from outrider.messages import Message, MessageOutline, ToolSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The types are written as texts, and the functions below import numpy when they are called, because the import takes a
# fifth of a second. Clients and the command line use the records of this module without numpy.
Ids: TypeAlias = "npt.NDArray[np.int32]"
Logprobs: TypeAlias = "npt.NDArray[np.float64]"


def pack_ids(ids: Iterable[int] | Ids) -> bytes:
    import numpy as np

    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> Ids:
    import numpy as np

    return np.frombuffer(packed, dtype="<i4")


def pack_logprobs(logprobs: Iterable[float] | Logprobs) -> bytes:
    import numpy as np

    return np.asarray(logprobs if isinstance(logprobs, np.ndarray) else list(logprobs), dtype="<f8").tobytes()


def unpack_logprobs(packed: bytes) -> Logprobs:
    import numpy as np

    return np.frombuffer(packed, dtype="<f8")


class JoinKind(StrEnum):
    """The way in which a request joined its session's token tree (`tokens/tree/tree.py`)."""

    ROOT = "root"  # shares no history with earlier requests
    APPEND = "append"  # a recorded conversation plus new messages
    FORK = "fork"  # shares a history, but could not append to it
    RETRY = "retry"  # the same request as before


class ForkCause(StrEnum):
    """The reason why a request that shares a history could not append to it."""

    SIBLING = "sibling"  # the parent already has a different continuation; the parent's ids are kept
    HISTORY_REWRITTEN = "history_rewritten"  # the client changed or dropped messages the model saw or sampled
    TOOLS_CHANGED = "tools_changed"  # a recorded history continues with other tools
    SYSTEM_CHANGED = "system_changed"  # a recorded history continues with another system prompt
    TOOLS_AND_SYSTEM_CHANGED = "tools_and_system_changed"  # both, for example because another agent takes over
    BRIDGE_REFUSED = "bridge_refused"  # the renderer cannot prove that the new messages only append
    TEMPLATE_HISTORY = "template_history"  # history="template": the template drops earlier reasoning
    CAPTURE_DRIFT = "capture_drift"  # capture mode: the prompt that the engine reports does not extend the record


HEAD_CHANGES = frozenset({ForkCause.TOOLS_CHANGED, ForkCause.SYSTEM_CHANGED, ForkCause.TOOLS_AND_SYSTEM_CHANGED})
"""Causes of a fork in which a recorded history continues with other tools or another system prompt."""


class BranchKind(StrEnum):
    """The purpose of a branch (`tokens/branches/classify.py` decides)."""

    MAIN = "main"  # the conversation that does the task's work
    SUBAGENT = "subagent"  # a conversation that another conversation started
    COMPACTION = "compaction"  # writes a summary of a history, or continues from a summary
    UNSURE = "unsure"  # one question whose answer no later call shows: work of the task, or a side call
    AUXILIARY = "auxiliary"  # a call apart from the task's work, such as for a title
    RETRY = "retry"  # a reply that the agent did not use, because it sent the request again and used the other reply
    ABORTED = "aborted"  # a branch whose last turn the client cut off: the agent never saw the tokens


class BranchPolicy(StrEnum):
    """The treatment of the branches of a kind."""

    TRAIN = "train"
    MASK = "mask"  # delivered as a row in which nothing trains
    DROP = "drop"  # not delivered


class TokenMode(StrEnum):
    """The source of a turn's ids."""

    TOKENS = "tokens"  # the engine was given exactly the recorded ids
    CAPTURE = "capture"  # the engine was given text and reported its ids
    TEXT = "text"  # no ids are available: never trained


class LogprobKind(StrEnum):
    """The distribution to which log-probabilities refer."""

    RAW = "raw"  # log-softmax of the logits, before temperature and truncation
    SAMPLING = "sampling"  # the distribution that was sampled from
    NONE = "none"  # the engine reported none


class FinishReason(StrEnum):
    """The reason why a turn's generation ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # the token limit
    ABORT = "abort"  # the client hung up, or the run ended


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class ImageSpan(msgspec.Struct, frozen=True):
    """The place of an image in a prompt: `length` placeholder ids from position `start` on. `digest` is the SHA-256
    (hex) of the image's bytes, and `grid` has the numbers of its patches in time, vertically and horizontally."""

    digest: str
    start: int
    length: int
    grid: tuple[int, int, int]


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a turn by the wall clock, in seconds since the epoch. `joined` is the time at which the prompt's place
    in the token tree was known; None in turns of earlier versions. `first_token` is None if no token was sampled."""

    received: float
    joined: float | None = None
    first_token: float | None
    finished: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's report of a call. The report is only stored and never trained on. `timing` are times in seconds since
    the epoch, and durations in milliseconds where the name ends with `_ms`.

    output_ids, logprobs: the sampled ids (packed int32) and their log-probabilities (packed float64) of a reply without
        the ids of its prompt. Such a turn has the mode TEXT and no ids of its own, because the ids of the reply alone
        do not show what the model has read.
    """

    worker_id: str | None = None
    node_id: str | int | None = None
    gpu_id: str | int | None = None
    rank_info: Any = None
    timing: dict[str, float | None] = {}
    output_ids: bytes = b""
    logprobs: bytes = b""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `index` counts a session attempt's turns in the order of their commits.

    parent: the turn whose prompt and output this turn's prompt begins with.
    step: the step of the task in which the turn was made, from 0.
    conversation: 0 for the session's first conversation; 1, 2, ... for conversations that began independently of
        earlier ones, or with other tools or another system prompt.
    tools: a digest that distinguishes the tools of requests, empty without tools.
    agent_id, parent_agent_id, purpose: the client's description of the caller.
    declared, declared_label: the kind and the label of the turn's branch, if the client declares them.
    forked_from: the turn whose request shares the longest history with this one; if the tools or the system prompt
        changed, the turn whose history it continues.
    prompt_delta, output_ids: packed int32. logprobs: packed float64, one per output id.
    sampling: the sampling parameters that the engine was given, and whether the model was to think.
    altered: true if more than temperature and truncation shaped the distribution of the sampled tokens (penalties, a
        bias, a minimum length, a required form of the reply).
    ignored: names of the request's fields and tools that had no effect.
    messages: the messages that the request added to the conversation of the turn's parent; if the turn has no parent,
        all messages.
    images: the places of the images of `messages` in the turn's prompt, if the engine was given them with the ids.
    reply: the message that the client was given; None if the client had hung up.
    tool_specs: the tools of a turn without a parent; other turns have the tools of the turn that their conversation
        begins with.
    report: what the worker that made the reply has reported of the call; None for engines without such workers.
    """

    index: int
    parent: int | None
    step: int = 0
    conversation: int = 0
    tools: bytes = b""
    agent_id: str | None = None
    parent_agent_id: str | None = None
    purpose: str | None = None
    declared: BranchKind | None = None
    declared_label: str = ""
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
    images: tuple[ImageSpan, ...] = ()
    reply: Message | None = None
    tool_specs: tuple[ToolSpec, ...] = ()
    malformed_calls: int = 0
    timings: TurnTimings
    report: WorkerReport | None = None


def prompt_of(path: Sequence[Turn]) -> bytes:
    """Return the packed ids of the prompt of the path's last turn."""
    before = [ids for turn in path[:-1] for ids in (turn.prompt_delta, turn.output_ids)]
    return b"".join((*before, path[-1].prompt_delta))


class TurnOutline(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a stored `Turn` from which the rows of a session are made if the session is one conversation. Half
    of a stored turn is text, and reading the outline takes half the time of reading the whole turn."""

    index: int
    parent: int | None
    declared: BranchKind | None = None
    prompt_length: int
    prompt_delta: bytes
    output_ids: bytes
    logprobs: bytes
    logprob_kind: LogprobKind
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    mode: TokenMode = TokenMode.TOKENS
    altered: bool = False
    messages: tuple[MessageOutline, ...] = ()
    images: tuple[ImageSpan, ...] = ()


TurnType = TypeVar("TurnType", Turn, TurnOutline, "Turn | TurnOutline")


def path_to(turn: TurnType, turns: Sequence[TurnType]) -> list[TurnType]:
    """Return the turns from the root to `turn`. `turns[i].index` must be `i`."""
    path = [turn]
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    return path[::-1]


def without_gaps(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns, numbered from 0 in the order of their index. `turns` must contain the parent of each turn. A
    `forked_from` that names a turn outside of `turns` becomes None."""
    places = {turn.index: place for place, turn in enumerate(turns)}
    return [
        msgspec.structs.replace(
            turn,
            index=places[turn.index],
            parent=None if turn.parent is None else places[turn.parent],
            forked_from=None if turn.forked_from is None else places.get(turn.forked_from),
        )
        for turn in turns
    ]


class GradedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as evaluators see it. `index`, `parent`, `messages` and `reply` are as in `Turn`; `kind`, `label` and
    `depth` describe its branch. `row` is the number of the training row that trains the turn's tokens, or None if no
    row trains them."""

    index: int
    parent: int | None
    kind: BranchKind
    label: str
    depth: int
    row: int | None
    messages: tuple[Message, ...]
    reply: Message | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluator's result. All its numbers are finite.

    reward, metrics: of the session as a whole.
    turns: rewards of single turns by their index (process rewards), in addition to `reward`.
    rows: rewards of single training rows by their number (`Sample.row`), in place of `reward`.
    """

    reward: float
    metrics: dict[str, float] = {}
    reason: str | None = None
    turns: dict[int, float] = {}
    rows: dict[int, float] = {}


class SampleImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image among a row's ids. `turn` is the turn that added it; `message` is the position of its message in the
    conversation of the row's turns, from 0, replies included.

    `digest` is the SHA-256 (hex) of its `size` bytes, stored by the service. For an image that the client sent by
    address, `url` is the address, `digest` is the digest of the address, and no bytes are stored.

    `span` has the positions [start, end) of the image's placeholders in the row's ids, and `grid` the numbers of its
    patches in time, vertically and horizontally. Both are None if the engine made the ids of the prompt itself.
    """

    turn: int
    message: int
    digest: str
    media_type: str
    size: int
    url: str | None
    span: tuple[int, int] | None = None
    grid: tuple[int, int, int] | None = None


class SampleFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a training row, except its tokens: the common part of `Sample` and `JsonSample`.

    row, rows: the number of this row, from 0, and the number of the session's rows.
    prompt_length: ids before the first sampled one.
    reward: the verdict's reward for this row, or else for the session. None if the session has no verdict, or if the
        task does not train rows of this kind (`BranchPolicy`): such a row must not be trained on.
    turn_spans: for each of `turns`, the positions [start, end) of its sampled tokens in `ids`.
    turn_rewards: for each of `turns`, the verdict's reward of the turn. None without such a reward, or if this row does
        not train the turn's tokens: so each turn's reward is in one row at most.
    parent: the turn that the branch forked from or was started by, None if there is none.
    depth: 0 in the main conversation, one more for each sub-agent, side call or replaced history on the way.
    label: a more specific name than `kind`, such as "title".
    altered: the turns whose sampling was shaped by more than temperature and truncation (`Turn.altered`).
    images: in the order in which the ids show them; an image shown twice is listed twice.
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
    turn_spans: tuple[tuple[int, int], ...] = ()
    turn_rewards: tuple[float | None, ...] = ()


class Sample(SampleFields, frozen=True, kw_only=True, dict=True):
    """One training row. `ids`, `loss_mask`, `logprobs` and `versions` are read-only numpy arrays of equal length.

    The arrays are made when they are first used, from the short form in which a row is stored and sent:

    packed_ids: all ids of the row, packed int32.
    trained: the positions [start, end) of the ids that train, in order and without overlap.
    packed_logprobs: the log-probabilities of the ids that train, packed float64.
    version_spans: the policy versions of the ids that train, by their positions in the row.
    """

    packed_ids: bytes
    trained: tuple[tuple[int, int], ...]
    packed_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.packed_ids) // 4

    @property
    def trained_tokens(self) -> int:
        """The number of ids that train."""
        return sum(end - start for start, end in self.trained)

    @cached_property
    def ids(self) -> Ids:
        """The token ids, as int32."""
        return unpack_ids(self.packed_ids)

    @cached_property
    def loss_mask(self) -> Ids:
        """1 for the ids that train, 0 for the context and for sampled ids that this row does not train, as int32."""
        import numpy as np

        mask = np.zeros(len(self), dtype=np.int32)
        for start, end in self.trained:
            mask[start:end] = 1
        mask.flags.writeable = False
        return mask

    @cached_property
    def logprobs(self) -> Logprobs:
        """The log-probabilities, as float64; 0.0 where the mask is 0."""
        import numpy as np

        found, given = np.zeros(len(self)), unpack_logprobs(self.packed_logprobs)
        at = 0
        for start, end in self.trained:
            found[start:end] = given[at : at + end - start]
            at += end - start
        found.flags.writeable = False
        return found

    @cached_property
    def versions(self) -> Ids:
        """The policy versions, as int32; -1 where the mask is 0."""
        import numpy as np

        found = np.full(len(self), -1, dtype=np.int32)
        for span in self.version_spans:
            found[span.start : span.end] = span.version
        found.flags.writeable = False
        return found

    def token_rewards(self, length: int | None = None) -> list[float]:
        """Return the rewards at their positions, one number for each of the first `length` ids (default: all). A turn's
        reward is at the last of its sampled tokens, and the row's own reward at the last token that trains.

        Rewards of turns that end after position `length` are left out. All numbers are zero for a row without a reward,
        and if none of the ids trains.
        """
        count = len(self) if length is None else min(length, len(self))
        placed = [0.0] * count
        last = max((min(end, count) for start, end in self.trained if start < count), default=0)
        if self.reward is None or last == 0:
            return placed
        for (_, end), reward in zip(self.turn_spans, self.turn_rewards, strict=True):
            if reward is not None and end <= count:
                placed[end - 1] += reward
        placed[last - 1] += self.reward
        return placed


class JsonSample(SampleFields, frozen=True, kw_only=True):
    """A training row in JSON: `ids`, `loss_mask`, `logprobs` and `versions` are lists of equal length. Where the mask
    is 0, the log-probability is 0.0 and the version -1."""

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]

    def sample(self) -> Sample:
        """Return the row as a `Sample`. Raises ValueError for lists of different lengths."""
        trained: list[tuple[int, int]] = []
        spans: list[VersionSpan] = []
        logprobs: list[float] = []
        columns = zip(self.ids, self.loss_mask, self.logprobs, self.versions, strict=True)
        for at, (_, mask, logprob, version) in enumerate(columns):
            if not mask:
                continue
            logprobs.append(logprob)
            if trained and trained[-1][1] == at:
                trained[-1] = trained[-1][0], at + 1
            else:
                trained.append((at, at + 1))
            if spans and (spans[-1].end, spans[-1].version) == (at, version):
                spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
            else:
                spans.append(VersionSpan(version, at, at + 1))
        return Sample(
            **{name: getattr(self, name) for name in SampleFields.__struct_fields__},
            packed_ids=pack_ids(self.ids),
            trained=tuple(trained),
            packed_logprobs=pack_logprobs(logprobs),
            version_spans=tuple(spans),
        )


def sample_json(sample: Sample) -> bytes:
    """Return the JSON of a sample, in the form of `JsonSample`."""
    import orjson

    row = {name: getattr(sample, name) for name in SampleFields.__struct_fields__}
    row |= {"ids": sample.ids, "loss_mask": sample.loss_mask, "logprobs": sample.logprobs, "versions": sample.versions}
    return orjson.dumps(row, msgspec.to_builtins, orjson.OPT_SERIALIZE_NUMPY)


class ChatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A training row as a conversation, in the form of Chat Completions that chat templates take.

    messages: each reply that the model sampled has a `weight`, 1 if the row trains it, else 0. Arguments of tool calls
        are objects if they are JSON objects. In a row with images, each `content` is a list of parts, and an image's
        part has its `path` in an export, or its `url`.
    tools: None if the service did not store them, as in versions before chat rows.
    The other fields are those of the Sample.
    """

    messages: list[dict[str, Any]]
    tools: list[ToolSpec] | None
    group_id: str
    session_id: str
    sample_index: int
    row: int
    kind: BranchKind
    label: str
    reward: float | None
    metrics: dict[str, float]
    stop_reason: StopReason
    labels: dict[str, str]
    images: tuple[SampleImage, ...]


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A session's sampled tokens: sampled = trained + masked + dropped. `unsure` counts the sampled tokens of turns of
    the kind `unsure`. `drift` counts ids for which the engine reported other ids than were recorded."""

    sampled: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    unsure: int = 0
    drift: int = 0


class FrozenUse(msgspec.Struct, frozen=True, kw_only=True):
    """A session's use of one frozen model: its turns and sampled tokens, none of which train."""

    turns: int = 0
    tokens: int = 0


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a session spent in each stage. Waiting for a lane is counted apart from work in the lane; `stop`
    includes collecting artifacts."""

    queued: float = 0.0
    init: float = 0.0
    ready: float = 0.0
    run: float = 0.0
    eval_wait: float = 0.0
    eval: float = 0.0
    stop: float = 0.0


class HarnessExit(msgspec.Struct, frozen=True, kw_only=True):
    """The non-zero exit `code` of an agent program whose work went to grading all the same, and the end of the
    program's output."""

    code: int
    log_tail: str


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session; written once, never changed.

    policy: the task's policy for its branches; a missing kind has the default.
    harness_exit: set if the agent program failed and its work went to grading all the same.
    forks: the number of forks by cause.
    ignored: for each request field or tool that had no effect, by name, the number of turns with it.
    failed_calls: for each kind of model call that was answered with an error (`code: field`, or `code: METHOD path` if
        nothing is served there), the number of calls. Calls before a restart of the service are not counted.
    frozen: by name, the use of each frozen model; `turns`, `tokens`, `forks` and `ignored` are the policy's.
    model_seconds: the time during which at least one model call of the session was under way, in seconds.
    artifact_bytes: the size of the artifacts that were kept.
    answer: the agent's answer, if the harness reports one.
    carried: true if there is an artifact with the files that were carried to the grading.
    run_reason: if the grading failed, the reason why the agent's run had ended.
    regrades: the session whose run was graded again; that session's turns are stored as this session's, too.
    """

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
    model_seconds: float = 0.0
    samples: int = 0
    frozen: dict[str, FrozenUse] = {}
    policy: dict[BranchKind, BranchPolicy] = {}
    ignored: dict[str, int] = {}
    failed_calls: dict[str, int] = {}
    labels: dict[str, str] = {}
    artifact_bytes: int = 0
    answer: str | None = None
    carried: bool = False
    run_reason: StopReason | None = None
    regrades: str | None = None

    @property
    def run_ending(self) -> StopReason | None:
        """The reason why the agent's run ended. None if the grading of the run never began, for example because the run
        failed or was cancelled. Such a run has no outcome to grade."""
        return self.run_reason if self.verdict is None else self.stop_reason
