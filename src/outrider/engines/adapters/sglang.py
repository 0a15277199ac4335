"""An SGLang server as an engine: token ids in and out through `/generate`.

The adapter was written from SGLang's sources (0.5.23) and tested with a server of 0.5.17 on a GPU, whose replies are
golden tests. Streams may be cumulative (the default) or incremental: the counts of each event show which. Invariant: an
id is passed on only with the log-probability sent for the same id.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.ids_json import body_with_ids
from outrider.engines.adapters.options import ServerOptions, read_options, server_url
from outrider.engines.adapters.policy_versions import LabelSpan, spans_of, version_of
from outrider.engines.adapters.router import Servers, WorkersOutOfReach
from outrider.engines.adapters.server_api import bias_json, checked_logprobs, decode_batch, finish_of, served_by_all
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
from outrider.engines.http.client import CONTROL_SECONDS, DEFAULT_RETRY, Cut, HttpClient, WasCut, encode
from outrider.engines.http.connections import Buffer
from outrider.engines.http.failures import Sizes, StatusFailure, failure_of_event, translate
from outrider.errors import EngineError, EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.trajectory import FinishReason, LogprobKind, TokenMode

log = logging.getLogger("outrider.engine")

WEIGHTS_SECONDS = 600.0
PAUSE_MODES: dict[PauseMode, str] = {"finish": "abort", "abort": "abort", "keep": "retract"}
"""SGLang's pause modes for ours. After "finish" no generation of ours is left to abort. "keep" is not `in_place`,
because the server exits if its cache is flushed while a generation is in flight, such as another user's or a health
check's."""
ABORTED = 499
"""The code of an error event by which the server reports that it has dropped the request for a pause."""
ABORTED_WORDS = re.compile(rb"Request \w{32} was aborted")
ABORT_SECONDS = 1.0
"""Seconds in which the end of a reply that a pause has aborted can still arrive. After that the reply is ended here."""
SETTINGS_SECONDS = 5.0
"""Timeout of the request for the server's settings. 0.5.17 took 1.3 s."""
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


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_EVENTS = msgspec.json.Decoder(list[_Event])


class SGLangEngine:
    """`Engine`, `TokenizesText`, `SetsVersion` and `LoadsWeights` over one SGLang server, or a router of such servers.

    The server computes log-probabilities after temperature and before truncation, so their kind is SAMPLING. SGLang has
    no pause mode "finish": `pause("finish")` holds new generations back here, waits for the generations in flight here,
    and then pauses the server.
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING
    constraints = frozenset(ConstraintKind)
    capabilities = frozenset({Capability.VERSIONED_CACHE})

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        own = read_options(ServerOptions, options.options)
        self.name = options.name
        self._model = options.model
        connect = partial(HttpClient, options.name, api_key=own.api_key, retry=retry)
        self._http = connect(server_url(options))
        self._servers = Servers(options.name, self._http, connect)
        self._gate = PauseGate()
        self._context: int | None = None
        self.versions = KnownVersions.of_new_run()
        self.advice = ""
        self._requested_settings = False

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()
        await self._servers.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.sampling.logit_bias and self._servers.routed:
            raise EngineRejected(
                f"engine {self.name!r} is SGLang's router, which drops a request's logit_bias",
                hint=f"add its workers instead: outrider engines add sglang-router={self._http.url}",
            )
        reader = _SGLangReader(self.name, lambda: self.versions)
        cut = Cut()
        headers = {"X-SMG-Routing-Key": request.session_key}  # a router drops the field `routing_key`

        def body(attempt: int) -> list[Buffer]:
            return _body(request, reader.ask(), attempt)

        try:
            async with (
                self._gate.passage(cut.now),
                aclosing(self._http.events("/generate", body, headers, cut)) as batches,
            ):
                async for payloads in batches:
                    if (chunk := reader.read(payloads)) is not None:
                        yield chunk
                reader.check_finished()
        except Exception as error:  # the tokens read before the error are passed on first
            if isinstance(error, WasCut) or (isinstance(error, StatusFailure) and _was_aborted(error)):
                reader.abort()
            # A connection that breaks after the finish is no failure: all tokens have arrived.
            elif not (reader.finished and isinstance(error, EngineUnavailable)):
                if (unsent := reader.unsent()) is not None:
                    yield unsent
                if not isinstance(error, StatusFailure):
                    raise
                sizes = Sizes(prompt=len(request.input_ids), output=request.sampling.max_tokens, context=self._context)
                raise translate(error, self.name, sizes) from None
        last = reader.last()
        self._note(last, reader)
        yield last

    def _note(self, last: Chunk, reader: _SGLangReader) -> None:
        """Record what only a reply shows: that the weights are newer, and how the server streams."""
        if last.versions and last.versions[-1].version > self.versions.served:
            self.versions = self.versions.with_version(last.versions[-1].version)
        if reader.repeats is not None:
            self._advise(reader.repeats)

    def _advise(self, repeats: bool) -> None:
        if repeats and not self.advice:
            log.warning("engine %s %s", self.name, INCREMENTAL)
        self.advice = INCREMENTAL if repeats else ""

    async def health(self) -> EngineHealth:
        """See `Engine.health`. The servers' own `/health` is not used: this route samples a token, takes a second, and
        waits 20 s while the server is paused. The routes used here respond at any time."""
        try:
            await self._servers.find()
            if self._servers.routed:
                await self._http.check("/health")
            models = await self._servers.query_all(lambda server: server.get("/v1/models"))
            card = served_by_all(models, self._model, self.name)
            self._context = card.max_model_len
            served = min(await self._servers.query_all(self._served_version))
            self.versions = self.versions.with_version(served)
            await self._request_settings()
        except StatusFailure as failure:
            return EngineHealth(ok=False, detail=translate(failure, self.name).message)
        except EngineError as error:
            return EngineHealth(ok=False, detail=f"{error.message} ({error.hint})" if error.hint else str(error))
        return EngineHealth(ok=True, model=card.id, context_tokens=self._context, version=served)

    async def pause(self, mode: PauseMode) -> None:
        if mode != "keep":
            self._gate.close()
        if mode == "finish":
            await self._gate.drained()
        await self._control("/pause_generation", {"mode": PAUSE_MODES[mode]})
        if mode == "abort":
            # The server would hold a request that arrives just now until the resume, so this request is given up here.
            await self._gate.drained(ABORT_SECONDS)
            self._gate.cut_off()

    async def resume(self) -> None:
        try:
            await self._control("/continue_generation", {})
        finally:  # a server that is still paused holds new generations back itself
            self._gate.open()

    def hold_back(self) -> None:
        self._gate.close()
        self._gate.cut_off()

    def release(self) -> None:
        self._gate.open()

    async def set_version(self, version: int) -> None:
        """Label the server's weights. Generations in flight continue. If the workers of a router are out of reach,
        `version` is only recorded here."""
        try:
            await self._control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        except WorkersOutOfReach:
            self.versions = self.versions.with_version(version, version)
        else:
            self.versions = self.versions.with_version(version, 0)

    async def update_weights(self, weights: str, version: int) -> None:
        """Load a folder that the server can read. The server drops cached keys and values, and stays paused if it
        was."""
        body = {
            "model_path": weights,
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        for answer in await self._control("/update_weights_from_disk", body, seconds=WEIGHTS_SECONDS):
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineRejected(f"engine {self.name!r} did not load {weights}: {answer.get('message')}")
        self.versions = self.versions.with_version(version)

    async def token_check(self, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = (await self._servers.query_all(lambda server: server.post("/tokenize", body)))[0]
        except StatusFailure as failure:
            if failure.transient:
                raise translate(failure, self.name) from None
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def _request_settings(self) -> None:
        """Check once whether the server streams incrementally, and set `advice` if not. If the server does not report
        its settings, its replies show how it streams."""
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

    async def _served_version(self, server: HttpClient) -> int:
        """Return the version of the served weights: the last known version for a server that reports no label."""
        try:
            info = await server.get("/model_info")
        except StatusFailure as failure:
            if failure.transient:
                raise
            return self.versions.served
        label = info.get("weight_version") if isinstance(info, dict) else None
        return (
            version_of(label, unlabelled=self.versions.unlabelled) if isinstance(label, str) else self.versions.served
        )

    async def _control(self, path: str, body: dict[str, Any], *, seconds: float = CONTROL_SECONDS) -> list[Any]:
        try:
            return await self._servers.order_all(lambda server: server.post(path, body, seconds=seconds))
        except StatusFailure as failure:
            raise translate(failure, self.name) from None


class _SGLangReader:
    """Reads the events of one generation into chunks. The tokens of the finishing event are kept for `last`, so that
    the stream is read to its end and its connection reused.

    `versions` is called when the request is sent, and again when the first token comes. If the version has changed in
    between, WasCut is raised: a request held back by the server would be sampled by new weights over old keys and
    values. `repeats` is True if events repeat the tokens of earlier events, and None until a second event with tokens.
    """

    def __init__(self, engine: str, versions: Callable[[], KnownVersions]) -> None:
        self.repeats: bool | None = None
        self._engine = engine
        self._current_versions = versions
        self._asked: KnownVersions | None = None
        self._versions: KnownVersions | None = None
        self._length = 0
        self._labels: list[LabelSpan] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: Chunk | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None

    def ask(self) -> str:
        """Return the cache salt of the request, which is about to be sent."""
        self._asked = self._current_versions()
        return self._asked.cache_salt

    def abort(self) -> None:
        """Finish the reply with the tokens so far: the server has dropped the request, or the request was given up."""
        self._finish(FinishReason.ABORT, None)

    def read(self, payloads: Sequence[bytes]) -> Chunk | None:
        """Return the tokens of these events as one chunk; None if there are none, or after the finish.

        Raises EngineMisbehaved or StatusFailure for a malformed event or an error event; `unsent` then returns the
        tokens before that event.
        """
        for event in decode_batch(_EVENT, _EVENTS, payloads, self._engine):
            self._take(event)
        return None if self.finished else self.unsent()

    def unsent(self) -> Chunk | None:
        """Return the tokens that were read and are in no chunk yet."""
        if not self._ids:
            return None
        chunk = Chunk(ids=self._ids, logprobs=self._logprobs)
        self._ids, self._logprobs = [], []
        return chunk

    def check_finished(self) -> None:
        """Raise EngineUnavailable if the stream ended before the generation did."""
        if self._last is None:
            raise EngineUnavailable(f"engine {self._engine!r} ended its stream before the generation's end")

    def last(self) -> Chunk:
        """The finishing chunk, once `finished`."""
        assert self._last is not None
        return msgspec.structs.replace(self._last, ids=self._ids, logprobs=self._logprobs)

    def _take(self, event: _Event) -> None:
        if event.error is not None:
            raise failure_of_event(event.error)
        meta = event.meta_info
        if meta is None:
            raise EngineMisbehaved(f"engine {self._engine!r} sent an event without meta_info")
        if (finish := meta.finish_reason) and finish.type == "abort" and (finish.status_code or 0) >= 400:
            raise StatusFailure(finish.status_code or 0, encode({"message": finish.message}))
        # An event is cumulative if it holds as many ids as were sampled in total, and a delta if it holds as many as
        # are new. For a first event both numbers are equal.
        total, new = meta.completion_tokens, meta.completion_tokens - self._length
        ids, entries = event.output_ids, meta.output_token_logprobs
        if new and self._versions is None:
            self._versions = self._current_versions()
            if self._asked is not None and self._versions.cache_salt != self._asked.cache_salt:
                raise WasCut
        if finish is not None and finish.type == "abort" and len(ids) == 1 < total:
            ids = [entry[1] for entry in entries]  # after a return to the queue only the last id is sent
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
        self._length = total
        self._logprobs += checked_logprobs(ids, [entry[0] for entry in entries], self._engine)
        self._ids += ids
        # The event's weight label belongs to its new tokens, unless the reply has its own spans.
        if (label := meta.weight_version) is not None and new:
            start = total - new if self._labels else 0
            if self._labels and self._labels[-1].version == label:
                start = self._labels.pop().start
            self._labels.append(LabelSpan(label, start, total))
        if finish is not None:
            self._finish(finish_of(finish.type, self._engine), finish.matched, meta)

    def _finish(self, reason: FinishReason, matched: int | str | None, meta: _Meta | None = None) -> None:
        versions = self._versions or self._current_versions()
        self._last = Chunk(
            ids=[],
            logprobs=[],
            finish=reason,
            stop_match=matched,
            versions=spans_of(
                (meta.weight_versions if meta else None) or self._labels,
                length=self._length,
                version=versions.served,
                unlabelled=versions.unlabelled,
            ),
            cached_tokens=meta.cached_tokens if meta else None,
            prompt_tokens=meta.prompt_tokens if meta else None,
        )


def _was_aborted(failure: StatusFailure) -> bool:
    """Return True if the server has dropped the request. In a stream the error code shows this; in any other response
    only the message does."""
    return failure.status == ABORTED or (failure.status == 400 and ABORTED_WORDS.search(failure.body) is not None)


def request_name(request: GenerateRequest, attempt: int) -> str:
    """Return the `rid` of a request. SGLang aborts all requests whose `rid` begins with a given one, so all have the
    same length. A retry has a new `rid`."""
    return hashlib.blake2b(f"{request.request_id}/{attempt}".encode(), digest_size=16).hexdigest()


def _constraint(constraint: Constraint) -> dict[str, str]:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"json_schema": '{"type": "object"}'}  # SGLang's own chat route does the same
        case ConstraintKind.JSON_SCHEMA:
            return {"json_schema": constraint.text}
        case ConstraintKind.REGEX:
            return {"regex": constraint.text}
        case ConstraintKind.GRAMMAR:
            return {"ebnf": constraint.text}


def _body(request: GenerateRequest, salt: str, attempt: int) -> list[Buffer]:
    sampling = request.sampling
    # The server returns 400 for an unknown key here, so only documented keys are sent.
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
    if sampling.repetition_penalty != 1:
        params["repetition_penalty"] = sampling.repetition_penalty
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        ("min_new_tokens", min(sampling.min_tokens, sampling.max_tokens)),  # a number above max_new_tokens is an error
        ("logit_bias", bias_json(sampling)),
    ):
        if value:
            params[name] = value
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.constraint is not None:
        params |= _constraint(sampling.constraint)
    body = {
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "rid": request_name(request, attempt),
        "routing_key": request.session_key,
        "extra_key": salt,
        "stream": True,
    }
    return body_with_ids(body, "input_ids", request.input_ids)
