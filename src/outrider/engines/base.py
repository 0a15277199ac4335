"""The protocols of inference engines: token ids in, token ids and log-probabilities out, as they are sampled.

Invariant of every stream: the chunks' ids and log-probabilities have equal length, and exactly one chunk, the last, has
a `finish`.
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
from outrider.trajectory import FinishReason, Ids, LogprobKind, TokenMode, VersionSpan

PauseMode = Literal["finish", "abort", "keep"]
"""The effect of a pause on generations in flight: run to their end, end now with their tokens so far, or freeze."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The complete sampling parameters of one turn: an engine adds no default of its own. top_k -1 means off.

    `stop` strings are matched on the decoded output; generation ends with the token that completes the match, which is
    part of the output ids. `stop_token_ids` end the generation likewise, and are not sampled among the first
    `min_tokens`. The repetition penalty counts the tokens of prompt and output, the other two penalties only the tokens
    of the output. `logit_bias` is added to the logits by token id. A `constraint` is given only to engines that are
    `TakesConstraints`.
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
        """True if any parameter besides temperature and truncation changes the distribution from which tokens are
        drawn."""
        return (
            self.min_tokens > 0
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or self.constraint is not None
        )


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `request_id` is unique and of fixed length; `session_key` groups a session's turns for
    prefix-cache routing. `input_ids` is int32 of shape (prompt length,)."""

    request_id: str
    session_key: str
    input_ids: Ids
    sampling: SamplingParams


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly sampled tokens. `versions` (half-open spans over the whole output) comes with the last chunk."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    stop_match: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None
    prompt_ids: list[int] | None = None  # the engine's own echo of the prompt, if it sends one
    prompt_tokens: int | None = None  # the engine's count of the prompt's tokens; with the last chunk


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation by an engine that takes only messages (capture and text mode). `thinking` switches the model's
    reasoning on or off; None leaves the choice to the engine's template."""

    request_id: str
    session_key: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sampling: SamplingParams
    thinking: bool | None = None


AnyRequest = GenerateRequest | ChatRequest


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a chat generation. The last chunk has the finish, the whole reply, and in capture mode the ids."""

    text: str = ""
    reasoning: str = ""
    finish: FinishReason | None = None
    reply: Message | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    versions: tuple[VersionSpan, ...] = ()
    usage: dict[str, int] | None = None


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's health report. `model` is the served name or path, None if not reported."""

    ok: bool
    detail: str = ""
    model: str | None = None
    context_tokens: int | None = None
    version: int = 0


class Engine(Protocol):
    """An inference backend that takes token ids.

    `generate` raises ContextOverflow, EngineRejected or EngineUnavailable, before the first chunk or between chunks.
    Closing the generator aborts the generation upstream. The pool checks every chunk (`pool.checks`). `health`
    never raises. `start` and `close` are called once, by the owner of the engine.
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
    """An inference backend that takes messages; `mode` is CAPTURE or TEXT. Errors as for `Engine`."""

    name: str
    mode: TokenMode
    logprob_kind: LogprobKind

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]: ...
    async def health(self) -> EngineHealth: ...


AnyEngine = Engine | ChatEngine


def chunks_of(engine: AnyEngine, request: AnyRequest) -> AsyncGenerator[Any, None]:
    """Begin a generation, and return the engine's own stream of `Chunk` or `ChatChunk`."""
    if isinstance(request, GenerateRequest):
        return cast(Engine, engine).generate(request)
    return cast(ChatEngine, engine).chat(request)


@runtime_checkable
class TokenizesText(Protocol):
    """An engine that can tokenise a text with its own tokenizer. Special tokens in the text are recognised; none are
    added.

    `token_check` returns the ids, or None if the server has no such route. Raises EngineUnavailable.
    """

    async def token_check(self, text: str) -> list[int] | None: ...


@runtime_checkable
class SetsVersion(Protocol):
    """An engine whose policy version is set after its weights have changed."""

    async def set_version(self, version: int) -> None: ...


class Capability(StrEnum):
    """A feature of an engine beyond its protocol, for `capabilities_of`."""

    VERSIONED_CACHE = "versioned_cache"
    """After `set_version`, no key or value computed by older weights is used for a new prompt, also if the trainer has
    changed the weights itself."""


def capabilities_of(engine: object) -> frozenset[Capability]:
    """Return the engine's attribute `capabilities`, or no capabilities for an engine without this attribute."""
    return getattr(engine, "capabilities", frozenset())


class KnownVersions(msgspec.Struct, frozen=True):
    """A server's last known policy version, and the version of weights without a label. `run` is a name of this run of
    the service: other runs may have used the same server, and the same versions."""

    served: int = 0
    unlabelled: int = 0
    run: str = ""

    @classmethod
    def of_new_run(cls) -> KnownVersions:
        return cls(run=secrets.token_hex(8))

    def with_version(self, served: int, unlabelled: int | None = None) -> KnownVersions:
        """A copy with another version. A lower version also gets a new `run`, because the number may come again with
        other weights."""
        run = self.run if served >= self.served else secrets.token_hex(8)
        return KnownVersions(served, self.unlabelled if unlabelled is None else unlabelled, run)

    @property
    def cache_salt(self) -> str:
        """The salt of every request: a server reuses keys and values only between requests with the same salt, so each
        version has a salt of its own."""
        return f"{self.run}-{self.served}"


@runtime_checkable
class RemembersVersions(Protocol):
    """An engine that records its server's version in `versions`, because not every server can report a version. If
    several processes use the same server, the attribute is copied from the process that sets the version to the
    others."""

    versions: KnownVersions


@runtime_checkable
class HoldsBack(Protocol):
    """An engine whose server another process pauses with "abort". From `hold_back` until `release` this process sends
    the server no generation, and gives up generations without a first token: the server would keep these through the
    pause, and then sample them by new weights over keys and values of the old weights."""

    def hold_back(self) -> None: ...
    def release(self) -> None: ...


@runtime_checkable
class LoadsWeights(Protocol):
    """An engine that can load other weights in place, from a file or folder readable by the engine.

    `update_weights` is called while nothing is generated. Tokens sampled later have the version `version`, and no key
    or value of the old weights is reused for a new prompt. The method raises EngineRejected, with nothing changed, or
    EngineUnavailable. An engine that cannot load weights at present has an attribute `loads_weights` that is False.
    """

    async def update_weights(self, weights: str, version: int) -> None: ...


def weights_loader(engine: object) -> Callable[[str, int], Coroutine[Any, Any, None]] | None:
    """Return the engine's `update_weights`; None for an engine that cannot load weights at present."""
    return (
        engine.update_weights if isinstance(engine, LoadsWeights) and getattr(engine, "loads_weights", True) else None
    )


@runtime_checkable
class TakesConstraints(Protocol):
    """An engine that can constrain a reply. `constraints` are the kinds that the engine supports. An engine without
    this attribute supports none."""

    constraints: frozenset[ConstraintKind]


@runtime_checkable
class AwaitsWorkers(Protocol):
    """An engine whose workers connect to the service: the engine may join a pool before the first worker."""

    awaits_workers: bool


@runtime_checkable
class ListsEngines(Protocol):
    """A list of engines, such as a router's workers: a pool adds each engine, and follows the list.

    Each spec has a URL, which identifies the engine. `list_engines` raises EngineError, and InvalidField if there is no
    such list. `start` and `close` are called once, by the pool.
    """

    name: str

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def list_engines(self) -> list[EngineSpec]: ...


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of every engine class: `Kind(EngineOptions)`. `tokenizer` is the model's folder."""

    name: str
    url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    options: dict[str, Any] = {}
