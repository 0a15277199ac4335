"""The adapter for SGLang servers. Sends and receives token ids through `/generate`.

It was written from SGLang's sources (0.5.23) and tested with a server of 0.5.17 on a GPU. The tests use recorded
replies of this server. The code for images follows the sources of 0.5.15 to 0.5.23, and was never tested with a real
server. The events of a stream may be cumulative (the default) or incremental, as the counts in each event show.
Invariant: an id is passed on only with the log-probability that the server sent for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import ConstraintKind
from outrider.engines.adapters.ids_json import body_with_ids, ids_json
from outrider.engines.adapters.options import ServerOptions, read_options
from outrider.engines.adapters.policy_versions import LabelSpan
from outrider.engines.adapters.server_api import checked_logprobs, finish_of, penalties_and_bias
from outrider.engines.adapters.server_engine import WEIGHTS_SECONDS, ServerEngine, ServerEvent, ServerReply
from outrider.engines.base import (
    Capability,
    Chunk,
    EngineOptions,
    GenerateRequest,
    KnownVersions,
    PauseMode,
    RequestImage,
)
from outrider.engines.http.client import DEFAULT_RETRY
from outrider.engines.http.failures import StatusFailure
from outrider.errors import EngineError, EngineMisbehaved, EngineRejected
from outrider.trajectory import FinishReason, Ids, LogprobKind
from outrider.wire.http_connections import Buffer

log = logging.getLogger("outrider.engine")

CONSTRAINT_FIELDS = {
    ConstraintKind.JSON_OBJECT: "json_schema",  # with a schema that allows any object, as SGLang's chat route does
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
    ConstraintKind.TOOL_CALLS: "structural_tag",
}
ABORTED = 499
"""The code of the error event that the server sends for a request that a pause has aborted."""
ABORTED_WORDS = re.compile(rb"Request \w{32} was aborted")
OLD_IMAGES = (
    "may keep what its image encoder made of images with earlier weights: if the image encoder is trained, start SGLang"
    " with SGLANG_VLM_CACHE_SIZE_MB=0"
)
IDS_PER_TOKEN = 4096
"""With images in the prompt, the adapter asks for one event per 1 + (number of prompt ids) // IDS_PER_TOKEN tokens.
Each event repeats all ids of the prompt, so with a long prompt, an event per token would cost too much."""
SETTINGS_SECONDS = 5.0
"""Timeout for the request of the server's settings. SGLang 0.5.17 took 1.3 s to answer."""
INCREMENTAL = (
    "repeats all tokens of a reply with each new one, which halves its speed with many replies at once: start SGLang"
    " with --incremental-streaming-output"
)


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[LabelSpan] | None = None


class _Event(ServerEvent):
    output_ids: list[int] = msgspec.field(default_factory=list)
    meta_info: _Meta | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """The ids of the prompt, if the request asks for them. Every event repeats them, so they are decoded only in the
    first event."""


class _SGLangReply(ServerReply[_Event]):
    """Reads the events of `/generate`. `repeats` is True if each event repeats the tokens of earlier events. It is None
    until the second event with tokens has shown whether events do so."""

    event = msgspec.json.Decoder(_Event)
    events = msgspec.json.Decoder(list[_Event])

    def __init__(self, engine: str, versions: Callable[[], KnownVersions]) -> None:
        super().__init__(engine, versions)
        self.repeats: bool | None = None
        self._labels: list[LabelSpan] = []

    def abort(self) -> None:
        self.finish(FinishReason.ABORT, labels=self._labels)

    def take(self, event: _Event) -> None:
        meta = event.meta_info
        if meta is None:
            raise EngineMisbehaved(f"engine {self._engine!r} sent an event without meta_info")
        if (finish := meta.finish_reason) and finish.type == "abort" and (finish.status_code or 0) >= 400:
            raise StatusFailure(finish.status_code or 0, orjson.dumps({"message": finish.message}))
        # `total` is the number of tokens so far, and `new` the number since the last event. A cumulative event has
        # `total` ids, an incremental event `new` ids. In the first event, both are equal.
        total, new = meta.completion_tokens, meta.completion_tokens - self._length
        ids, entries = event.output_ids, meta.output_token_logprobs
        if new:
            self.first_token()
            if not self._length and event.prompt_token_ids:
                self._prompt_ids = decode_ids(event.prompt_token_ids, self._engine)
        if finish is not None and finish.type == "abort" and len(ids) == 1 < total:
            # If the aborted request had been requeued, `output_ids` has only the last id of the reply. The
            # log-probabilities have all ids.
            ids = [entry[1] for entry in entries]
        if new < 0 or len(ids) not in (total, new) or len(entries) not in (total, new):
            raise EngineMisbehaved(
                f"engine {self._engine!r} sent {len(ids)} ids and {len(entries)} log-probabilities in an event"
                f" that makes {total} after {self._length}"
            )
        if new and self._length:
            self.repeats = len(ids) > new
        ids, entries = ids[len(ids) - new :], entries[len(entries) - new :]
        if any(token_id != entry[1] for token_id, entry in zip(ids, entries, strict=True)):
            raise EngineMisbehaved(f"engine {self._engine!r} gave the log-probability of other tokens than it sampled")
        self.add(ids, checked_logprobs(ids, [entry[0] for entry in entries], self._engine))
        # For a reply without version spans, the label of an event applies to the new tokens of the event.
        if (label := meta.weight_version) is not None and new:
            start = total - new if self._labels else 0
            if self._labels and self._labels[-1].version == label:
                start = self._labels.pop().start
            self._labels.append(LabelSpan(label, start, total))
        if finish is not None:
            self.finish(
                finish_of(finish.type, self._engine),
                finish.matched,
                meta.weight_versions or self._labels,
                cached_tokens=meta.cached_tokens,
                prompt_tokens=meta.prompt_tokens,
            )


class SGLangEngine(ServerEngine[_SGLangReply]):
    """A `ServerEngine` that also implements `LoadsWeights`.

    The server computes log-probabilities after temperature and before truncation, so their kind is SAMPLING. SGLang has
    no pause mode "finish". For this mode, `pause` holds back new generations, waits until this adapter's running ones
    have ended, and then pauses the server.
    """

    reply = _SGLangReply
    capabilities = ServerEngine.capabilities | {Capability.READS_PNG}
    logprob_kind = LogprobKind.SAMPLING
    route = "/generate"
    label_route = "/model_info"
    session_header = "X-SMG-Routing-Key"  # a header, because routers drop the field `routing_key` of the body
    pause_modes: ClassVar[dict[PauseMode, str]] = {"finish": "abort", "abort": "abort", "keep": "retract"}
    """The server's name for each pause mode. For "finish", `abort` cuts off nothing, because this adapter pauses the
    server only after its generations have ended. For "keep", SGLang's `in_place` is not used: with `in_place`, the
    server would exit if its cache were flushed during any generation, even that of a health check."""
    gated = frozenset({"finish", "abort"})

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        super().__init__(options, read_options(ServerOptions, options.options), retry)
        self._requested_settings = False
        self._read_images = self._warned = False

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._generate_with_images(request) if request.images else super().generate(request)

    async def _generate_with_images(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Generate, and check the prompt ids that the server reports with the first token. The server computes the size
        of each image in patches (its grid) itself, and inserts one placeholder for each token of the image. If the
        reported ids equal the request's ids, the server has read every image at the right position and in the right
        size."""
        read = False
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.ids and not read:
                    _check_read(request, chunk, self.name)
                    spans = [(image.span.start, image.span.start + image.span.length) for image in request.images]
                    chunk = msgspec.structs.replace(chunk, prompt_images=spans)
                    read = self._read_images = True
                yield chunk

    def body(self, request: GenerateRequest, route: str, salt: Callable[[], str], attempt: int) -> list[Buffer]:
        if request.sampling.logit_bias and self._servers.routed:
            raise EngineRejected(
                f"engine {self.name!r} is SGLang's router, which drops a request's logit_bias",
                hint=f"add its workers instead: outrider engines add sglang-router={self._http.url}",
            )
        sampling = request.sampling
        # The server replies 400 to an unknown key in `sampling_params`, so only documented keys are sent.
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        altered = penalties_and_bias(sampling)
        if "min_tokens" in altered:
            altered["min_new_tokens"] = altered.pop("min_tokens")
        if sampling.repetition_penalty == 1:
            del altered["repetition_penalty"]
        params |= altered
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if (form := sampling.constraint) is not None:
            text = '{"type": "object"}' if form.kind is ConstraintKind.JSON_OBJECT else form.text
            params[CONSTRAINT_FIELDS[form.kind]] = text
        body = {
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "rid": request_name(request, attempt),
            "routing_key": request.session_key,
            "extra_key": salt(),
            "stream": True,
        }
        if not request.images:
            return body_with_ids(body, "input_ids", request.input_ids)
        if self._servers.routed:
            raise EngineRejected(
                f"engine {self.name!r} is SGLang's router, through which no images are sent",
                hint=f"add its workers instead: outrider engines add sglang-router={self._http.url}",
            )
        params["stream_interval"] = 1 + len(request.input_ids) // IDS_PER_TOKEN
        body["return_prompt_token_ids"] = True
        ids = collapsed(request.input_ids, request.images, self.name)
        return [*_image_data(request.images), b"," + orjson.dumps(body)[1:-1] + b',"input_ids":', ids_json(ids), b"}"]

    def aborted(self, error: Exception, reply: _SGLangReply, *, paused: bool) -> bool:
        """Return True if the server has aborted the request, even if this adapter did not pause the server. In a
        stream, the error code shows this; in any other response, only the message does."""
        return isinstance(error, StatusFailure) and (
            error.status == ABORTED or (error.status == 400 and ABORTED_WORDS.search(error.body) is not None)
        )

    def note(self, last: Chunk, reply: _SGLangReply) -> None:
        """Update `advice` if the reply shows whether the server's events are cumulative."""
        if reply.repeats is not None:
            self._advise(reply.repeats)

    async def check(self) -> None:
        """Find the servers, and check the router if there is one at the URL. A server's own `/health` is not used:
        it samples a token, which takes a second, or 20 s while the server is paused. The routes used here always
        respond."""
        await self._servers.find()
        if self._servers.routed:
            await self._http.check("/health")
        await self._request_settings()

    async def order_pause(self, mode: str) -> None:
        await self.control("/pause_generation", {"mode": mode})

    async def order_resume(self) -> None:
        await self.control("/continue_generation", {})

    async def update_weights(self, weights: str, version: int) -> None:
        """Load weights from a folder that the server can read. The server then drops its cached keys and values. A
        paused server stays paused. Raises EngineRejected if the server has not loaded the weights."""
        body = {
            "model_path": weights,
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        for answer in await self.control("/update_weights_from_disk", body, seconds=WEIGHTS_SECONDS):
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineRejected(f"engine {self.name!r} did not load {weights}: {answer.get('message')}")
        self.versions = self.versions.with_version(version)
        self._warn_of_images()

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        self._warn_of_images()

    def _warn_of_images(self) -> None:
        """Log a warning, only once: the server may combine new weights with images that were encoded with old weights.
        The server has no route to clear its cache of encoded images, and this cache has no salt."""
        if self._read_images and not self._warned:
            self._warned = True
            log.warning("engine %s %s", self.name, OLD_IMAGES)

    def _advise(self, repeats: bool) -> None:
        if repeats and not self.advice:
            log.warning("engine %s %s", self.name, INCREMENTAL)
        self.advice = INCREMENTAL if repeats else ""

    async def _request_settings(self) -> None:
        """Query the servers' settings once, and set `advice` if a server does not stream incrementally. If the query
        fails, `note` sets `advice` later."""
        if self._requested_settings:
            return
        self._requested_settings = True
        try:
            async with asyncio.timeout(SETTINGS_SECONDS):
                settings = await self._servers.query_all(lambda server: server.get("/server_info"))
        except (StatusFailure, EngineError, TimeoutError):
            return
        if any(isinstance(each, dict) and each.get("incremental_streaming_output") is False for each in settings):
            self._advise(True)


def collapsed(ids: Ids, images: Sequence[RequestImage], engine: str) -> Ids:
    """Return the ids of a prompt with one placeholder id for each image. The server replaces this id by as many
    placeholders as the image has tokens. Raises EngineRejected if the prompt has a placeholder outside of the images,
    because the server would read such a placeholder as another image."""
    kept = np.ones(len(ids), dtype=np.bool_)
    for image in images:
        kept[image.span.start + 1 : image.span.start + image.span.length] = False
    short = ids[kept]
    if int(np.count_nonzero(short == ids[images[0].span.start])) != len(images):
        raise EngineRejected(
            f"engine {engine!r} cannot be given this prompt: it has images, and a placeholder of an image that the"
            " model itself has sampled, which SGLang would read as one more image",
            hint="begin a new conversation",
        )
    return short


def _image_data(images: Sequence[RequestImage]) -> list[Buffer]:
    """Return the beginning of a request body, in several pieces. This part of the body has the images of the prompt.
    The pieces are not joined, because joining would copy many megabytes."""
    pieces: list[Buffer] = [b'{"image_data":']
    for at, image in enumerate(images):
        pieces += [b',"data:image/png;base64,' if at else b'["data:image/png;base64,', image.item, b'"']
    return [*pieces, b"]"]


def _check_read(request: GenerateRequest, chunk: Chunk, engine: str) -> None:
    """Raise EngineMisbehaved if the server reports other prompt ids than the request has."""
    if chunk.prompt_ids is None:
        raise EngineMisbehaved(
            f"engine {engine!r} does not report the ids of a prompt with images",
            hint="images need SGLang 0.5.15 or later",
        )
    if not np.array_equal(chunk.prompt_ids, request.input_ids):
        raise EngineMisbehaved(
            f"engine {engine!r} was given a prompt of {len(request.input_ids)} ids with {len(request.images)} images,"
            f" and has read another prompt, of {len(chunk.prompt_ids)} ids",
            hint="the server must read images with the settings in its model's folder (no image part in"
            " --mm-process-config), must keep ids (SGLANG_MM_AVOID_RETOKENIZE is true by default), and must have a"
            " model that reads images",
        )


def decode_ids(raw: msgspec.Raw, engine: str) -> list[int] | None:
    try:
        return msgspec.json.decode(raw, type=list[int] | None)
    except msgspec.DecodeError as error:
        raise EngineMisbehaved(f"engine {engine!r} reports a prompt that is no list of ids: {error}") from error


def request_name(request: GenerateRequest, attempt: int) -> str:
    """Return the `rid` of one attempt to send a request. All `rid`s have the same length, so that none is the beginning
    of another: SGLang aborts all requests whose `rid` begins with the `rid` to abort."""
    return hashlib.blake2b(f"{request.request_id}/{attempt}".encode(), digest_size=16).hexdigest()
