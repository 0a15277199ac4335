"""The protocols of inference engines. An engine takes token ids, and streams the sampled ids with their
log-probabilities.

Invariants of every stream: each chunk has as many ids as log-probabilities. Exactly one chunk, the last, has a
`finish`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from enum import StrEnum
from typing import Any, Literal, Protocol, cast, runtime_checkable

import msgspec

from outrider.constraint import Constraint, ConstraintKind
from outrider.messages import Message, ToolSpec
from outrider.spec import EngineSpec
from outrider.tokens.rendering.image_grids import ImageForm
from outrider.trajectory import FinishReason, Ids, ImageSpan, LogprobKind, TokenMode, VersionSpan, WorkerReport

PauseMode = Literal["finish", "abort", "keep"]
"""What a pause does to generations in flight. "finish" lets them run to their end, "abort" ends them with the tokens
sampled so far, and "keep" freezes them until the engine resumes."""

MAX_COUNT = (1 << 31) - 1
"""The largest count or policy version that is accepted. Sample files store versions as int32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """All sampling parameters of a turn. An engine adds no defaults of its own.

    - `top_k`: -1 means no limit.
    - `stop`: strings to look for in the decoded output. The generation ends with the token that completes such a
      string; this token is part of the output ids.
    - `stop_token_ids`: tokens that end the generation. They are part of the output ids, and are never sampled as one of
      the first `min_tokens` tokens.
    - `repetition_penalty`: counts the tokens of prompt and output. The other two penalties count only the output.
    - `logit_bias`: added to the logits, by token id.
    - `constraint`: only for engines that implement `TakesConstraints`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    constraint: Constraint | None = None

    @property
    def altered(self) -> bool:
        """True if a parameter other than temperature, top_p, top_k and min_p changes the distribution of the tokens."""
        return (
            self.min_tokens > 0
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or self.constraint is not None
        )

    @property
    def continuable(self) -> bool:
        """True if a new request can continue a reply that was cut off, without a change to the distribution of any
        token. The new prompt ends with the ids of the reply so far.

        A constraint, a presence penalty or a frequency penalty makes this impossible: an engine applies a constraint
        from the start of the new output, and these two penalties count only tokens of the new output.
        """
        return self.constraint is None and self.presence_penalty == 0 and self.frequency_penalty == 0


class RequestImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt. `span` is its position in `GenerateRequest.input_ids`. `item` has its pixels, encoded as
    `form` says."""

    span: ImageSpan
    item: bytes
    form: ImageForm = ImageForm.PATCHES


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one generation by an engine that takes token ids.

    `request_id`: unique, and of fixed length.
    `session_key`: the same for all requests of a session, so that a router can send them to the server that has cached
        their prefix.
    `input_ids`: int32 of shape (prompt length,).
    `images`: the images of the prompt, in order. The engine must take images in their form (`image_form_of`)."""

    request_id: str
    session_key: str
    input_ids: Ids
    sampling: SamplingParams
    images: tuple[RequestImage, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly sampled tokens.

    `versions`: in the last chunk, half-open spans of policy versions over the whole output.
    `stop_match`: the stop string or stop token id that ended the generation.
    `cached_tokens`: how many prompt tokens had cached keys and values, or None if the engine does not report it."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    stop_match: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None
    prompt_ids: list[int] | None = None  # the ids of the prompt as reported by the engine, None if not reported
    prompt_tokens: int | None = None  # the engine's count of the prompt's tokens, in the last chunk
    prompt_images: list[tuple[int, int]] | None = None
    """The positions [start, end) at which the engine has read images in the prompt. If the request has images, the
    first chunk with tokens must have these positions."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one generation by an engine that takes messages (capture and text mode).

    `thinking`: switches the model's reasoning on or off. With None, the engine's template decides.
    `known_ids`: the captured ids of the conversation up to the end of the last reply in `messages`: the ids of that
        reply's prompt, then those of the reply. None if unknown, or if the engine does not have
        `Capability.KEEPS_IDS`."""

    request_id: str
    session_key: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sampling: SamplingParams
    thinking: bool | None = None
    known_ids: list[int] | None = None


AnyRequest = GenerateRequest | ChatRequest


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a chat generation. The last chunk has `finish` and the whole `reply`. In capture mode, it also has
    the ids and log-probabilities; for an engine with workers, also the worker's `report`."""

    text: str = ""
    reasoning: str = ""
    finish: FinishReason | None = None
    reply: Message | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    versions: tuple[VersionSpan, ...] = ()
    usage: dict[str, int] | None = None
    report: WorkerReport | None = None


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of an engine.

    `detail`: what is wrong, if `ok` is False.
    `model`: the name or path of the served model, or None if not reported.
    `context_tokens`: the maximum length of prompt and output together, or None if not reported."""

    ok: bool
    detail: str = ""
    model: str | None = None
    context_tokens: int | None = None
    version: int = 0


class Engine(Protocol):
    """An inference backend that takes token ids.

    `generate` may raise an EngineError at any time, such as ContextOverflow, EngineRejected, EngineUnavailable or
    EngineMisbehaved. Closing the generator aborts the generation on the server. The pool checks every chunk
    (`pool.checks`). `pause` and `resume` raise an EngineError if they fail. `health` never raises. The engine's owner
    calls `start` and `close` once each.
    """

    name: str
    mode: TokenMode
    logprob_kind: LogprobKind

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...
    async def health(self) -> EngineHealth: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...


class ChatEngine(Protocol):
    """An inference backend that takes chat messages. `mode` is CAPTURE or TEXT. `chat` raises the same errors as
    `Engine.generate`."""

    name: str
    mode: TokenMode
    logprob_kind: LogprobKind

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]: ...
    async def health(self) -> EngineHealth: ...


AnyEngine = Engine | ChatEngine


def chunks_of(engine: AnyEngine, request: AnyRequest) -> AsyncGenerator[Any, None]:
    """Begin a generation, and return the engine's stream: `Chunk`s for a `GenerateRequest`, otherwise `ChatChunk`s."""
    if isinstance(request, GenerateRequest):
        return cast(Engine, engine).generate(request)
    return cast(ChatEngine, engine).chat(request)


@runtime_checkable
class TokenizesText(Protocol):
    """An engine that can tokenise a text with its own tokenizer. Special tokens in the text are recognised, and no
    other ones are added.

    `token_check` returns the ids, or None if the server has no route for this. Raises EngineUnavailable.
    """

    async def token_check(self, text: str) -> list[int] | None: ...


@runtime_checkable
class SetsVersion(Protocol):
    """An engine that can be given a new policy version after its weights have changed."""

    async def set_version(self, version: int) -> None: ...


class Capability(StrEnum):
    """An optional property of an engine for which there is no protocol. `capabilities_of` returns an engine's
    capabilities."""

    VERSIONED_CACHE = "versioned_cache"
    """After `set_version`, keys and values of older weights are never reused for a new prompt, even if the trainer
    itself has changed the weights of the server."""
    KEEPS_IDS = "keeps_ids"
    """An engine that takes messages begins the prompt with `ChatRequest.known_ids`, in place of the ids that it would
    render for the same part of the conversation."""
    READS_PATCHES = "reads_patches"
    """The engine takes images (`GenerateRequest.images`) as patches."""
    READS_PNG = "reads_png"
    """The engine takes images as PNG files."""


def capabilities_of(engine: object) -> frozenset[Capability]:
    """Return the engine's attribute `capabilities`, or an empty set if there is no such attribute."""
    return getattr(engine, "capabilities", frozenset())


def image_form_of(engine: object) -> ImageForm | None:
    """Return the form in which an engine takes `GenerateRequest.images`, or None if it takes no images."""
    has = capabilities_of(engine)
    if Capability.READS_PATCHES in has:
        return ImageForm.PATCHES
    return ImageForm.PNG if Capability.READS_PNG in has else None


class KnownVersions(msgspec.Struct, frozen=True):
    """The last known policy version of a server (`served`), and the version that weights without a label have
    (`unlabelled`). `run` is a random name of this run of the service. The name makes the cache salts differ from those
    of earlier runs, because an earlier run may have used the same server with the same version numbers."""

    served: int = 0
    unlabelled: int = 0
    run: str = ""

    @classmethod
    def of_new_run(cls) -> KnownVersions:
        return cls(run=secrets.token_hex(8))

    def with_version(self, served: int, unlabelled: int | None = None) -> KnownVersions:
        """Return a copy with another version. If the version is lower than before, the copy has a new `run`, because
        later weights may get a number that earlier weights have had."""
        run = self.run if served >= self.served else secrets.token_hex(8)
        return KnownVersions(served, self.unlabelled if unlabelled is None else unlabelled, run)

    @property
    def cache_salt(self) -> str:
        """The cache salt of every request. A server reuses keys and values only between requests with the same salt. So
        no request reuses keys and values of another version."""
        return f"{self.run}-{self.served}"


@runtime_checkable
class RemembersVersions(Protocol):
    """An engine that records its server's version in `versions`, because some servers cannot report it. If several
    processes use one server, the process that sets the version sends `versions` to the other processes."""

    versions: KnownVersions


@runtime_checkable
class HoldsBack(Protocol):
    """An engine that can stop its generations while another process pauses the server with "abort". From `hold_back`
    until `release`, the engine sends no generation to the server, and aborts every generation that has no token yet.
    Otherwise the server might keep such a generation during the pause, and then sample with new weights over keys and
    values of the old weights."""

    def hold_back(self) -> None: ...
    def release(self) -> None: ...


@runtime_checkable
class LoadsWeights(Protocol):
    """An engine that can load other weights in place, from a file or folder that the engine can read.

    `update_weights` is called while the engine generates nothing. Tokens sampled later have the version `version`, and
    keys and values of the old weights are not reused for a new prompt. Raises EngineRejected if the new weights are
    refused; the old ones then stay in use. Raises EngineUnavailable if the engine fails. If the attribute
    `loads_weights` exists and is False, the engine cannot load weights at present.
    """

    async def update_weights(self, weights: str, version: int) -> None: ...


def weights_loader(engine: object) -> Callable[[str, int], Coroutine[Any, Any, None]] | None:
    """Return the engine's `update_weights`, or None if the engine cannot load weights at present."""
    return (
        engine.update_weights if isinstance(engine, LoadsWeights) and getattr(engine, "loads_weights", True) else None
    )


@runtime_checkable
class TakesConstraints(Protocol):
    """An engine that can constrain a reply, for example to a JSON schema. `constraints` are the kinds that it supports.
    An engine without this attribute supports none."""

    constraints: frozenset[ConstraintKind]


@runtime_checkable
class AwaitsWorkers(Protocol):
    """An engine whose workers connect to the service. If `awaits_workers` is True, a pool accepts the engine before its
    first worker has connected."""

    awaits_workers: bool


@runtime_checkable
class ListsEngines(Protocol):
    """A list of engines, such as the workers of a router. A pool adds the listed engines, and polls the list for
    changes.

    Each listed spec has a URL, which identifies the engine. `list_engines` raises EngineError, or InvalidField if the
    server has no list. The pool calls `start` and `close` once each.
    """

    name: str

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def list_engines(self) -> list[EngineSpec]: ...


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The argument with which every engine is created. `tokenizer` is the folder of the tokenizer."""

    name: str
    url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    options: dict[str, Any] = {}
