"""An engine behind vLLM's HTTP protocol: generation from token ids, completions from ids, and the control routes.

The responses have the format of vLLM 0.32 on a GPU (tests/golden/real_engines). With some settings, the responses have
the format of vLLM 0.26, in which ids are written as text and weights are not labelled. This server does not render
prompts, so it has no chat routes except `/v1/chat/completions/render`, with a fixed reply.
"""

from __future__ import annotations

import base64
import math
from contextlib import aclosing
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec
import numpy as np

from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.policy_versions import label_of
from outrider.engines.base import Chunk, Engine, GenerateRequest, PauseMode, RequestImage
from outrider.errors import EngineError, EngineRejected, EngineUnavailable
from outrider.lab.fakes.engine_servers.asgi import AskedSampling, HttpCall, Routes, Served, ServeSettings, labelled
from outrider.tokens.rendering.tokenizer import TextStream
from outrider.trajectory import FinishReason, ImageSpan

PAUSE_MODES: dict[str, PauseMode] = {"wait": "finish", "abort": "abort", "keep": "keep"}
DEV_ROUTES = ("/pause", "/resume", "/weight_info", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache")
LABEL_ROUTES = ("/weight_info", "/update_weight_version")
COMPLETION_TOKENS = 16
"""vLLM's default for `max_tokens` on the completions route."""

ERROR_TYPES = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError"}


class _StructuredOutputs(msgspec.Struct):
    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | None = None

    def constraint(self) -> Constraint:
        """Return the requested constraint. Raises EngineRejected if the request does not have exactly one."""
        forms = {
            ConstraintKind.JSON_SCHEMA: None if self.json is None else msgspec.json.encode(self.json).decode(),
            ConstraintKind.JSON_OBJECT: "" if self.json_object else None,
            ConstraintKind.REGEX: self.regex,
            ConstraintKind.GRAMMAR: self.grammar,
            ConstraintKind.TOOL_CALLS: self.structural_tag,
        }
        found = [Constraint(kind, text) for kind, text in forms.items() if text is not None]
        if len(found) != 1:
            raise EngineRejected("structured_outputs must ask for exactly one form", field="structured_outputs")
        return found[0]


class _Sampling(AskedSampling, kw_only=True):
    max_tokens: int | None = None
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    structured_outputs: _StructuredOutputs | None = None


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]
    kwargs_data: dict[str, list[str]]

    def images(self) -> tuple[RequestImage, ...]:
        """Return the images. Raises EngineRejected for an image whose pixel values do not fit its grid."""
        found = []
        parts = (each.get("image", []) for each in (self.mm_hashes, self.mm_placeholders, self.kwargs_data))
        for digest, place, item in zip(*parts, strict=True):
            fields = msgspec.msgpack.decode(base64.b64decode(item))
            time, rows, columns = np.frombuffer(fields["image_grid_thw"]["data"][2].data, np.int64).tolist()
            grid = time, rows, columns
            kind, shape, values = fields["pixel_values"]["data"]
            if kind != "uint8" or shape[0] != math.prod(grid) or len(values.data) != math.prod(shape):
                raise EngineRejected("the pixel values of an image do not fit its grid")
            found.append(RequestImage(span=ImageSpan(digest, place.offset, place.length, grid), item=item.encode()))
        return tuple(found)


class _Generate(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    features: _Features | None = None
    return_token_ids: bool = False
    sampling_params: _Sampling
    request_id: str = ""
    cache_salt: str | None = None
    stream: bool = False


class _Completion(_Sampling, kw_only=True):
    prompt: list[int]
    request_id: str = ""
    cache_salt: str | None = None
    stream: bool = False
    return_token_ids: bool = False
    return_weight_versions: bool = False


class _NewVersion(msgspec.Struct):
    new_version: str


class _ReloadArguments(msgspec.Struct):
    weights_path: str


class _Reload(msgspec.Struct):
    method: Literal["reload_weights"]
    kwargs: _ReloadArguments


class ServedVLLM(Served):
    """vLLM's routes for one engine."""

    owner = "vllm"

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        routes: Routes = {
            ("GET", "/health"): self._health,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions/render"): self._render,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/update_weight_version"): self._update_weight_version,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
        }
        missing = {*(() if settings.labels else LABEL_ROUTES), *(() if settings.dev_mode else DEV_ROUTES)}
        super().__init__(engine, settings, {key: routes[key] for key in routes if key[1] not in missing})
        self._paused: PauseMode | None = None

    def error_body(self, message: str, status: int) -> Any:
        kind = ERROR_TYPES.get(status, "InternalServerError")
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    async def _health(self, call: HttpCall) -> None:
        await call.answer(200 if (await self.engine.health()).ok else 503)

    async def _generate(self, call: HttpCall) -> None:
        if not self.settings.generate_route:
            message = "This route is disabled. Start the server with --enable-scale-out to enable it."
            await call.answer(403, self.error_body(message, 403))
            return
        body = await call.read(_Generate)
        request = await self._request(call, body.token_ids, body.sampling_params, body.request_id, None)
        if body.features is not None:
            request = msgspec.structs.replace(request, images=body.features.images())
        echo = body if body.return_token_ids else None
        reply = _VLLMWriter(request, _TokenChoices(body.request_id, self.settings, echo), self.settings)
        await call.while_connected(self._respond(call, request, reply, body))

    async def _render(self, call: HttpCall) -> None:
        """Answer with a fixed reply, and render nothing. The reply only shows which type of pixel values the model
        takes."""
        await call.read(dict)
        item = {"pixel_values": {"data": [self.settings.pixel_form, [0, 0], b""]}}
        encoded = base64.b64encode(msgspec.msgpack.encode(item)).decode()
        await call.answer(200, {"token_ids": [], "features": {"kwargs_data": {"image": [encoded]}}})

    async def _complete(self, call: HttpCall) -> None:
        body = await call.read(_Completion)
        request = await self._request(call, body.prompt, body, body.request_id, COMPLETION_TOKENS)
        reply = _VLLMWriter(request, _CompletionChoices(body, self.settings), self.settings)
        await call.while_connected(self._respond(call, request, reply, body))

    async def _request(
        self, call: HttpCall, prompt: list[int], sampling: _Sampling, request_id: str, max_tokens: int | None
    ) -> GenerateRequest:
        if not prompt or min(prompt) < 0:
            raise EngineRejected("the prompt must hold at least one token id, none of them negative")
        max_tokens = sampling.max_tokens or max_tokens
        if max_tokens is None:
            max_tokens = max(((await self.engine.health()).context_tokens or 32768) - len(prompt), 1)
        form = sampling.structured_outputs
        return self.generation(
            request_id,
            call.header(b"x-session-id"),
            prompt,
            sampling,
            form.constraint() if form is not None else None,
            max_tokens=max_tokens,
            top_k=sampling.top_k or -1,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
        )

    async def _respond(
        self, call: HttpCall, request: GenerateRequest, reply: _VLLMWriter, body: _Generate | _Completion
    ) -> None:
        if self.settings.refuses_while_paused and self._paused in ("abort", "finish"):
            raise EngineUnavailable("Server is paused")
        cache, salt, prompt = self.settings.prefix_cache, body.cache_salt or "", request.input_ids.tolist()
        weights = -1
        collected: list[Chunk] = []
        try:
            async with aclosing(self.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    # the version is read only now, because a pause may have delayed the request
                    if cache and weights < 0:
                        weights = (await self.engine.health()).version
                        reply.cached_tokens = cache.look(salt, prompt, weights)
                    reply.count(chunk)
                    if chunk.finish is FinishReason.ABORT and not self.settings.finishes_aborted:
                        chunk = msgspec.structs.replace(chunk, finish=None)
                    if body.stream:
                        await call.event(reply.event(chunk))
                    else:
                        collected.append(chunk)
            if cache:
                cache.keep(salt, [*prompt, *reply.sampled], weights)
            if not body.stream:
                await call.answer(200, reply.whole(collected))
                return
            await call.event(reply.closing_event())
        except EngineError as error:
            body = self.error_body(error.message, error.http_status)
            if not call.streaming:
                await call.answer(error.http_status, body)
                return
            await call.event(body)
        await call.end()

    async def _pause(self, call: HttpCall) -> None:
        mode = parse_qs(call.query).get("mode", ["abort"])[0]
        if mode not in PAUSE_MODES:
            raise EngineRejected(f"unknown pause mode {mode!r}")
        self._paused = PAUSE_MODES[mode]
        await self.engine.pause(PAUSE_MODES[mode])
        await call.answer(200, {"status": "paused"})

    async def _resume(self, call: HttpCall) -> None:
        self._paused = None
        await self.engine.resume()
        await call.answer(200, {"status": "resumed"})

    async def _weight_info(self, call: HttpCall) -> None:
        await call.answer(200, {"weight_version": label_of((await self.engine.health()).version)})

    async def _update_weight_version(self, call: HttpCall) -> None:
        label = (await call.read(_NewVersion)).new_version
        await self.set_version(label)
        await call.answer(200, {"success": True, "new_version": label})

    async def _collective_rpc(self, call: HttpCall) -> None:
        """Load weights, as the method `reload_weights` of vLLM's workers does. Clients set the version label with a
        separate request."""
        path = (await call.read(_Reload)).kwargs.weights_path
        loader = self.loader()
        try:
            await loader.update_weights(path, (await self.engine.health()).version)
        except EngineRejected:  # the real server exits if it cannot read the folder
            self.dead = True
            message = f"Call to collective_rpc method failed: Repo id must be in the form 'repo_name': '{path}'."
            await call.answer(500, self.error_body(message, 500))
            return
        await call.answer(200, {"results": [None]})

    async def _reset_prefix_cache(self, call: HttpCall) -> None:
        self.forget_prefixes()
        await call.answer(200, {"success": True})


class _VLLMWriter:
    """Writes one response, as events or as a whole. `choices` writes the part whose format depends on the route."""

    def __init__(
        self, request: GenerateRequest, choices: _TokenChoices | _CompletionChoices, settings: ServeSettings
    ) -> None:
        self.sampled: list[int] = []
        self.cached_tokens: int | None = None
        self._choices = choices
        self._prompt_tokens = len(request.input_ids)
        self._counts_cached = settings.cached_token_counts
        self._engine_cached = 0

    def event(self, chunk: Chunk) -> dict[str, Any]:
        return self._choices.envelope([self._choices.choice(chunk)], None)

    def closing_event(self) -> dict[str, Any]:
        return self._choices.envelope([], self._usage())

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        merged = msgspec.structs.replace(
            chunks[-1],
            ids=[token for chunk in chunks for token in chunk.ids],
            logprobs=[value for chunk in chunks for value in chunk.logprobs],
        )
        return self._choices.envelope([self._choices.choice(merged)], self._usage())

    def count(self, chunk: Chunk) -> None:
        self.sampled += chunk.ids
        self._engine_cached = chunk.cached_tokens or self._engine_cached

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + len(self.sampled),
            "completion_tokens": len(self.sampled),
        }
        if self._counts_cached:
            cached = self._engine_cached if self.cached_tokens is None else self.cached_tokens
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


class _TokenChoices:
    """The response format of the generate route."""

    def __init__(self, request_id: str, settings: ServeSettings, echo: _Generate | None) -> None:
        self._echo = echo
        self._id = f"generate-tokens-{request_id}"
        self._text_token_ids = settings.text_token_ids
        self._labels = settings.labels

    def envelope(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        envelope: dict[str, Any] = {"request_id": self._id, "choices": choices, "usage": usage}
        if (asked := self._echo) is not None:
            self._echo = None
            envelope["prompt_token_ids"] = asked.token_ids
            if asked.features is not None:
                envelope["mm_placeholders"] = msgspec.to_builtins(asked.features.mm_placeholders)
        return envelope

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        pairs = zip(chunk.ids, chunk.logprobs, strict=True)
        content: list[dict[str, Any]]
        if self._text_token_ids:
            content = [
                {"token": f"token_id:{token_id}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token_id, value in pairs
            ]
        else:
            content = [
                {"token_id": token_id, "logprob": value, "rank": 1, "top_logprobs": []} for token_id, value in pairs
            ]
        choice = {
            "index": 0,
            "token_ids": chunk.ids,
            "logprobs": {"content": content},
            "finish_reason": chunk.finish,
            "stop_reason": chunk.stop_match,
        }
        if chunk.versions and self._labels and not self._text_token_ids:
            choice["weight_versions"] = labelled(chunk)
        return choice


class _CompletionChoices:
    """The response format of the completions route."""

    def __init__(self, asked: _Completion, settings: ServeSettings) -> None:
        self._asked = asked
        self._model = settings.model
        self._text: TextStream | None = settings.tokenizer.stream() if settings.tokenizer else None
        self._first = True

    def envelope(self, choices: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._asked.request_id}",
            "object": "text_completion",
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._text.push(chunk.ids) if self._text else "",
            "finish_reason": chunk.finish,
            "stop_reason": chunk.stop_match,
        }
        if self._asked.logprobs is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token_id}" for token_id in chunk.ids],
                "token_logprobs": chunk.logprobs,
                "top_logprobs": [None] * len(chunk.ids),
                "text_offset": [0] * len(chunk.ids),
            }
        if self._asked.return_token_ids:
            choice["token_ids"] = chunk.ids
            choice["prompt_token_ids"] = self._asked.prompt if self._first else None
        if chunk.versions and self._asked.return_weight_versions:
            choice["weight_versions"] = labelled(chunk)
        self._first = False
        return choice
