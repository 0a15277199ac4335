"""The adapter for any OpenAI-compatible server. It sends messages to `/v1/chat/completions`, and reads a stream.

The server renders the messages, so token ids are known only if the server reports them, as vLLM does. A reply without
ids is text, and is never used for training. SGLang servers refuse to report ids in a stream, so attach an SGLang server
as kind `sglang`. Invariant: ids are passed on only with exactly one log-probability for each id.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
import orjson

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import Constraint, ConstraintKind
from outrider.dialects.chat.reply import message_object
from outrider.engines.adapters.options import ServerOptions, read_options, server_url
from outrider.engines.adapters.policy_versions import LabelSpan, spans_of
from outrider.engines.adapters.server_api import (
    LOGPROB_KINDS,
    ModelCard,
    checked_logprobs,
    decode,
    finish_of,
    penalties_and_bias,
    served_model,
    structured_outputs,
)
from outrider.engines.base import Capability, ChatChunk, ChatRequest, EngineHealth, EngineOptions, KnownVersions
from outrider.engines.http.client import DEFAULT_RETRY, HttpClient
from outrider.engines.http.failures import Sizes, StatusFailure, failure_of_event, translate
from outrider.engines.pool.checks import max_characters, too_long
from outrider.errors import EngineError, EngineUnavailable, InvalidField, error_text
from outrider.messages import Message, Part, Role, Text, ToolCall, images_in
from outrider.trajectory import FinishReason, LogprobKind, TokenMode

ROUTE = "/v1/chat/completions"
LARGE_IMAGE = 256 << 10
"""A request with an image of more than this many bytes is encoded in a thread, because encoding it as base64 and JSON
would block the event loop."""
_OPENAI_ALTERS = ("presence_penalty", "frequency_penalty", "logit_bias")
_OPENAI_CONSTRAINTS = frozenset({ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA, ConstraintKind.TOOL_CALLS})


class OpenAIOptions(ServerOptions, frozen=True, kw_only=True):
    """The options of an OpenAI-compatible server.

    - `ids`: if False, requests contain only fields of OpenAI's own API, and replies are text.
    - `logprobs_mode`: the `--logprobs-mode` of a vLLM server.
    - `nemo_rl`: True if the server is a vLLM worker of NeMo RL. Such a worker lists no models, and replaces the
      beginning of a prompt by `required_prefix_token_ids`."""

    ids: bool = True
    nemo_rl: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[LabelSpan] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


class OpenAIEngine:
    """Implements `ChatEngine` with one server. `mode` is CAPTURE if ids are requested, otherwise TEXT. If a reply has
    no ids, `output_ids` of its last chunk is None."""

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        own = read_options(OpenAIOptions, options.options)
        self.name = options.name
        self.mode = TokenMode.CAPTURE if own.ids else TokenMode.TEXT
        self.constraints = frozenset(ConstraintKind) if own.ids else _OPENAI_CONSTRAINTS
        self.capabilities = frozenset({Capability.VERSIONED_CACHE}) if own.ids else frozenset[Capability]()
        self.logprob_kind = LOGPROB_KINDS[own.logprobs_mode] if own.ids else LogprobKind.NONE
        self._nemo_rl = own.nemo_rl
        if own.nemo_rl:
            self.capabilities |= {Capability.KEEPS_IDS}
        if own.nemo_rl and not (own.ids and options.model):
            raise InvalidField(
                f"engine {options.name!r} has the option nemo_rl, so it needs a model and the option ids",
                field="model",
                hint="NeMo RL's servers do not list their models: name the model",
            )
        self._model = options.model
        self._http = HttpClient(options.name, server_url(options), api_key=own.api_key, retry=retry)
        self._context: int | None = None
        self.versions = KnownVersions.of_new_run()

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        reply = _ChatReader(self.name, request, self.versions.served, capture=self.mode is TokenMode.CAPTURE)
        try:
            model = self._model
            if not model:  # the options name no model, so use the server's first one
                model = self._model = served_model(await self._http.get("/v1/models"), None, self.name).id
            if any(part.size > LARGE_IMAGE for message in request.messages for part in images_in(message)):
                body = await asyncio.to_thread(lambda: orjson.dumps(self._body(request, model)))
            else:
                body = orjson.dumps(self._body(request, model))
            async with aclosing(self._http.events(ROUTE, lambda _: (body,))) as batches:
                async for payloads in batches:
                    for payload in payloads:
                        if (chunk := reply.read(payload)) is not None:
                            yield chunk
        except StatusFailure as failure:
            sizes = Sizes(output=request.sampling.max_tokens, context=self._context)
            raise translate(failure, self.name, sizes) from None
        except EngineUnavailable:
            if not reply.finished:
                raise
        yield reply.last()

    async def health(self) -> EngineHealth:
        try:
            card = await self._card()
        except StatusFailure as failure:
            return EngineHealth(ok=False, detail=translate(failure, self.name).message)
        except EngineError as error:
            return EngineHealth(ok=False, detail=error_text(error))
        self._context = card.max_model_len
        return EngineHealth(ok=True, model=card.id, context_tokens=self._context, version=self.versions.served)

    async def _card(self) -> ModelCard:
        if not self._nemo_rl:
            return served_model(await self._http.get("/v1/models"), self._model, self.name)
        answer = await self._http.post("/tokenize", {"model": self._model, "prompt": "a"})
        context = answer.get("max_model_len") if isinstance(answer, dict) else None
        return ModelCard(self._model or "", max_model_len=context if isinstance(context, int) else None)

    async def set_version(self, version: int) -> None:
        """Record the version of the server's weights. A reply that reports no version gets this version."""
        self.versions = self.versions.with_version(version, 0)

    def _body(self, request: ChatRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        capture = self.mode is TokenMode.CAPTURE
        body: dict[str, Any] = {
            "model": model,
            "messages": [written_message(message, reasoning=capture) for message in request.messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        altered = penalties_and_bias(sampling)
        body |= altered if capture else {name: altered[name] for name in _OPENAI_ALTERS if name in altered}
        if sampling.constraint is not None:
            body |= _constraint(sampling.constraint)
        if capture and request.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
        if capture:
            body |= {
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": True,
                "return_token_ids": True,
                "return_weight_versions": True,
                "cache_salt": self.versions.cache_salt,
            }
        if self._nemo_rl and request.known_ids:
            body["required_prefix_token_ids"] = request.known_ids
        return body


class _ChatReader:
    """Reads a streamed reply event by event. `last` then returns the last chunk, which has the whole reply."""

    def __init__(self, engine: str, request: ChatRequest, version: int, *, capture: bool) -> None:
        self._engine = engine
        self._request_id = request.request_id
        self._sampling = request.sampling
        self._size = 0
        self._version = version
        self._capture = capture
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _PartialCall] = {}
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._labels: list[LabelSpan] | None = None
        self._usage: dict[str, int] | None = None
        self._finish: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def read(self, payload: bytes) -> ChatChunk | None:
        event = decode(_EVENTS, payload, self._engine)
        if event.error is not None:
            raise failure_of_event(event.error)
        self._prompt_ids = event.prompt_token_ids or self._prompt_ids
        if event.usage is not None:
            self._usage = {name: count for name, count in event.usage.items() if isinstance(count, int)}
        if not event.choices:
            return None
        choice = event.choices[0]
        delta, ids = choice.delta, choice.token_ids or []
        self._ids += ids
        # Ids and tool calls are stored until the end of the reply. Their size is limited, because an endless reply
        # would fill the memory.
        written = sum(len(call.function.arguments or "") + 1 for call in delta.tool_calls or [])
        self._size += written + len(ids)
        if self._size > max_characters(self._sampling):
            raise too_long(self._engine, self._sampling)
        if choice.logprobs is not None and choice.logprobs.content is not None:
            self._logprobs += [entry.logprob for entry in choice.logprobs.content]
        self._labels = choice.weight_versions or self._labels
        for call in delta.tool_calls or []:
            self._calls.setdefault(call.index, _PartialCall()).add(call)
        if choice.finish_reason is not None:
            self._finish = finish_of(choice.finish_reason, self._engine)
        text, reasoning = delta.content or "", delta.reasoning or delta.reasoning_content or ""
        if not text and not reasoning:
            return None
        self._text.append(text)
        self._reasoning.append(reasoning)
        return ChatChunk(text=text, reasoning=reasoning)

    def last(self) -> ChatChunk:
        """Return the last chunk, with the whole reply. Raises EngineUnavailable if the stream ended without a finish
        reason. Raises EngineMisbehaved if log-probabilities are missing, or if the version spans do not cover the reply
        exactly."""
        if self._finish is None:
            raise EngineUnavailable(f"engine {self._engine!r} ended its stream before the reply's end")
        reply = Message(
            role=Role.ASSISTANT,
            content="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(
                call.whole(f"call_{self._request_id}_{index}") for index, call in sorted(self._calls.items())
            ),
        )
        captured = self._capture and self._prompt_ids is not None and self._ids and self._logprobs
        if not captured:
            return ChatChunk(finish=self._finish, reply=reply, usage=self._usage)
        return ChatChunk(
            finish=self._finish,
            reply=reply,
            prompt_ids=self._prompt_ids,
            output_ids=self._ids,
            logprobs=checked_logprobs(self._ids, self._logprobs, self._engine),
            versions=spans_of(self._labels, length=len(self._ids), version=self._version, unlabelled=self._version),
            usage=self._usage,
        )


class _PartialCall:
    """A tool call that arrives in several deltas. The first delta has the name; later deltas add text to the
    arguments."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._name = ""
        self._arguments: list[str] = []

    def add(self, delta: _CallDelta) -> None:
        self._id = delta.id or self._id
        self._name = delta.function.name or self._name
        self._arguments.append(delta.function.arguments or "")

    def whole(self, fallback_id: str) -> ToolCall:
        return ToolCall(self._id or fallback_id, self._name, "".join(self._arguments))


def _constraint(constraint: Constraint) -> dict[str, Any]:
    """Return the request fields for a constraint. JSON and tool calls use fields of OpenAI's API. Other constraints use
    vLLM's field `structured_outputs`."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case ConstraintKind.JSON_SCHEMA:
            schema = {"name": "reply", "schema": msgspec.json.decode(constraint.text), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case ConstraintKind.TOOL_CALLS:
            return {"tool_choice": msgspec.json.decode(constraint.text)}
        case _:
            return {"structured_outputs": structured_outputs(constraint)}


def written_message(message: Message, *, reasoning: bool) -> dict[str, Any]:
    """Return a message in OpenAI's format. With `reasoning`, the model's reasoning is added as `reasoning_content`.
    OpenAI has no such field, but servers that report ids read it."""
    written = message_object(message)
    if message.parts:
        written["content"] = [*map(_part, message.parts)]
    if reasoning and message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    return written


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    url = part.url or f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
