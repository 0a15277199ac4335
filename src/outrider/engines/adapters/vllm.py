"""A vLLM server as an engine: token ids in and out through `/inference/v1/generate`.

Some servers lack this route (before 0.11, or started without `--enable-scale-out`), or their route does not stream
(before 0.20). They get requests with ids at `/v1/completions`. The first request shows which route a server has. The
adapter reads both forms of log-probabilities of the generate route: with ids as text (up to 0.31), and with ids as
integers (since). Structured output needs a server of 0.11 or later. Invariant: an id is passed on only together with
the log-probability that the server sent for the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import ConstraintKind
from outrider.engines.adapters.ids_json import body_with_ids
from outrider.engines.adapters.options import ServerOptions, read_options, server_url
from outrider.engines.adapters.policy_versions import LabelSpan, spans_of, version_of
from outrider.engines.adapters.router import Servers, WorkersOutOfReach
from outrider.engines.adapters.server_api import (
    LOGPROB_KINDS,
    MISSING_LOGPROB,
    checked_logprobs,
    decode_batch,
    finish_of,
    penalties_and_bias,
    served_by_all,
    structured_outputs,
)
from outrider.engines.base import (
    Capability,
    Chunk,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    KnownVersions,
    PauseMode,
)
from outrider.engines.gates import PauseGate
from outrider.engines.http.client import DEFAULT_RETRY, Cut, HttpClient, WasCut
from outrider.engines.http.connections import Buffer
from outrider.engines.http.failures import Sizes, StatusFailure, failure_of_event, translate
from outrider.errors import EngineError, EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.trajectory import FinishReason, TokenMode

log = logging.getLogger("outrider.engine")

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
ROUTE_MISSING = frozenset({403, 404})
PAUSE_MODES: dict[PauseMode, str] = {"finish": "wait", "abort": "abort", "keep": "keep"}
WEIGHTS_SECONDS = 600.0
ABORT_SECONDS = 1.0
"""Seconds in which the end of a reply that a pause has aborted can still arrive. After that the reply is ended here."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
UNCOUNTED = "does not say how many tokens of a prompt it had cached: start vLLM with --enable-prompt-tokens-details"
DEV_HINT = "start vLLM with VLLM_SERVER_DEV_MODE=1 to allow pausing and weight updates"


class VLLMOptions(ServerOptions, frozen=True, kw_only=True):
    """The options of a vLLM server. `logprobs_mode` is the server's `--logprobs-mode`, which no route reports."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"


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


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_EVENTS = msgspec.json.Decoder(list[_Event])


class VLLMEngine:
    """`Engine`, `TokenizesText`, `SetsVersion` and `LoadsWeights` over one vLLM server, or a router of such servers.

    Log-probabilities are passed on as the server sends them. Their kind follows from the option `logprobs_mode`, RAW by
    default, which must be the server's. Pausing, and loading weights, needs a server in development mode.
    """

    mode = TokenMode.TOKENS
    constraints = frozenset(ConstraintKind)
    capabilities = frozenset({Capability.VERSIONED_CACHE})

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        own = read_options(VLLMOptions, options.options)
        self.name = options.name
        self.logprob_kind = LOGPROB_KINDS[own.logprobs_mode]
        self._model = options.model
        connect = partial(HttpClient, options.name, api_key=own.api_key, retry=retry)
        self._http = connect(server_url(options))
        self._servers = Servers(options.name, self._http, connect)
        self._gate = PauseGate()
        self._context: int | None = None
        self.versions = KnownVersions.of_new_run()
        self.advice = ""
        self._completions_only = False

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()
        await self._servers.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        route = COMPLETIONS if self._completions_only else GENERATE
        while True:
            reader = _VLLMReader(self.name, lambda: self.versions)
            cut, closings = Cut(), self._gate.closings
            headers = {"X-Session-ID": request.session_key}
            body = partial(_body, request, self._model, route, reader.ask)
            try:
                async with (
                    self._gate.passage(cut.now),
                    aclosing(self._http.events(route, body, headers, cut)) as batches,
                ):
                    closings = self._gate.closings  # a pause before the request was sent does not abort it
                    async for payloads in batches:
                        if (chunk := reader.read(payloads)) is not None:
                            yield chunk
                reader.check_finished()
            except Exception as error:  # the tokens read before the error are passed on first
                # When a pause aborts a stream, vLLM (0.26) often ends the response properly, but sends no finish.
                aborted = reader.unfinished and self._gate.closings != closings
                # The server has no generate route, or a generate route that does not stream.
                missing = isinstance(error, StatusFailure) and error.status in ROUTE_MISSING
                unstreamed = isinstance(error, _NotStreamed) and not aborted
                if route == GENERATE and not reader.begun and (missing or unstreamed):
                    route = COMPLETIONS
                    continue
                if aborted or isinstance(error, WasCut):
                    reader.abort()
                # A connection that breaks after the finish is no failure: only the usage was still to come.
                elif not (reader.finished and isinstance(error, EngineUnavailable)):
                    if (unsent := reader.unsent()) is not None:
                        yield unsent
                    if not isinstance(error, StatusFailure):
                        raise
                    sizes = Sizes(
                        prompt=len(request.input_ids), output=request.sampling.max_tokens, context=self._context
                    )
                    raise translate(error, self.name, sizes) from None
            self._completions_only = route == COMPLETIONS
            last = reader.last()
            self._note(last)
            yield last
            return

    def _note(self, last: Chunk) -> None:
        """Record what only a reply shows: that the weights are newer, and whether the server counts cached tokens."""
        if last.versions and last.versions[-1].version > self.versions.served:
            self.versions = self.versions.with_version(last.versions[-1].version)
        if last.prompt_tokens is not None and last.finish is not FinishReason.ABORT:
            if last.cached_tokens is None and not self.advice:
                log.info("engine %s %s", self.name, UNCOUNTED)
            self.advice = UNCOUNTED if last.cached_tokens is None else ""

    async def health(self) -> EngineHealth:
        try:
            await self._http.check("/health")
            await self._servers.find()
            models = await self._servers.query_all(lambda server: server.get("/v1/models"))
            card = served_by_all(models, self._model, self.name)
            self._context = card.max_model_len
            served = min(await self._servers.query_all(self._served_version))
            self.versions = self.versions.with_version(served)
        except StatusFailure as failure:
            return EngineHealth(ok=False, detail=translate(failure, self.name).message)
        except EngineError as error:
            return EngineHealth(ok=False, detail=f"{error.message} ({error.hint})" if error.hint else str(error))
        return EngineHealth(ok=True, model=card.id, context_tokens=card.max_model_len, version=served)

    async def pause(self, mode: PauseMode) -> None:
        """Pause the server. Raises EngineRejected if the server is not in development mode."""
        if mode == "abort":
            self._gate.close()
        await self._control(f"/pause?mode={PAUSE_MODES[mode]}", seconds=None)
        if mode == "abort":
            # The server would hold a request that arrives just now until the resume, so this request is given up here.
            await self._gate.drained(ABORT_SECONDS)
            self._gate.cut_off()

    async def resume(self) -> None:
        try:
            await self._control("/resume")
        finally:  # a server that is still paused holds new generations back itself
            self._gate.open()

    def hold_back(self) -> None:
        self._gate.close()
        self._gate.cut_off()

    def release(self) -> None:
        self._gate.open()

    async def set_version(self, version: int) -> None:
        """Label the server's weights. For a server without the route, `version` is only recorded here."""

        async def label(server: HttpClient) -> bool:
            try:
                await server.post("/update_weight_version", {"new_version": str(version)})
            except StatusFailure as failure:
                if failure.status != 404:
                    raise translate(failure, self.name) from None
                return False
            return True

        try:
            labelled = all(await self._servers.order_all(label))
        except WorkersOutOfReach:
            labelled = False
        self.versions = self.versions.with_version(version, 0 if labelled else version)

    async def update_weights(self, weights: str, version: int) -> None:
        """Reload from a folder in Hugging Face layout that the server can read, and drop all cached keys and values.

        `reload_weights` is a method of vLLM's workers, called by `/collective_rpc`; none of the routes for weight
        transfer reads from disk. Raises EngineRejected if the server is not in development mode, and for a folder that
        is visible here and holds no weights: vLLM exits on such a folder.
        """
        if (trouble := await asyncio.to_thread(unreadable_weights, self._servers.urls, weights)) is not None:
            raise EngineRejected(
                f"engine {self.name!r} was not given {weights}: {trouble}",
                field="weights",
                hint="a server that shares no files with this machine may have other folders: give it a path whose"
                " parent folder does not exist here",
            )
        reload = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
        try:
            await self._control("/collective_rpc", reload, seconds=WEIGHTS_SECONDS)
        except EngineUnavailable as error:
            if (await self.health()).ok:
                raise
            raise EngineUnavailable(
                f"engine {self.name!r} has ended itself over the weights in {weights}: {error.message}",
                hint="start it again; vLLM ends when it cannot read a folder of weights",
            ) from error
        # This route reports in the body, under status 200, that it did nothing.
        answers = await self._control("/reset_prefix_cache?reset_running_requests=true")
        if any(isinstance(answer, dict) and answer.get("success") is False for answer in answers):
            raise EngineUnavailable(f"engine {self.name!r} has new weights, and keeps the prefix cache of the old ones")
        await self.set_version(version)

    async def token_check(self, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        if self._model is not None:
            body["model"] = self._model
        try:
            answer = (await self._servers.query_all(lambda server: server.post("/tokenize", body)))[0]
        except StatusFailure as failure:
            if failure.transient:
                raise translate(failure, self.name) from None
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def _control(self, path: str, body: Any = None, *, seconds: float | None = 30) -> list[Any]:
        try:
            return await self._servers.order_all(lambda server: server.post(path, body, seconds=seconds))
        except StatusFailure as failure:
            error = translate(failure, self.name)
            raise (error.replace(hint=DEV_HINT) if failure.status == 404 else error) from None

    async def _served_version(self, server: HttpClient) -> int:
        """Return the version of the served weights: the last known version for a server that reports no label, because
        it is not in development mode."""
        try:
            answer = await server.get("/weight_info")
        except StatusFailure as failure:
            if failure.transient:
                raise
            return self.versions.served
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        return (
            version_of(str(label), unlabelled=self.versions.unlabelled)
            if isinstance(label, str | int)
            else self.versions.served
        )


def unreadable_weights(servers: Sequence[str], weights: str) -> str | None:
    """Return the fault of a weights folder; None for a good folder, and for a folder that is not visible from here.

    The folder is visible if one of the servers (URLs) is on this machine and the parent folder exists here, too: a
    container has another view of the disk.
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
    except OSError:  # the server's process may be allowed to read a folder that this process may not
        return None
    return None


class _NotStreamed(EngineUnavailable):
    """A response ended properly without an event: it was no stream."""


class _VLLMReader:
    """Reads the events of one generation into chunks. The tokens of the finishing event are kept for `last`, because
    the usage follows in a later event.

    `versions` is called when the request is sent, and again when the first token comes. If the version has changed in
    between, WasCut is raised: a request held back by the server would be sampled by new weights over old keys and
    values.
    """

    def __init__(self, engine: str, versions: Callable[[], KnownVersions]) -> None:
        self._engine = engine
        self._current_versions = versions
        self._asked: KnownVersions | None = None
        self._versions: KnownVersions | None = None
        self.begun = False
        self.unfinished = False  # the stream has ended properly, but without a finish
        self._length = 0
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._prompt_ids: list[int] | None = None
        self._usage = _Usage()
        self._last: Chunk | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None

    def ask(self) -> str:
        """Return the cache salt of the request, which is about to be sent."""
        self._asked = self._current_versions()
        return self._asked.cache_salt

    def abort(self) -> None:
        """Finish the reply of a generation that was given up, with or without tokens."""
        self._last = self._finishing(FinishReason.ABORT)

    def read(self, payloads: Sequence[bytes]) -> Chunk | None:
        """Return the tokens of these events as one chunk; None if there are none, or after the finish.

        Raises EngineMisbehaved or StatusFailure for a malformed event or an error event; `unsent` then returns the
        tokens before that event.
        """
        self.begun = True
        for event in decode_batch(_EVENT, _EVENTS, payloads, self._engine):
            if event.error is not None:
                raise failure_of_event(event.error)
            if event.usage is not None:
                self._usage = event.usage
            if event.choices:
                self._take(event.choices[0])
        return None if self.finished else self.unsent()

    def unsent(self) -> Chunk | None:
        """Return the tokens that were read and are in no chunk yet."""
        if not self._ids:
            return None
        chunk = Chunk(ids=self._ids, logprobs=self._logprobs, prompt_ids=self._prompt_ids)
        self._ids, self._logprobs, self._prompt_ids = [], [], None
        return chunk

    def check_finished(self) -> None:
        """Raise EngineUnavailable if the stream ended before the generation did."""
        self.unfinished = self._last is None
        if not self.begun:
            raise _NotStreamed(f"engine {self._engine!r} answered without a stream")
        if self.unfinished:
            raise EngineUnavailable(f"engine {self._engine!r} ended its stream before the generation's end")

    def last(self) -> Chunk:
        """The finishing chunk, once `finished`."""
        assert self._last is not None
        details = self._usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        return msgspec.structs.replace(
            self._last,
            ids=self._ids,
            logprobs=self._logprobs,
            prompt_ids=self._prompt_ids,
            cached_tokens=None if cached == -1 else cached,  # -1 if the request was aborted while it still waited
            prompt_tokens=self._usage.prompt_tokens,
        )

    def _take(self, choice: _Choice) -> None:
        ids = choice.token_ids or []
        if ids and self._versions is None:
            self._versions = self._current_versions()
            if self._asked is not None and self._versions.cache_salt != self._asked.cache_salt:
                raise WasCut
        self._logprobs += _logprobs(choice.logprobs, ids, self._engine)
        self._ids += ids
        self._length += len(ids)
        self._prompt_ids = choice.prompt_token_ids or self._prompt_ids
        if choice.finish_reason is not None:
            finish = finish_of(choice.finish_reason, self._engine)
            self._last = self._finishing(finish, choice.stop_reason, choice.weight_versions)

    def _finishing(
        self, finish: FinishReason, stop_match: int | str | None = None, labels: list[LabelSpan] | None = None
    ) -> Chunk:
        versions = self._versions or self._current_versions()
        spans = spans_of(labels, length=self._length, version=versions.served, unlabelled=versions.unlabelled)
        return Chunk(ids=[], logprobs=[], finish=finish, stop_match=stop_match, versions=spans)


def _logprobs(given: _Logprobs | None, ids: list[int], engine: str) -> list[float]:
    """Return the log-probabilities of `ids`, whichever form they have. Raises EngineMisbehaved if one is missing, or
    belongs to another id."""
    if given is None:
        return checked_logprobs(ids, [], engine)
    if given.token_logprobs is not None:
        return checked_logprobs(ids, given.token_logprobs, engine)
    entries = given.content or []
    if len(entries) == len(ids) == 1:  # a shortcut for nearly every event of a stream
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


def _body(
    request: GenerateRequest, model: str | None, route: str, salt: Callable[[], str], attempt: int
) -> list[Buffer]:
    sampling = request.sampling
    # Every field that could change the sampling is sent, so that the model's generation_config.json cannot change it.
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
    # A retry has its own id: the server may still hold the request whose connection broke.
    body: dict[str, Any] = {
        "request_id": f"{request.request_id}-{attempt}",
        "cache_salt": salt(),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    if route == GENERATE:
        body["sampling_params"] = params
        return body_with_ids(body, "token_ids", request.input_ids)
    body |= {**params, "return_token_ids": True, "return_weight_versions": True}
    return body_with_ids(body, "prompt", request.input_ids)
