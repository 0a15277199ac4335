"""An engine behind SGLang's HTTP protocol: `/generate` with token ids, and the control routes.

The responses are those of SGLang 0.5.17 on a GPU (tests/golden/real_engines), including its bugs. In particular:

- A request that makes the real server exit also ends this server.
- Requests that arrive during a pause wait for its end. If the pause had the mode `abort`, these requests get status 499
  after the pause.
- The error of a streamed request is sent as an event of the stream.

`with_images` handles images as the source code of SGLang 0.5.23 does for models of the Qwen-VL families.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn, cast

import msgspec

from outrider.concurrency.events import wait_for_event
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.policy_versions import label_of, version_of
from outrider.engines.base import Chunk, Engine, GenerateRequest, PauseMode, RequestImage
from outrider.errors import ContextOverflow, EngineError, EngineRejected
from outrider.lab.fakes.engine_servers.asgi import (
    AskedSampling,
    HttpCall,
    Routes,
    Served,
    ServerDied,
    ServeSettings,
    labelled,
)
from outrider.tokens.rendering.image_grids import PLACEHOLDER, ImageSettings
from outrider.tokens.rendering.tokenizer import ANY_IDS, TextStream
from outrider.trajectory import FinishReason, ImageSpan
from outrider.vision.pixels import Pixels, UnreadableImage, pixels_of, vllm_item

PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
ABORTED = 499
HEALTH_SECONDS = 20.0


class _Sampling(AskedSampling, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int = 128
    top_k: int = -1
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: int | None = None

    def constraint(self) -> Constraint | None:
        """Return the requested constraint, or None. Raises EngineRejected if the request has more than one."""
        forms = {
            ConstraintKind.JSON_SCHEMA: self.json_schema,
            ConstraintKind.REGEX: self.regex,
            ConstraintKind.GRAMMAR: self.ebnf,
            ConstraintKind.TOOL_CALLS: self.structural_tag,
        }
        found = [Constraint(kind, text) for kind, text in forms.items() if text is not None]
        if len(found) > 1:
            raise EngineRejected(
                "only one of regex, json_schema, ebnf and structural_tag can be set", field="sampling_params"
            )
        return found[0] if found else None


class _Generate(msgspec.Struct, kw_only=True):
    input_ids: list[int]
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    return_logprob: bool = False
    rid: str = ""
    routing_key: str | None = None
    extra_key: str | None = None
    stream: bool = False
    image_data: list[str] | None = None
    return_prompt_token_ids: bool = False


class _Pause(msgspec.Struct):
    mode: str = "abort"


class _NewVersion(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _Weights(msgspec.Struct):
    model_path: str
    weight_version: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    keep_pause: bool = False


class ServedSGLang(Served):
    """SGLang's routes for one engine. `health_checks` counts the requests to `/health`."""

    owner = "sglang"
    tokenizer_length = 131_072
    """The real server answers `/tokenize` with the limit in the tokenizer's files."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        routes: Routes = {
            ("GET", "/health"): self._health,
            ("POST", "/generate"): self._generate,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/flush_cache"): self._flush_cache,
            ("POST", "/update_weight_version"): self._update_weight_version,
            ("POST", "/update_weights_from_disk"): self._update_weights,
        }
        super().__init__(engine, settings, routes)
        self.health_checks = 0
        self._paused: str | None = None
        """The mode of the current pause, or None."""
        self._resumed = asyncio.Event()
        self._in_flight: set[asyncio.Task[None]] = set()
        """The tasks of the requests that a real scheduler would have: admitted generations, and health checks."""

    def error_body(self, message: str, status: int) -> Any:
        """Return the body of an error reply. It does not contain the status. Errors within a stream have another
        format."""
        return {"error": {"message": message}}

    async def _health(self, call: HttpCall) -> None:
        """Report the engine's health. During a pause, wait up to HEALTH_SECONDS for its end, because the real server's
        health check samples a token."""
        self.health_checks += 1
        if self._paused is not None:
            with self._tracked():
                await wait_for_event(self._resumed, HEALTH_SECONDS)
        ok = self._paused is None and (await self.engine.health()).ok
        await call.answer(200 if ok else 503)

    async def _generate(self, call: HttpCall) -> None:
        content = await call.body()
        try:
            body = msgspec.json.decode(content, type=_Generate)
        except msgspec.ValidationError:
            # SGLang 0.5.17 does not check names and types, so its handler crashes on wrong names or types.
            await call.answer_text(500, "Internal Server Error")
            return
        except msgspec.DecodeError as error:
            await call.answer(400, {"object": "error", "message": str(error), "type": "Bad Request", "code": 400})
            return
        end = self.settings.tokenizer.vocabulary.end if self.settings.tokenizer else ANY_IDS.end
        if any(not 0 <= token < end for token in body.input_ids):
            self._die()
        await call.while_connected(self._answer(call, body))

    async def _answer(self, call: HttpCall, body: _Generate) -> None:
        try:
            images: tuple[RequestImage, ...] = ()
            if body.image_data and self.settings.images is not None:  # a model that reads no images ignores them
                ids, images = with_images(body.input_ids, body.image_data, self.settings)
                body = msgspec.structs.replace(body, input_ids=ids)
            request = msgspec.structs.replace(await self._request(body), images=images)
            aborted = await self._held()
            with self._tracked():
                if not aborted:
                    await self._respond(call, request, body)
        except EngineError as error:
            await self._refuse(call, error.message, error.http_status, body)
            return
        except IndexError:  # the real handler also crashes here, which closes the connection
            await call.cut()
            return
        except asyncio.CancelledError:
            if not self.dead:
                raise
            cast("asyncio.Task[None]", asyncio.current_task()).uncancel()
            await call.cut()
            return
        if aborted:
            await self._refuse(call, f"Request {body.rid} was aborted", ABORTED, body)

    async def _refuse(self, call: HttpCall, message: str, status: int, body: _Generate) -> None:
        if not body.stream:
            await call.answer(status, self.error_body(message, status))
            return
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "code": status, "retryable": status >= 500}
        await call.event({"error": error})
        await call.end()

    async def _held(self) -> bool:
        """Wait while the server is paused. Returns True if the request must be aborted after the pause, because the
        pause had the mode `abort`."""
        aborted = False
        while self._paused is not None:
            aborted = aborted or self._paused == "abort"
            await self._resumed.wait()
        return aborted

    @contextmanager
    def _tracked(self) -> Generator[None, None, None]:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._in_flight.add(task)
        try:
            yield
        finally:
            self._in_flight.discard(task)

    def _die(self) -> NoReturn:
        """End the server, because the request would make the real server exit. Raises ServerDied."""
        self.dead = True
        for task in self._in_flight - {asyncio.current_task()}:
            task.cancel()
        raise ServerDied

    async def _request(self, body: _Generate) -> GenerateRequest:
        """Check and convert a request. Raises EngineRejected, or ContextOverflow if prompt and output do not fit into
        the context."""
        sampling = body.sampling_params
        if not body.input_ids:
            raise EngineRejected("input_ids cannot be empty.")
        if not 0 < sampling.top_p <= 1:
            raise EngineRejected(f"top_p must be in (0, 1], got {sampling.top_p}.")
        if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
            raise EngineRejected(
                f"min_new_tokens must be in [0, max_new_tokens({sampling.max_new_tokens})],"
                f" got {sampling.min_new_tokens}."
            )
        prompt = len(body.input_ids)
        total = prompt + sampling.max_new_tokens
        context = (await self.engine.health()).context_tokens
        if context is not None and prompt >= context:
            raise ContextOverflow(
                f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        if context is not None and total > context:
            raise ContextOverflow(
                f"Requested token count exceeds the model's maximum context length of {context} tokens."
                f" You requested a total of {total} tokens: {prompt} tokens from the input messages and"
                f" {sampling.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input"
                " messages or the completion to fit within the limit."
            )
        return self.generation(
            body.rid,
            body.routing_key,
            body.input_ids,
            sampling,
            sampling.constraint(),
            max_tokens=sampling.max_new_tokens,
            top_k=sampling.top_k,
            seed=sampling.sampling_seed,
            min_tokens=sampling.min_new_tokens,
        )

    async def _respond(self, call: HttpCall, request: GenerateRequest, body: _Generate) -> None:
        """Run one generation and respond. Raises EngineError."""
        cache, salt = self.settings.prefix_cache, body.extra_key or ""
        weights = (await self.engine.health()).version
        cached = cache.look(salt, body.input_ids, weights) if cache else None
        reply = _SGLangWriter(request, self.settings, cached, body)
        content: dict[str, Any] = {}
        async with aclosing(self.engine.generate(request)) as chunks:
            async for chunk in chunks:
                event = reply.event(chunk, (await self.engine.health()).version)
                if body.stream and event is not None:
                    await call.event(event)
                content = event or content
        if cache:
            cache.keep(salt, [*body.input_ids, *reply.sampled], weights)
        if body.stream:
            await call.end()
        else:
            await call.answer(200, content)

    async def _model_info(self, call: HttpCall) -> None:
        health = await self.engine.health()
        if not health.ok:
            await call.answer(503)
            return
        label = label_of(health.version)
        await call.answer(200, {"model_path": self.settings.model, "is_generation": True, "weight_version": label})

    async def _server_info(self, call: HttpCall) -> None:
        flag = self.settings.incremental
        await call.answer(200, {"model_path": self.settings.model, "incremental_streaming_output": flag})

    async def _pause(self, call: HttpCall) -> None:
        mode = (await call.read(_Pause)).mode
        if mode not in PAUSE_MODES:
            raise EngineRejected(f"unknown pause mode {mode!r}")
        self._paused = mode
        await self.engine.pause(PAUSE_MODES[mode])
        await call.answer(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, call: HttpCall) -> None:
        await self.engine.resume()
        self._paused = None
        self._resumed.set()
        self._resumed = asyncio.Event()
        await call.answer(200, {"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, call: HttpCall) -> None:
        if self._in_flight:
            await call.answer_text(400, "Cache not flushed because there are pending requests.")
            return
        self.forget_prefixes()
        await call.answer_text(200, "Cache flushed.")

    async def _update_weight_version(self, call: HttpCall) -> None:
        body = await call.read(_NewVersion)
        if body.abort_all_requests:
            await self.engine.pause("abort")
            await self.engine.resume()
        await self.set_version(body.new_version)
        await call.answer(200, {"success": True, "new_version": body.new_version})

    async def _update_weights(self, call: HttpCall) -> None:
        body = await call.read(_Weights)
        loader = self.loader()
        if body.abort_all_requests:
            await self.engine.pause("abort")
        # The pause `in_place` leaves requests in the scheduler. Before the real server flushes the cache, it asserts
        # that the scheduler has no requests. Here the assertion would fail, and the real server would exit.
        if body.flush_cache and self._paused == "in_place" and self._in_flight:
            self._die()
        try:
            await loader.update_weights(body.model_path, version_of(body.weight_version))
        except EngineRejected as error:
            await call.answer(400, {"success": False, "message": error.message})
            return
        if body.flush_cache:
            self.forget_prefixes()
        if not body.keep_pause and self._paused is None:
            await self.engine.resume()
        message = f"Succeeded to update model weights. Weight version updated to {body.weight_version}."
        await call.answer(200, {"success": True, "message": message, "num_paused_requests": 0})


class _SGLangWriter:
    """Writes one response. Each event of a stream also repeats all earlier content, unless the server streams
    incrementally."""

    def __init__(self, request: GenerateRequest, settings: ServeSettings, cached: int | None, body: _Generate) -> None:
        self.sampled: list[int] = []
        self._request = request
        self._cached = cached
        self._logprobs = body.return_logprob
        self._prompt = body.input_ids if body.return_prompt_token_ids and settings.reports_prompts else None
        self._interval = body.sampling_params.stream_interval or 1
        self._sent = 0
        self._spans = settings.spans
        self._cumulative = not (body.stream and settings.incremental)
        self._stream: TextStream | None = settings.tokenizer.stream() if settings.tokenizer else None
        self._ids: list[int] = []
        self._entries: list[tuple[float, int, None]] = []
        self._text = ""

    def event(self, chunk: Chunk, version: int) -> dict[str, Any] | None:
        """Return the next event, or None while fewer than `stream_interval` tokens wait to be sent. The first chunk and
        the last one are sent at once. `version` is the current version of the server's weights."""
        if not self._cumulative and self._sent == len(self.sampled):
            self._ids, self._entries, self._text = [], [], ""
        self.sampled += chunk.ids
        self._ids += chunk.ids
        self._text += self._stream.push(chunk.ids) if self._stream else ""
        count = len(self.sampled)
        if self._logprobs:
            self._entries += [
                (value, token_id, None) for token_id, value in zip(chunk.ids, chunk.logprobs, strict=True)
            ]
        if chunk.finish is None and self._sent and count - self._sent < self._interval:
            return None
        self._sent = count
        finish = _finish(chunk, count)
        waited = chunk.finish is FinishReason.ABORT and not count
        meta: dict[str, Any] = {
            "id": self._request.request_id,
            "finish_reason": finish,
            "completion_tokens": count,
            "weight_version": label_of(version),
        }
        if not waited:  # the real server omits both counts if the request was aborted before it began
            cached = chunk.cached_tokens if self._cached is None else self._cached
            meta |= {"prompt_tokens": len(self._request.input_ids), "cached_tokens": cached or 0}
        if self._logprobs:
            meta["output_token_logprobs"] = self._entries
        if chunk.versions and self._spans:
            meta["weight_versions"] = labelled(chunk)
        event = {"text": self._text, "output_ids": self._ids, "meta_info": meta}
        return event if self._prompt is None else event | {"prompt_token_ids": self._prompt}


def with_images(
    ids: list[int], image_data: list[str], settings: ServeSettings
) -> tuple[list[int], tuple[RequestImage, ...]]:
    """Return the ids and the images of a prompt. Each image's placeholder id is repeated once for each token of the
    image. Raises IndexError if there are more placeholders than images. If there are fewer, the last images are
    ignored."""
    assert settings.images is not None
    assert settings.tokenizer is not None
    placeholder = settings.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    read = [_pixels(data, settings.images) for data in image_data]
    if not settings.keeps_ids:
        ids = settings.tokenizer.encode(settings.tokenizer.decode(ids))
    long: list[int] = []
    images: list[RequestImage] = []
    for token_id in ids:
        if token_id != placeholder:
            long.append(token_id)
            continue
        pixels = read[len(images)]
        item, count = vllm_item(pixels), settings.images.tokens_of(pixels.grid)
        span = ImageSpan(hashlib.sha256(item).hexdigest(), len(long), count, pixels.grid)
        images.append(RequestImage(span=span, item=item))
        long += [placeholder] * count
    return long, tuple(images)


def _pixels(text: str, settings: ImageSettings) -> Pixels:
    """Return the patches of an image that is sent in base64 or as a data URL. The real server also accepts files and
    URLs. Raises EngineRejected."""
    try:
        data = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
        return pixels_of(data, settings)
    except (ValueError, UnreadableImage) as error:
        raise EngineRejected(f"Could not decode image: {error}") from error


def _finish(chunk: Chunk, length: int) -> dict[str, Any] | None:
    if chunk.finish is None:
        return None
    if chunk.finish is FinishReason.STOP:
        return {"type": "stop", "matched": chunk.stop_match}
    if chunk.finish is FinishReason.LENGTH:
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted" if length else "Abort in waiting queue"}
