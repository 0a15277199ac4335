"""An engine behind SGLang's HTTP protocol: `/generate` with token ids, and the control routes.

It was written from the documentation and sources of SGLang 0.5.23 and never compared with a real server. As there,
unknown keys in `sampling_params` are refused, and a stream's errors are events of the stream.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.policy_versions import label_of, version_of
from outrider.engines.base import (
    Chunk,
    Engine,
    GenerateRequest,
    LoadsWeights,
    PauseMode,
    SamplingParams,
    SetsVersion,
)
from outrider.errors import EngineError, EngineRejected
from outrider.testing.engine_servers.asgi import HttpCall, Routes, ServeSettings, checked_constraint, common_routes
from outrider.tokens.rendering.tokenizer import TextStream
from outrider.trajectory import FinishReason

PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    logit_bias: dict[int, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def constraint(self) -> Constraint | None:
        """Raises EngineRejected for more than one form."""
        forms = {
            ConstraintKind.JSON_SCHEMA: self.json_schema,
            ConstraintKind.REGEX: self.regex,
            ConstraintKind.GRAMMAR: self.ebnf,
        }
        found = [Constraint(kind, text) for kind, text in forms.items() if text is not None]
        if len(found) > 1:
            raise EngineRejected("only one of regex, json_schema and ebnf can be set", field="sampling_params")
        return found[0] if found else None


class _Generate(msgspec.Struct, kw_only=True):
    input_ids: list[int]
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    return_logprob: bool = False
    rid: str = ""
    routing_key: str | None = None
    stream: bool = False


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


_WEIGHTS = msgspec.json.Decoder(_Weights)
_GENERATE = msgspec.json.Decoder(_Generate)
_PAUSE = msgspec.json.Decoder(_Pause)
_NEW_VERSION = msgspec.json.Decoder(_NewVersion)


class ServedSGLang:
    """SGLang's routes for one engine."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.routes: Routes = common_routes(engine, settings, self.error_body) | {
            ("POST", "/generate"): self._generate,
            ("GET", "/model_info"): self._model_info,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/update_weight_version"): self._update_weight_version,
            ("POST", "/update_weights_from_disk"): self._update_weights,
        }

    def error_body(self, message: str, status: int) -> Any:
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return {"error": {"message": message, "type": kind, "code": status, "retryable": status >= 500}}

    async def _generate(self, call: HttpCall) -> None:
        body = await call.read(_GENERATE)
        if not body.input_ids or min(body.input_ids) < 0:
            raise EngineRejected("input_ids must hold at least one token id, none of them negative")
        sampling = body.sampling_params
        stop = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop or ())
        request = GenerateRequest(
            request_id=body.rid,
            session_key=body.routing_key or body.rid,
            input_ids=np.array(body.input_ids, dtype=np.int32),
            sampling=SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling.sampling_seed,
                stop=stop,
                stop_token_ids=tuple(sampling.stop_token_ids or ()),
                min_tokens=sampling.min_new_tokens,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=sampling.logit_bias or {},
                constraint=checked_constraint(self.engine, sampling.constraint()),
            ),
        )
        version = (await self.engine.health()).version
        reply = _SGLangWriter(request, version, self.settings, logprobs=body.return_logprob, stream=body.stream)
        await call.while_connected(self._respond(call, request, reply, stream=body.stream))

    async def _respond(self, call: HttpCall, request: GenerateRequest, reply: _SGLangWriter, *, stream: bool) -> None:
        content: dict[str, Any] = {}
        try:
            async with aclosing(self.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    content = reply.event(chunk)
                    if stream:
                        await call.event(content)
            if not stream:
                await call.answer(200, content)
                return
        except EngineError as error:
            body = self.error_body(error.message, error.http_status)
            if not stream:
                await call.answer(error.http_status, body)
                return
            await call.event(body)
        await call.end()

    async def _model_info(self, call: HttpCall) -> None:
        label = label_of((await self.engine.health()).version)
        await call.answer(200, {"model_path": self.settings.model, "is_generation": True, "weight_version": label})

    async def _pause(self, call: HttpCall) -> None:
        mode = (await call.read(_PAUSE)).mode
        if mode not in PAUSE_MODES:
            raise EngineRejected(f"unknown pause mode {mode!r}")
        await self.engine.pause(PAUSE_MODES[mode])
        await call.answer(200, {"status": "ok"})

    async def _continue(self, call: HttpCall) -> None:
        await self.engine.resume()
        await call.answer(200, {"status": "ok"})

    async def _update_weight_version(self, call: HttpCall) -> None:
        body = await call.read(_NEW_VERSION)
        if not isinstance(self.engine, SetsVersion):
            raise EngineRejected("this engine's version cannot be set")
        if body.abort_all_requests:
            await self.engine.pause("abort")
            await self.engine.resume()
        await self.engine.set_version(version_of(body.new_version))
        await call.answer(200, {"success": True, "new_version": body.new_version})

    async def _update_weights(self, call: HttpCall) -> None:
        body = await call.read(_WEIGHTS)
        if not isinstance(self.engine, LoadsWeights):
            raise EngineRejected("this engine's weights cannot be loaded")
        if body.abort_all_requests:
            await self.engine.pause("abort")
        try:
            await self.engine.update_weights(body.model_path, version_of(body.weight_version))
        except EngineRejected as error:
            await call.answer(400, {"success": False, "message": error.message})
            return
        if not body.keep_pause:
            await self.engine.resume()
        await call.answer(200, {"success": True, "message": "Succeeded to update model weights."})


class _SGLangWriter:
    """One reply in the making; cumulative unless the server streams incrementally."""

    def __init__(
        self, request: GenerateRequest, version: int, settings: ServeSettings, *, logprobs: bool, stream: bool
    ) -> None:
        self._request = request
        self._version = version
        self._logprobs = logprobs
        self._cumulative = not (stream and settings.incremental)
        self._stream: TextStream | None = settings.tokenizer.stream() if settings.tokenizer else None
        self._count = 0
        self._ids: list[int] = []
        self._entries: list[tuple[float, int, None]] = []
        self._text = ""

    def event(self, chunk: Chunk) -> dict[str, Any]:
        if not self._cumulative:
            self._ids, self._entries, self._text = [], [], ""
        self._count += len(chunk.ids)
        self._ids += chunk.ids
        self._text += self._stream.push(chunk.ids) if self._stream else ""
        meta: dict[str, Any] = {
            "id": self._request.request_id,
            "finish_reason": _finish(chunk, self._count),
            "prompt_tokens": len(self._request.input_ids),
            "completion_tokens": self._count,
            "cached_tokens": chunk.cached_tokens or 0,
            "weight_version": label_of(self._version),
        }
        if self._logprobs:
            self._entries += [
                (value, token_id, None) for token_id, value in zip(chunk.ids, chunk.logprobs, strict=True)
            ]
            meta["output_token_logprobs"] = self._entries
        if chunk.versions:
            meta["weight_versions"] = [
                {"version": label_of(span.version), "start": span.start, "end": span.end} for span in chunk.versions
            ]
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}


def _finish(chunk: Chunk, length: int) -> dict[str, Any] | None:
    if chunk.finish is None:
        return None
    if chunk.finish is FinishReason.STOP:
        return {"type": "stop", "matched": chunk.stop_match}
    if chunk.finish is FinishReason.LENGTH:
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted"}
