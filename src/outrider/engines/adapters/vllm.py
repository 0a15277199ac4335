"""The adapter for vLLM servers. Sends and receives token ids through `/inference/v1/generate`.

Servers before 0.11, and servers without `--enable-scale-out`, do not have this route. Before 0.20 the route does not
stream. In these cases the adapter uses `/v1/completions`; the first request shows which route a server has. The adapter
reads both formats of log-probabilities: with ids as text (up to 0.31) and as integers (after 0.31). Structured output
needs 0.11 or later. Invariant: an id is passed on only with the log-probability that the server sent for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
import orjson

from outrider.concurrency.retries import RetryPolicy
from outrider.engines.adapters.ids_json import body_with_ids, ids_json
from outrider.engines.adapters.options import ServerOptions, read_options
from outrider.engines.adapters.policy_versions import LabelSpan
from outrider.engines.adapters.server_api import (
    LOGPROB_KINDS,
    MISSING_LOGPROB,
    checked_logprobs,
    finish_of,
    penalties_and_bias,
    structured_outputs,
)
from outrider.engines.adapters.server_engine import (
    WEIGHTS_SECONDS,
    ServerEngine,
    ServerEvent,
    ServerReply,
)
from outrider.engines.base import Capability, Chunk, EngineOptions, GenerateRequest, PauseMode, RequestImage
from outrider.engines.http.client import DEFAULT_RETRY
from outrider.engines.http.failures import StatusFailure, translate
from outrider.errors import EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.trajectory import FinishReason
from outrider.wire.http_connections import Buffer

log = logging.getLogger("outrider.engine")

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
RENDER = "/v1/chat/completions/render"
PROBE_IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAK0lEQVR42u3MMREAAAgEoNfkRjeEmwcB"
    "qMlNRyAQCAQCgUAgEAgEAsHzYAFAdAEArKmlZAAAAABJRU5ErkJggg=="
)
"""An image of 64x64 pixels."""
ROUTE_MISSING = frozenset({403, 404})
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
UNCOUNTED = "does not say how many tokens of a prompt it had cached: start vLLM with --enable-prompt-tokens-details"


class VLLMOptions(ServerOptions, frozen=True, kw_only=True):
    """The options of a vLLM server. `logprobs_mode` is the server's `--logprobs-mode`, which no route reports. If
    `control` is False, only the owner of the server pauses it and changes its weights, so the adapter does not call the
    routes for pauses and weights."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    control: bool = True


class _Entry(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[LabelSpan] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Event(ServerEvent):
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


class _VLLMReply(ServerReply[_Event]):
    """Reads the events of the generate route and of `/v1/completions`. The token counts arrive after the event with the
    finish reason."""

    event = msgspec.json.Decoder(_Event)
    events = msgspec.json.Decoder(list[_Event])
    _usage = _Usage()

    def take(self, event: _Event) -> None:
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices:
            return
        choice = event.choices[0]
        if event.mm_placeholders is not None:
            places = event.mm_placeholders.get("image", [])
            self.prompt_images = [(place.offset, place.offset + place.length) for place in places]
        ids = choice.token_ids or []
        if ids:
            self.first_token()
        self.add(ids, _logprobs(choice.logprobs, ids, self._engine))
        self._prompt_ids = choice.prompt_token_ids or event.prompt_token_ids or self._prompt_ids
        if choice.finish_reason is not None:
            self.finish(finish_of(choice.finish_reason, self._engine), choice.stop_reason, choice.weight_versions)

    def last(self) -> Chunk:
        details = self._usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        return msgspec.structs.replace(
            super().last(),
            # The server reports -1 if the request was aborted before it left the queue.
            cached_tokens=None if cached == -1 else cached,
            prompt_tokens=self._usage.prompt_tokens,
        )


class VLLMEngine(ServerEngine[_VLLMReply]):
    """A `ServerEngine` that also implements `LoadsWeights`.

    Log-probabilities are passed on as the server sends them. The option `logprobs_mode` names their kind (RAW by
    default), and must equal the server's `--logprobs-mode`. Pausing and loading weights need a server in development
    mode.
    """

    reply = _VLLMReply
    capabilities = ServerEngine.capabilities | {Capability.READS_PATCHES}
    route = GENERATE
    label_route = "/weight_info"
    session_header = "X-Session-ID"
    pause_modes: ClassVar[dict[PauseMode, str]] = {"finish": "wait", "abort": "abort", "keep": "keep"}
    gated = frozenset({"abort"})
    hint = "start vLLM with VLLM_SERVER_DEV_MODE=1 to allow pausing and weight updates"

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        own = read_options(VLLMOptions, options.options)
        super().__init__(options, own, retry)
        self.logprob_kind = LOGPROB_KINDS[own.logprobs_mode]
        self._control = own.control
        self._takes_levels = False

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._generate_with_images(request) if request.images else super().generate(request)

    async def _generate_with_images(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if not self._takes_levels:
            await self._check_pixel_form()
            self._takes_levels = True
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _check_pixel_form(self) -> None:
        """Check that the servers take pixels in the form of `RequestImage.item`: let each server prepare a small image,
        and compare the form of the prepared pixels. A server that takes another form would read the pixels as a
        different image, without an error. Raises EngineRejected if a server takes another form, or does not show which
        form it takes."""
        part = {"type": "image_url", "image_url": {"url": PROBE_IMAGE}}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
        if self._model is not None:
            body["model"] = self._model
        try:
            rendered = await self._servers.query_all(lambda server: server.post(RENDER, body))
        except StatusFailure as failure:
            fault = translate(failure, self.name).message
            raise EngineRejected(
                f"engine {self.name!r} does not show how its model takes pixels: {fault}",
                hint="images need vLLM 0.32 or later with --enable-scale-out, and a chat template that takes images",
            ) from None
        for answer in rendered:
            form = pixel_form(answer)
            if form != "uint8":
                raise EngineRejected(
                    f"engine {self.name!r} takes pixels as {form}, and not as levels of 8 bits",
                    hint="start vLLM 0.32 or later, with --mm-device-do-normalize",
                )

    def body(self, request: GenerateRequest, route: str, salt: Callable[[], str], attempt: int) -> list[Buffer]:
        sampling = request.sampling
        # Send every field that affects the sampling. For a missing field, the server would use the model's
        # generation_config.json.
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "logprobs": 0,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            **penalties_and_bias(sampling),
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        if sampling.constraint is not None:
            params["structured_outputs"] = structured_outputs(sampling.constraint)
        mark = salt()
        # Each attempt has its own id: the server may still be running an earlier attempt whose connection broke.
        body: dict[str, Any] = {
            "request_id": f"{request.request_id}-{attempt}",
            "cache_salt": mark,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._model is not None:
            body["model"] = self._model
        if route == GENERATE:
            body["sampling_params"] = params
            if request.images:
                body["return_token_ids"] = True  # needed, or else the server does not report where the images are
                return [
                    *_features(request.images, mark),
                    b"," + orjson.dumps(body)[1:-1] + b',"token_ids":',
                    ids_json(request.input_ids),
                    b"}",
                ]
            return body_with_ids(body, "token_ids", request.input_ids)
        if request.images:
            raise EngineRejected(
                f"engine {self.name!r} has no route {GENERATE}, the only one that takes ids with images",
                hint="start vLLM with --enable-scale-out",
            )
        body |= {**params, "return_token_ids": True, "return_weight_versions": True}
        return body_with_ids(body, "prompt", request.input_ids)

    def aborted(self, error: Exception, reply: _VLLMReply, *, paused: bool) -> bool:
        # When a pause aborts a stream, vLLM 0.26 often ends it with neither an error nor a finish reason.
        return paused and reply.unfinished

    def other_route(self, route: str, error: Exception, reply: _VLLMReply) -> str | None:
        # The server has no generate route, or the route does not stream.
        missing = isinstance(error, StatusFailure) and error.status in ROUTE_MISSING
        return COMPLETIONS if route == GENERATE and (missing or reply.unfinished) else None

    def note(self, last: Chunk, reply: _VLLMReply) -> None:
        """Set `advice` if the server does not report cached tokens, otherwise clear it."""
        if last.prompt_tokens is not None and last.finish is not FinishReason.ABORT:
            if last.cached_tokens is None and not self.advice:
                log.info("engine %s %s", self.name, UNCOUNTED)
            self.advice = UNCOUNTED if last.cached_tokens is None else ""

    async def check(self) -> None:
        await self._http.check("/health")
        await self._servers.find()

    async def order_pause(self, mode: str) -> None:
        self._check_control()
        await self.control(f"/pause?mode={mode}", seconds=None)

    async def order_resume(self) -> None:
        if self._control:  # otherwise the owner of the server resumes it
            await self.control("/resume")

    async def set_version(self, version: int) -> None:
        if self._control:
            await super().set_version(version)
        else:
            self.versions = self.versions.with_version(version, version)

    def _check_control(self) -> None:
        if not self._control:
            raise EngineRejected(
                f"engine {self.name!r} is paused and given weights by its owner alone",
                hint="its option `control` is false",
            )

    async def update_weights(self, weights: str, version: int) -> None:
        """Load weights from a folder in Hugging Face layout that the server can read, and drop all cached keys and
        values.

        The adapter calls `reload_weights`, a method of vLLM's workers, through `/collective_rpc`, because vLLM's routes
        for weights do not read from disk. Raises EngineRejected if the option `control` is False, if the server is not
        in development mode, or if this process sees that the folder has no weights (vLLM would exit). Raises
        EngineUnavailable if the server has exited or has not dropped its cache.
        """
        self._check_control()
        if (trouble := await asyncio.to_thread(unreadable_weights, self._servers.urls, weights)) is not None:
            raise EngineRejected(
                f"engine {self.name!r} was not given {weights}: {trouble}",
                field="weights",
                hint="a server that shares no files with this machine may have other folders: give it a path whose"
                " parent folder does not exist here",
            )
        reload = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
        try:
            await self.control("/collective_rpc", reload, seconds=WEIGHTS_SECONDS)
        except EngineUnavailable as error:
            if (await self.health()).ok:
                raise
            raise EngineUnavailable(
                f"engine {self.name!r} has ended itself over the weights in {weights}: {error.message}",
                hint="start it again; vLLM ends when it cannot read a folder of weights",
            ) from error
        # If the route cannot reset the cache, it still replies with status 200, and reports the failure in the body.
        answers = await self.control("/reset_prefix_cache?reset_running_requests=true")
        if any(isinstance(answer, dict) and answer.get("success") is False for answer in answers):
            raise EngineUnavailable(f"engine {self.name!r} has new weights, and keeps the prefix cache of the old ones")
        await self.set_version(version)


def pixel_form(rendered: Any) -> str:
    """Return the type of the pixel values in a reply of the render route, or "unknown" if it has none."""
    try:
        [item] = (rendered[0] if isinstance(rendered, list) else rendered)["features"]["kwargs_data"]["image"]
        return str(msgspec.msgpack.decode(base64.b64decode(item))["pixel_values"]["data"][0])
    except (LookupError, TypeError, ValueError, msgspec.DecodeError):
        return "unknown"


def _features(images: Sequence[RequestImage], salt: str) -> list[Buffer]:
    """Return the beginning of a request body, in several pieces. This part of the body has the images of the prompt.
    The pieces are not joined, because the pixel values have many megabytes and joining would copy them. The server
    caches encoded images by the hash given here. The hash depends on the cache salt, so that no encoding by older
    weights is reused."""
    hashes = [hashlib.sha256(f"{salt}/{image.span.digest}".encode()).hexdigest() for image in images]
    placed = {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": [{"offset": image.span.start, "length": image.span.length} for image in images]},
    }
    pieces: list[Buffer] = [b'{"features":' + orjson.dumps(placed)[:-1] + b',"kwargs_data":{"image":']
    for at, image in enumerate(images):
        pieces += [b',"' if at else b'["', image.item, b'"']
    return [*pieces, b"]}}"]


def unreadable_weights(servers: Sequence[str], weights: str) -> str | None:
    """Return what is wrong with a folder of weights. Returns None if the folder is good, or if it cannot be seen from
    here.

    A folder can be seen if one of the URLs in `servers` is on this machine and the folder's parent exists here. If the
    parent is missing here, the server probably runs in a container with other folders.
    """
    path = Path(weights)
    local = any(urlsplit(url).hostname in LOCAL_HOSTS for url in servers)
    try:
        if not (local and path.is_absolute() and path.parent.is_dir()):
            return None
        if not path.exists():
            return "there is no such folder"
        if not path.is_dir():
            return "it is no folder"
        if not any(file.name.endswith(WEIGHT_FILES) for file in list(path.iterdir())):
            return f"it holds no file {', '.join(WEIGHT_FILES)}"
    except OSError:  # not readable for this process, but perhaps for the server
        return None
    return None


def _logprobs(given: _Logprobs | None, ids: list[int], engine: str) -> list[float]:
    """Return the log-probabilities of `ids`, in the format of the generate route or of `/v1/completions`. Raises
    EngineMisbehaved if a log-probability is missing or belongs to another id."""
    if given is None:
        return checked_logprobs(ids, [], engine)
    if given.token_logprobs is not None:
        return checked_logprobs(ids, given.token_logprobs, engine)
    entries = given.content or []
    if len(entries) == len(ids) == 1:  # fast path for the usual event, which has one token
        value = entries[0].logprob
        if entries[0].token_id == ids[0] and value is not None and value > MISSING_LOGPROB:
            return [value]
    for entry, token_id in zip(entries, ids, strict=False):
        named: int | str | None = entry.token_id
        if named is None and entry.token is not None and entry.token.startswith("token_id:"):
            text = entry.token.removeprefix("token_id:")
            named = token_id if text == str(token_id) else text[:100]
        if named is not None and named != token_id:
            raise EngineMisbehaved(f"engine {engine!r} gave the log-probability of {named} for token {token_id}")
    return checked_logprobs(ids, [entry.logprob for entry in entries], engine)
