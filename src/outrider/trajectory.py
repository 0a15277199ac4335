"""The records of a rollout: turns, branch kinds, verdicts, training samples and session results.

Token ids are packed little-endian int32 (`pack_ids`). Log-probabilities are packed float64: the natural logarithm of
the sampled token's probability, exactly as the engine reported it. Invariant: a turn's prompt is its parent's prompt,
then its parent's output, then its own `prompt_delta`.
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

# numpy is imported only inside functions, and types are written as strings, because importing numpy takes a fifth of a
# second. Clients use the records of this module without numpy.
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
    """How a request was added to its session's token tree (`tokens/tree/tree.py`)."""

    ROOT = "root"  # shares no history with earlier requests
    APPEND = "append"  # a recorded conversation plus new messages
    FORK = "fork"  # shares history with an earlier request, but could not be appended to it
    RETRY = "retry"  # the same request as before


class ForkCause(StrEnum):
    """Why a request was not appended to an earlier request, although both share history."""

    SIBLING = "sibling"  # the parent already has a different continuation; the parent's ids are kept
    HISTORY_REWRITTEN = "history_rewritten"  # the client changed or dropped messages that the model has read or sampled
    TOOLS_CHANGED = "tools_changed"  # a recorded history continues with other tools
    SYSTEM_CHANGED = "system_changed"  # a recorded history continues with another system prompt
    TOOLS_AND_SYSTEM_CHANGED = "tools_and_system_changed"  # both changed, as when another agent takes over
    BRIDGE_REFUSED = "bridge_refused"  # the renderer cannot prove that the new messages only add ids at the end
    TEMPLATE_HISTORY = "template_history"  # history="template": the template drops earlier reasoning
    CAPTURE_DRIFT = "capture_drift"  # capture mode: the reported prompt ids do not begin with the recorded ids


HEAD_CHANGES = frozenset({ForkCause.TOOLS_CHANGED, ForkCause.SYSTEM_CHANGED, ForkCause.TOOLS_AND_SYSTEM_CHANGED})
"""Causes of forks in which a recorded history continues with other tools or another system prompt."""


class BranchKind(StrEnum):
    """The purpose of a branch, as determined by `tokens/branches/classify.py`."""

    MAIN = "main"  # the conversation that does the task's work
    SUBAGENT = "subagent"  # a conversation that another conversation started
    COMPACTION = "compaction"  # writes a summary of a history, or continues from a summary
    UNSURE = "unsure"  # one question whose answer appears in no later call: work of the task, or a side call
    AUXILIARY = "auxiliary"  # a call apart from the task's work, such as for a title
    RETRY = "retry"  # a reply that the agent did not use: it sent the request again and used the other reply
    ABORTED = "aborted"  # a branch whose last turn the client cut off: the agent never received the tokens


class BranchPolicy(StrEnum):
    """What happens to the branches of a kind in the training data."""

    TRAIN = "train"
    MASK = "mask"  # delivered as a row, but nothing in it is trained on
    DROP = "drop"  # not delivered


class TokenMode(StrEnum):
    """The source of a turn's token ids."""

    TOKENS = "tokens"  # the engine was given exactly the recorded ids
    CAPTURE = "capture"  # the engine was given text and reported its ids
    TEXT = "text"  # no ids are available, so the turn is never trained on


class LogprobKind(StrEnum):
    """The distribution that log-probabilities refer to."""

    RAW = "raw"  # log-softmax of the logits, before temperature and truncation
    SAMPLING = "sampling"  # the distribution that was sampled from
    NONE = "none"  # the engine reported no log-probabilities


class FinishReason(StrEnum):
    """Why a turn's generation ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # the token limit
    ABORT = "abort"  # the client hung up, or the run ended


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class ImageSpan(msgspec.Struct, frozen=True):
    """The position of an image in a prompt: `length` placeholder ids, starting at `start`. `digest` is the SHA-256
    (hex) of the image's bytes, and `grid` is the image's size in patches (time, height, width)."""

    digest: str
    start: int
    length: int
    grid: tuple[int, int, int]


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a turn by the wall clock, in seconds since the epoch. `joined` is the time when the prompt's position in
    the token tree was known. In turns stored by earlier versions of Outrider, `joined` is None. `first_token` is None
    if no token was sampled."""

    received: float
    joined: float | None = None
    first_token: float | None
    finished: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An inference worker's report about a call. The report is only stored, never trained on. `timing` has times in
    seconds since the epoch, and durations in milliseconds if the name ends with `_ms`.

    output_ids, logprobs: the sampled ids (packed int32) and their log-probabilities (packed float64), if the worker's
        reply does not include the ids of the prompt. The turn of such a reply has the mode TEXT and no ids of its own,
        because the sampled ids alone do not show what the model has read.
    """

    worker_id: str | None = None
    node_id: str | int | None = None
    gpu_id: str | int | None = None
    rank_info: Any = None
    timing: dict[str, float | None] = {}
    output_ids: bytes = b""
    logprobs: bytes = b""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `index` counts the turns of a session's attempt in the order in which they are committed.

    parent: the turn whose prompt and output are the beginning of this turn's prompt.
    step: the step of the task in which the turn was made, from 0.
    conversation: 0 for the session's first conversation. 1, 2, ... for later conversations, which share no history with
        earlier ones, or have other tools or another system prompt.
    tools: a digest of the request's tools, empty without tools.
    agent_id, parent_agent_id, purpose: the caller, as described by the client.
    declared, declared_label: the kind and label of the turn's branch, if the client declares them.
    forked_from: the turn that shares the longest history with this turn. If tools or system prompt changed,
        `forked_from` is the turn whose history this turn continues.
    prompt_delta, output_ids: packed int32.
    logprobs: packed float64, one per output id.
    sampling: the sampling parameters that the engine was given, and whether the model was asked to think.
    altered: True if the sampling was shaped not only by temperature and truncation, but also by penalties, a bias, a
        minimum length, or a required form of the reply.
    ignored: names of the request's fields and tools that had no effect.
    messages: the messages that the request added to the conversation of the turn's parent; all messages if there is no
        parent.
    images: the positions of the images of `messages` in the prompt, if the prompt was sent as token ids.
    reply: the message that the client received; None if the client had hung up.
    tool_specs: the tools of a turn without a parent. Other turns have the tools of the first turn of their
        conversation.
    report: what an inference worker reports about the reply; None without workers.
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
    """Return the packed ids of the prompt of the last turn in `path`, which starts at a root."""
    before = [ids for turn in path[:-1] for ids in (turn.prompt_delta, turn.output_ids)]
    return b"".join((*before, path[-1].prompt_delta))


class TurnOutline(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a stored `Turn` that are enough to make the training rows of a session with a single conversation.
    Half of a stored turn is text, so reading the outline takes half the time."""

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


def without_gaps(turns: Sequence[TurnType]) -> list[TurnType]:
    """Return the turns, which are in the order of their indexes, with new indexes from 0 and without gaps. A turn whose
    parent is missing is left out, because its prompt is not known. If the turn in `forked_from` is not among `turns`,
    the field becomes None."""
    if all(turn.index == place for place, turn in enumerate(turns)):
        return list(turns)
    places: dict[int, int] = {}
    kept: list[TurnType] = []
    for turn in turns:
        if turn.parent is not None and turn.parent not in places:
            continue
        places[turn.index] = len(kept)
        fields: dict[str, Any] = {"index": len(kept), "parent": None if turn.parent is None else places[turn.parent]}
        if isinstance(turn, Turn):
            fields["forked_from"] = None if turn.forked_from is None else places.get(turn.forked_from)
        kept.append(msgspec.structs.replace(turn, **fields))
    return kept


class GradedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as evaluators see it. `index`, `parent`, `messages` and `reply` are those of `Turn`. `SampleFields`
    explains `kind`, `label` and `depth`. `row` is the number of the training row that trains the turn's tokens, or
    None."""

    index: int
    parent: int | None
    kind: BranchKind
    label: str
    depth: int
    row: int | None
    messages: tuple[Message, ...]
    reply: Message | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluator. All of its numbers are finite.

    reward, metrics: for the session as a whole.
    turns: rewards of single turns by index (process rewards), added to `reward`.
    rows: rewards of single training rows by number (`Sample.row`), used instead of `reward`.
    """

    reward: float
    metrics: dict[str, float] = {}
    reason: str | None = None
    turns: dict[int, float] = {}
    rows: dict[int, float] = {}


class SampleImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a training row. `turn` is the turn that added the image. `message` is the index of the image's
    message in the conversation of the row's turns, including replies.

    `digest` is the SHA-256 (hex) of the image's `size` bytes. The service stores these bytes. If the client sent only a
    URL, `url` is this URL, `digest` is the digest of the URL, and no bytes are stored.

    `span` has the positions [start, end) of the image's placeholders in the row's ids. `grid` is the image's size in
    patches (time, height, width). Both are None if the engine made the prompt's ids itself.
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
    """The fields that `Sample` and `JsonSample` have in common: all of a training row except its tokens.

    row, rows: the number of this row, from 0, and the number of the session's rows.
    prompt_length: the number of ids before the first sampled id.
    reward: the verdict's reward for this row, or else for the session. None if the session has no verdict, or if the
        task does not train on rows of this kind (`BranchPolicy`). A row without a reward must not be trained on.
    turn_spans: for each of `turns`, the positions [start, end) of its sampled tokens in `ids`.
    turn_rewards: for each of `turns`, the verdict's reward of the turn. The value is None if the verdict has no reward
        for the turn, or if this row does not train the turn. So each turn's reward is in at most one row.
    parent: the turn from which the branch forked, or the turn that started the branch; None if there is no such turn.
    depth: 0 in the main conversation, plus 1 for each sub-agent, side call or replaced history on the way to the
        branch.
    label: a more specific name than `kind`, such as "title".
    altered: the turns whose sampling was shaped by more than temperature and truncation (`Turn.altered`).
    images: in the order in which they appear in the ids. An image that appears twice is listed twice.
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
    """One training row. `ids`, `loss_mask`, `logprobs` and `versions` are read-only numpy arrays of equal length. The
    arrays are made on first use from the following fields. Only these fields are stored and sent:

    packed_ids: all ids of the row, as packed int32.
    trained: the positions [start, end) of the ids to train on, in order and without overlap.
    packed_logprobs: the log-probabilities of the ids to train on, as packed float64.
    version_spans: the policy versions of the ids to train on, by their positions in the row.
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
        """The number of ids to train on."""
        return sum(end - start for start, end in self.trained)

    @cached_property
    def ids(self) -> Ids:
        """The token ids, as int32."""
        return unpack_ids(self.packed_ids)

    @cached_property
    def loss_mask(self) -> Ids:
        """An int32 array: 1 for the ids to train on, and 0 for the context and for sampled ids that are not trained on
        in this row."""
        import numpy as np

        mask = np.zeros(len(self), dtype=np.int32)
        for start, end in self.trained:
            mask[start:end] = 1
        mask.flags.writeable = False
        return mask

    @cached_property
    def logprobs(self) -> Logprobs:
        """The log-probabilities of the ids as float64. Where `loss_mask` is 0, they are 0.0."""
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
        """The policy versions that sampled the ids, as int32. Where `loss_mask` is 0, they are -1."""
        import numpy as np

        found = np.full(len(self), -1, dtype=np.int32)
        for span in self.version_spans:
            found[span.start : span.end] = span.version
        found.flags.writeable = False
        return found

    def token_rewards(self, length: int | None = None) -> list[float]:
        """Return one reward for each of the first `length` ids (default: all). A turn's reward is at the last of the
        turn's sampled tokens. The row's own reward is at the last token to train on.

        Rewards of turns that end after position `length` are left out. All numbers are zero if the row has no reward,
        or if none of the ids is to be trained on.
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
    """A training row in JSON. `ids`, `loss_mask`, `logprobs` and `versions` are lists of equal length. Where
    `loss_mask` is 0, the log-probability is 0.0 and the version is -1."""

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]

    def sample(self) -> Sample:
        """Convert the row to a `Sample`. Raises ValueError if the lists have different lengths."""
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
    """Return a sample as JSON, in the form of `JsonSample`."""
    import orjson

    row = {name: getattr(sample, name) for name in SampleFields.__struct_fields__}
    row |= {"ids": sample.ids, "loss_mask": sample.loss_mask, "logprobs": sample.logprobs, "versions": sample.versions}
    return orjson.dumps(row, msgspec.to_builtins, orjson.OPT_SERIALIZE_NUMPY)


class ChatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A training row as a conversation, in the form of Chat Completions that chat templates take. Fields that are not
    listed here have the same meaning as in `Sample`.

    messages: each sampled reply has a `weight`: 1 if it is trained on in this row, else 0. Arguments of tool calls are
        objects if they are JSON objects. In a row with images, each `content` is a list of parts. An image's part has
        its `path` in an export, or its `url`.
    tools: None if the service did not store the tools. Early versions of the service, before chat rows existed, did not
        store tools.
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
    """The numbers of sampled tokens of a session: sampled = trained + masked + dropped. `unsure` is how many of the
    sampled tokens are in branches of the kind `unsure`. `drift` is the number of positions at which the engine reported
    another id than the recorded id."""

    sampled: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    unsure: int = 0
    drift: int = 0


class FrozenUse(msgspec.Struct, frozen=True, kw_only=True):
    """A session's use of one frozen model: the number of turns and of sampled tokens. These turns and tokens are never
    trained on."""

    turns: int = 0
    tokens: int = 0


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a session spent in each stage. `queued`, `ready` and `eval_wait` are waiting times. `stop` includes
    collecting artifacts."""

    queued: float = 0.0
    init: float = 0.0
    ready: float = 0.0
    run: float = 0.0
    eval_wait: float = 0.0
    eval: float = 0.0
    stop: float = 0.0


class HarnessExit(msgspec.Struct, frozen=True, kw_only=True):
    """The non-zero exit `code` of an agent program whose work was graded nevertheless. `log_tail` is the end of the
    program's output."""

    code: int
    log_tail: str


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session, which is written once and never changed.

    policy: what happens to the branches of each kind. A kind that is missing has the default policy.
    harness_exit: set if the agent program failed and its work was graded nevertheless.
    forks: the number of forks by cause.
    ignored: the request fields and tools that had no effect, each with the number of turns that had it.
    failed_calls: the number of model calls that got an error reply, by `code: field`, or by `code: METHOD path` if
        nothing is served at the path. Calls before a restart of the service are not counted.
    frozen: the use of each frozen model, by name. `turns`, `tokens`, `forks` and `ignored` count only the policy's
        turns.
    model_seconds: the time during which at least one model call of the session was running, in seconds.
    artifact_bytes: the size of the artifacts that were kept.
    answer: the agent's answer, if the harness reports one; of a longer answer the last 1,048,576 characters.
    carried: True if an artifact has the files that the grading got (`EvaluatorSpec.carry`).
    run_reason: if the grading failed, the reason why the agent's run had ended.
    regrades: the earlier session whose run this session grades again. The earlier session's turns are also stored as
        this session's.
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
        """The reason why the agent's run ended. The reason is None if grading never began, for example because the run
        failed or was cancelled."""
        return self.run_reason if self.verdict is None else self.stop_reason
