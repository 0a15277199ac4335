"""The part that the adapters for vLLM and SGLang have in common. Both use one server that takes token ids, or a router
of such servers.

Each adapter is a subclass of `ServerEngine` with the server's routes, request bodies, events and labels. `ServerEngine`
handles generations, pauses and versions, which work alike for both. Invariant: if the policy version changes between a
request and its first token, the reply is cut off before this token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from outrider.concurrency.retries import RetryPolicy
from outrider.constraint import ConstraintKind
from outrider.engines.adapters.options import ServerOptions, server_url
from outrider.engines.adapters.policy_versions import LabelSpan, spans_of, version_of
from outrider.engines.adapters.router import Servers, WorkersOutOfReach
from outrider.engines.adapters.server_api import decode_batch, served_by_all
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
from outrider.engines.http.client import CONTROL_SECONDS, Cut, HttpClient, WasCut
from outrider.engines.http.failures import Sizes, StatusFailure, failure_of_event, translate
from outrider.errors import EngineError, EngineUnavailable, error_text
from outrider.trajectory import FinishReason, LogprobKind, TokenMode
from outrider.wire.http_connections import Buffer

WEIGHTS_SECONDS = 600.0
ABORT_SECONDS = 1.0
"""After a pause with mode "abort", the adapter waits up to this many seconds for the aborted replies to end. Then it
cuts off the remaining ones."""


class ServerEvent(msgspec.Struct):
    """The field that the events of all servers have in common. `error` is None except in an error event."""

    error: Any = None


EventT = TypeVar("EventT", bound=ServerEvent)


class ServerReply(Generic[EventT]):
    """Turns the events of one generation into chunks. `last` returns the last chunk, with the tokens of the event that
    has the finish reason. Call `last` only after the end of the stream, for two reasons: a connection can be reused
    only if its stream was read to the end, and the token counts may come in an event after the finish reason.

    `versions` returns the current policy version. It is called when the request is sent, and again at the first token.
    If the version has changed in between, WasCut is raised: the server may have kept the request while its weights
    changed, and would then sample with new weights over old keys and values.

    `begun`: True once an event has arrived.
    `unfinished`: True if the stream has ended with neither an error nor a finish reason.
    """

    event: ClassVar[msgspec.json.Decoder[Any]]
    events: ClassVar[msgspec.json.Decoder[list[Any]]]

    def __init__(self, engine: str, versions: Callable[[], KnownVersions]) -> None:
        self.begun = self.unfinished = False
        self._engine = engine
        self._current_versions = versions
        self._asked: KnownVersions | None = None
        self._versions: KnownVersions | None = None
        self._length = 0
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._prompt_ids: list[int] | None = None
        self.prompt_images: list[tuple[int, int]] | None = None
        self._last: Chunk | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None

    def begin_attempt(self) -> str:
        """Record the version with which the request is sent, and return the version's cache salt. Called right before
        each attempt to send the request."""
        self._asked = self._current_versions()
        return self._asked.cache_salt

    def read(self, payloads: Sequence[bytes]) -> Chunk | None:
        """Read events, and return their tokens as one chunk. Returns None if there are no tokens, or once the reply is
        finished.

        Raises EngineMisbehaved for a malformed event, and StatusFailure for an error event. After such an error,
        `unsent` returns the tokens of the events before the failed event.
        """
        self.begun = True
        for event in decode_batch(self.event, self.events, payloads, self._engine):
            if event.error is not None:
                raise failure_of_event(event.error)
            self.take(event)
        return None if self.finished else self.unsent()

    def take(self, event: EventT) -> None:
        """Read one event. An implementation calls `first_token`, `add` and `finish`."""
        raise NotImplementedError

    def first_token(self) -> None:
        """Record the version at the first token. Only the first call has an effect. Raises WasCut if the version has
        changed since the request was sent."""
        if self._versions is None:
            self._versions = self._current_versions()
            if self._asked is not None and self._versions.cache_salt != self._asked.cache_salt:
                raise WasCut

    def add(self, ids: list[int], logprobs: list[float]) -> None:
        self._ids += ids
        self._logprobs += logprobs
        self._length += len(ids)

    def finish(
        self,
        reason: FinishReason,
        stop_match: int | str | None = None,
        labels: Sequence[LabelSpan] | None = None,
        *,
        cached_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        versions = self._versions or self._current_versions()
        spans = spans_of(labels, length=self._length, version=versions.served, unlabelled=versions.unlabelled)
        self._last = Chunk(
            ids=[],
            logprobs=[],
            finish=reason,
            stop_match=stop_match,
            versions=spans,
            cached_tokens=cached_tokens,
            prompt_tokens=prompt_tokens,
        )

    def abort(self) -> None:
        """End the reply with the tokens read so far. Called when the server has aborted the request or this adapter has
        cut it off."""
        self.finish(FinishReason.ABORT)

    def unsent(self) -> Chunk | None:
        """Return a chunk of the tokens that were read but not returned yet, or None if there are none."""
        if not self._ids:
            return None
        chunk = Chunk(
            ids=self._ids, logprobs=self._logprobs, prompt_ids=self._prompt_ids, prompt_images=self.prompt_images
        )
        self._ids, self._logprobs, self._prompt_ids, self.prompt_images = [], [], None, None
        return chunk

    def check_finished(self) -> None:
        """Raise EngineUnavailable if the stream has ended before the reply was finished."""
        if not self.finished:
            self.unfinished = True
            how = "ended its stream before the generation's end" if self.begun else "answered without a stream"
            raise EngineUnavailable(f"engine {self._engine!r} {how}")

    def last(self) -> Chunk:
        """Return the last chunk. Call this only when `finished` is True."""
        assert self._last is not None
        return msgspec.structs.replace(
            self._last,
            ids=self._ids,
            logprobs=self._logprobs,
            prompt_ids=self._prompt_ids,
            prompt_images=self.prompt_images,
        )


ReplyT = TypeVar("ReplyT", bound=ServerReply[Any])


class ServerEngine(Generic[ReplyT]):
    """Implements `Engine`, `TokenizesText`, `SetsVersion` and `HoldsBack` with one server, or with a router of such
    servers.

    - `route`: the route for generations.
    - `label_route`: the route that reports the label of the weights.
    - `pause_modes`: the server's name for each pause mode.
    - `gated`: the pause modes in which this adapter itself holds back new requests.
    - `hint`: the hint in the error message if a server has no routes for pauses and weights.
    """

    mode = TokenMode.TOKENS
    constraints = frozenset(ConstraintKind)
    capabilities = frozenset({Capability.VERSIONED_CACHE})
    logprob_kind: LogprobKind
    reply: type[ReplyT]
    route: str
    label_route: ClassVar[str]
    session_header: ClassVar[str]
    pause_modes: ClassVar[dict[PauseMode, str]]
    gated: ClassVar[frozenset[PauseMode]]
    hint: ClassVar[str] = ""

    def __init__(self, options: EngineOptions, own: ServerOptions, retry: RetryPolicy) -> None:
        self.name = options.name
        self._model = options.model
        connect = partial(HttpClient, options.name, api_key=own.api_key, retry=retry)
        self._http = connect(server_url(options))
        self._servers = Servers(options.name, self._http, connect)
        self._gate = PauseGate()
        self._context: int | None = None
        self.versions = KnownVersions.of_new_run()
        self.advice = ""

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()
        await self._servers.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        route = self.route
        while True:
            reply = self.reply(self.name, lambda: self.versions)
            cut, closings = Cut(), self._gate.closings
            headers = {self.session_header: request.session_key}
            body = partial(self.body, request, route, reply.begin_attempt)
            try:
                async with (
                    self._gate.passage(cut.now),
                    aclosing(self._http.events(route, body, headers, cut)) as batches,
                ):
                    closings = self._gate.closings  # earlier pauses cannot abort this request
                    async for payloads in batches:
                        if (chunk := reply.read(payloads)) is not None:
                            yield chunk
                reply.check_finished()
            except Exception as error:  # before any error is raised, the tokens already read are yielded
                aborted = isinstance(error, WasCut) or self.aborted(
                    error, reply, paused=self._gate.closings != closings
                )
                if aborted:
                    reply.abort()
                elif not reply.begun and (other := self.other_route(route, error, reply)) is not None:
                    route = other
                    continue
                # If the connection breaks after the finish reason, all tokens have arrived, so this is not an error.
                elif not (reply.finished and isinstance(error, EngineUnavailable)):
                    if (unsent := reply.unsent()) is not None:
                        yield unsent
                    if not isinstance(error, StatusFailure):
                        raise
                    sizes = Sizes(
                        prompt=len(request.input_ids), output=request.sampling.max_tokens, context=self._context
                    )
                    raise translate(error, self.name, sizes) from None
            self.route = route
            last = reply.last()
            if last.versions and last.versions[-1].version > self.versions.served:
                self.versions = self.versions.with_version(last.versions[-1].version)
            self.note(last, reply)
            yield last
            return

    def body(self, request: GenerateRequest, route: str, salt: Callable[[], str], attempt: int) -> list[Buffer]:
        """Return the body of a request, in pieces to be sent one after another. `attempt` counts the attempts to send
        it, from 0. `salt` returns the cache salt; call it once per attempt."""
        raise NotImplementedError

    def aborted(self, error: Exception, reply: ReplyT, *, paused: bool) -> bool:
        """Return True if the error shows that a pause has aborted the generation. `paused` is True if this adapter has
        begun to hold back new requests while the generation was in flight."""
        raise NotImplementedError

    def other_route(self, route: str, error: Exception, reply: ReplyT) -> str | None:
        """Return another route to try after `route` has failed with `error` before the first event. Returns None if
        there is no such route."""
        return None

    def note(self, last: Chunk, reply: ReplyT) -> None:
        """Record properties of the server that only a reply shows, such as the way in which the server streams. Called
        after each reply. Does nothing by default."""

    async def health(self) -> EngineHealth:
        try:
            await self.check()
            models = await self._servers.query_all(lambda server: server.get("/v1/models"))
            card = served_by_all(models, self._model, self.name)
            self._context = card.max_model_len
            served = min(await self._servers.query_all(self._served_version))
            self.versions = self.versions.with_version(served)
        except StatusFailure as failure:
            return EngineHealth(ok=False, detail=translate(failure, self.name).message)
        except EngineError as error:
            return EngineHealth(ok=False, detail=error_text(error))
        return EngineHealth(ok=True, model=card.id, context_tokens=self._context, version=served)

    async def check(self) -> None:
        """Find the servers, and check the server or router at the URL. Raises EngineError and StatusFailure."""
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        """Pause the servers. Raises EngineRejected if a server has no route for pausing."""
        if mode in self.gated:
            self._gate.close()
            if mode == "finish":
                await self._gate.drained()
        await self.order_pause(self.pause_modes[mode])
        if mode == "abort":
            # A request that reaches the server after the pause would wait there until the resume. So the remaining
            # replies are cut off.
            await self._gate.drained(ABORT_SECONDS)
            self._gate.cut_off()

    async def resume(self) -> None:
        try:
            await self.order_resume()
        # open the gate even after an error, because a server that is still paused holds back generations itself
        finally:
            self._gate.open()

    async def order_pause(self, mode: str) -> None:
        raise NotImplementedError

    async def order_resume(self) -> None:
        raise NotImplementedError

    def hold_back(self) -> None:
        self._gate.close()
        self._gate.cut_off()

    def release(self) -> None:
        self._gate.open()

    async def set_version(self, version: int) -> None:
        """Label the servers' weights with `version`. Generations in flight continue. If a server has no route for
        labels, or no worker of a router can be reached, `version` is only recorded here."""

        async def label(server: HttpClient) -> bool:
            # By default, SGLang would abort all generations.
            body = {"new_version": str(version), "abort_all_requests": False}
            try:
                await server.post("/update_weight_version", body)
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

    async def token_check(self, text: str) -> list[int] | None:
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        if self._model is not None:
            body["model"] = self._model
        try:
            answer = (await self._servers.query_all(lambda server: server.post("/tokenize", body)))[0]
        except StatusFailure as failure:
            if failure.transient:
                raise translate(failure, self.name) from None
            return None
        return answer.get("tokens") if isinstance(answer, dict) else None

    async def control(self, path: str, body: Any = None, *, seconds: float | None = CONTROL_SECONDS) -> list[Any]:
        """POST an order to all servers, and return their JSON replies. Raises EngineError."""
        try:
            return await self._servers.order_all(lambda server: server.post(path, body, seconds=seconds))
        except StatusFailure as failure:
            error = translate(failure, self.name)
            raise (error.replace(hint=self.hint) if failure.status == 404 and self.hint else error) from None

    async def _served_version(self, server: HttpClient) -> int:
        """Return the version of the weights that a server uses. If the server reports no label, return the last known
        version."""
        try:
            answer = await server.get(self.label_route)
        except StatusFailure as failure:
            if failure.transient:
                raise
            return self.versions.served
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(label, str | int):
            return self.versions.served
        return version_of(str(label), unlabelled=self.versions.unlabelled)
