"""The part of HTTP that is needed to serve an engine, on plain ASGI: one call gets one response or one event stream.

Invariant: when the client of a generation disconnects, the generation is cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from outrider.constraint import Constraint
from outrider.engines.adapters.policy_versions import label_of, version_of
from outrider.engines.base import (
    Chunk,
    Engine,
    GenerateRequest,
    LoadsWeights,
    SamplingParams,
    SetsVersion,
    TakesConstraints,
)
from outrider.errors import EngineRejected
from outrider.lab.fakes.engine_servers.prefix_cache import PrefixCache
from outrider.tokens.rendering.image_grids import ImageSettings
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.wire.http_server import Receive, Scope, Send, while_connected

T = TypeVar("T")

JSON_HEADERS = [(b"content-type", b"application/json")]
TEXT_HEADERS = [(b"content-type", b"text/plain; charset=utf-8")]
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a fake engine server. Most imitate a version or a command-line option of the real server.

    - `tokenizer`: enables texts in replies and the route `/tokenize`.
    - `model`: the name under which the model is served.
    - `prefix_cache`: each request is looked up in this cache and then added to it.

    For vLLM:

    - `generate_route`: False refuses `/inference/v1/generate`, as without `--enable-scale-out`.
    - `text_token_ids`: writes the log-probabilities of the generate route as vLLM did up to 0.31.
    - `labels`: False omits the version label of the weights and the version spans, as in 0.26.
    - `cached_token_counts`: False omits the counts of cached tokens, as without `--enable-prompt-tokens-details`.
    - `finishes_aborted`: False omits the finish reason of generations that a pause aborted, as 0.26 often does.
    - `dev_mode`: False omits the routes that pause, label or load weights.
    - `refuses_while_paused`: returns 503 during a pause, as in 0.33.
    - `pixel_form`: the type of the pixel values that the model takes, "float32" before 0.32.

    For SGLang:

    - `incremental`: each event of a stream has only new content, as with `--incremental-streaming-output`.
    - `spans`: reports `weight_versions`, as since 0.5.19.
    - `images`: the image processor's settings, for a model that reads images. Needs Pillow and `tokenizer`.
    - `keeps_ids`: False tokenises the text of a prompt with images again, as before 0.5.15 and with
      SGLANG_MM_AVOID_RETOKENIZE=0.
    - `reports_prompts`: False ignores `return_prompt_token_ids`, as in earlier versions.
    """

    tokenizer: Tokenizer | None = None
    model: str = "policy"
    generate_route: bool = True
    text_token_ids: bool = False
    labels: bool = True
    cached_token_counts: bool = True
    finishes_aborted: bool = True
    dev_mode: bool = True
    refuses_while_paused: bool = False
    pixel_form: str = "uint8"
    incremental: bool = False
    spans: bool = False
    images: ImageSettings | None = None
    keeps_ids: bool = True
    reports_prompts: bool = True
    prefix_cache: PrefixCache | None = None


class AskedSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters that have the same names in the protocols of vLLM and SGLang."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None


class ServerDied(Exception):
    """Raised for a request that would make the real server exit."""


class HttpCall:
    """One HTTP request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.query: str = scope["query_string"].decode()
        self.streaming = False
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._scope = scope
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> str | None:
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    async def body(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def read(self, shape: type[T]) -> T:
        """Read the JSON body. Raises EngineRejected if the body does not have the type `shape`."""
        try:
            return msgspec.json.decode(await self.body(), type=shape)
        except msgspec.DecodeError as error:
            raise EngineRejected(f"invalid request: {error}") from error

    async def answer(self, status: int, content: Any = None) -> None:
        await self._whole(status, b"" if content is None else orjson.dumps(content), JSON_HEADERS)

    async def answer_text(self, status: int, text: str) -> None:
        await self._whole(status, text.encode(), TEXT_HEADERS)

    async def _whole(self, status: int, body: bytes, kind: list[tuple[bytes, bytes]]) -> None:
        headers = [*kind, (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def cut(self) -> None:
        """Close the connection before the response is complete. The response then has fewer bytes than its headers
        announce, or its stream has no end event."""
        if not self.streaming:
            headers = [*JSON_HEADERS, (b"content-length", b"1")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            # uvicorn sends the headers only with the first piece of the body, so an empty piece follows.
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def event(self, content: Any) -> None:
        """Send one event of a stream. The first event also starts the response."""
        if not self.streaming:
            self.streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        data = b"data: " + orjson.dumps(content) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the stream with `[DONE]`, as vLLM and SGLang do."""
        await self._send({"type": "http.response.body", "body": DONE})

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which responds to the call. Cancel it if the client disconnects first."""
        await while_connected(self._scope, work)


Routes = dict[tuple[str, str], Callable[[HttpCall], Awaitable[None]]]
"""Maps (method, path) to the handler of a route."""

NOT_FOUND = {"detail": "Not Found"}
"""The response of both vLLM and SGLang to an unknown route."""


class _Tokenize(msgspec.Struct):
    prompt: str


class Served:
    """An engine that is served in the protocol of vLLM or SGLang. The argument `routes` has this protocol's own routes;
    the shared routes are added to them. After a request that would make the real server exit, `dead` is True, and every
    connection is closed."""

    owner = ""
    """The `owned_by` of the served model."""
    tokenizer_length: int | None = None
    """The `max_model_len` in the response of `/tokenize`. None stands for the context length of the model."""

    def __init__(self, engine: Engine, settings: ServeSettings, routes: Routes) -> None:
        self.engine = engine
        self.settings = settings
        self.routes = {("GET", "/v1/models"): self._models, ("POST", "/tokenize"): self._tokenize, **routes}
        self.dead = False

    def error_body(self, message: str, status: int) -> Any:
        raise NotImplementedError

    async def _models(self, call: HttpCall) -> None:
        name, context = self.settings.model, (await self.engine.health()).context_tokens
        card = {"id": name, "object": "model", "root": name, "owned_by": self.owner, "max_model_len": context}
        await call.answer(200, {"object": "list", "data": [card]})

    async def _tokenize(self, call: HttpCall) -> None:
        body = await call.read(_Tokenize)
        if self.settings.tokenizer is None:
            await call.answer(404, NOT_FOUND)
            return
        ids = self.settings.tokenizer.encode(body.prompt)
        context = self.tokenizer_length or (await self.engine.health()).context_tokens
        await call.answer(200, {"tokens": ids, "count": len(ids), "max_model_len": context})

    def generation(
        self,
        request_id: str,
        session_key: str | None,
        prompt: list[int],
        asked: AskedSampling,
        constraint: Constraint | None,
        **sampling: Any,
    ) -> GenerateRequest:
        """Return the request for the engine. `sampling` has the parameters whose names differ between vLLM and SGLang.
        Raises EngineRejected if the engine cannot enforce the constraint."""
        if constraint is not None and not (
            isinstance(self.engine, TakesConstraints) and constraint.kind in self.engine.constraints
        ):
            raise EngineRejected(f"this engine cannot hold a reply to a {constraint.kind.value}")
        return GenerateRequest(
            request_id=request_id,
            session_key=session_key or request_id,
            input_ids=np.array(prompt, dtype=np.int32),
            sampling=SamplingParams(
                temperature=asked.temperature,
                top_p=asked.top_p,
                min_p=asked.min_p,
                stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
                stop_token_ids=tuple(asked.stop_token_ids or ()),
                repetition_penalty=asked.repetition_penalty,
                presence_penalty=asked.presence_penalty,
                frequency_penalty=asked.frequency_penalty,
                logit_bias=asked.logit_bias or {},
                constraint=constraint,
                **sampling,
            ),
        )

    async def set_version(self, label: str) -> None:
        """Set the engine's version to that of `label`. Raises EngineRejected if the version cannot be set."""
        if not isinstance(self.engine, SetsVersion):
            raise EngineRejected("this engine's version cannot be set")
        await self.engine.set_version(version_of(label))

    def loader(self) -> LoadsWeights:
        """Return the engine for loading weights. Raises EngineRejected if the engine cannot load weights."""
        if not isinstance(self.engine, LoadsWeights):
            raise EngineRejected("this engine's weights cannot be loaded")
        return self.engine

    def forget_prefixes(self) -> None:
        if self.settings.prefix_cache:
            self.settings.prefix_cache.clear()


def labelled(chunk: Chunk) -> list[dict[str, Any]]:
    """Return a chunk's version spans in the format that vLLM and SGLang share."""
    return [{"version": label_of(span.version), "start": span.start, "end": span.end} for span in chunk.versions]
