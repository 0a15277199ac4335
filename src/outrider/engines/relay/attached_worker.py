"""The service's side of one worker: its generations and calls, which continue when it reconnects.

Invariants: the messages of a generation are processed in the order of their numbers, each once, even if the worker
reconnects. The windows limit the number of a worker's messages that wait here to be consumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any

import msgspec

from outrider.engines.base import Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.engines.pool.checks import TokenCheck, check_health
from outrider.engines.relay.messages import (
    MAX_DETAIL,
    PROTOCOL,
    AbortGeneration,
    Acknowledge,
    Failed,
    StartGeneration,
    ToService,
    Version,
    WorkerAction,
    WorkerCall,
    WorkerHello,
    WorkerReply,
    WorkerTokens,
    WorkerWelcome,
    chunk_of,
    pack_ids,
    unpack_ids,
)
from outrider.errors import EngineError, EngineMisbehaved, EngineUnavailable, ErrorRecord, error_from
from outrider.tokens.rendering.tokenizer import ANY_IDS
from outrider.trajectory import LogprobKind, TokenMode
from outrider.wire.link import Link
from outrider.wire.link_protocol import Close, Nonsense

CALL_SECONDS = 15.0
"""Seconds in which a worker must report its health, or tokenise a text for the check of its tokenizer."""
MAX_PROBE_IDS = 1 << 16
"""Maximum number of ids in a worker's reply to a check of its tokenizer."""
WEIGHTS_SECONDS = 600.0
"""Seconds in which a worker must load weights."""


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a worker's connection.

    - `heartbeat_seconds`: maximum time between two messages.
    - `silence_seconds`: a connection without messages is cut after this time.
    - `resume_seconds`: time for a worker to reconnect after it has lost its connection. Its generations wait.
    - `window`, `total_window`: maximum number of unacknowledged chunks of one generation, and of all generations of a
      worker. A generation without unacknowledged chunks may always send a chunk, so that slow readers do not stop the
      generations of others.
    """

    heartbeat_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    silence_seconds: float = 20.0
    resume_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    window: Annotated[int, msgspec.Meta(gt=0)] = 64
    total_window: Annotated[int, msgspec.Meta(gt=0)] = 4096

    def __post_init__(self) -> None:
        if self.silence_seconds <= self.heartbeat_seconds:
            raise ValueError("silence_seconds must be above heartbeat_seconds")


class _Generation:
    """One generation on a worker. `received` is the number of the last message that has arrived, and `consumed` of the
    last that was passed on. `ended` is True once the last message was received or the generation has failed. `news` is
    set when a chunk or the end can be passed on."""

    def __init__(self, number: int, message: StartGeneration, check: TokenCheck) -> None:
        self.number = number
        self.message = message
        self.check = check
        self.received = self.consumed = self.acknowledged = 0
        self.ended = False
        self.error: EngineError | None = None
        self.chunks: deque[Chunk] = deque()
        self.news = asyncio.Event()


class AttachedWorker:
    """A worker's generations and calls, over all its connections.

    `engine` is the engine's name for error messages. `gone` is the reason why the worker was dropped for good, None
    while it is connected or may reconnect. The class implements the part of `Engine` that a check of the tokenizer
    needs.
    """

    mode = TokenMode.TOKENS

    def __init__(self, hello: WorkerHello, engine: str, options: RelayOptions, numbers: Iterator[int]) -> None:
        self.hello = hello
        self.name = f"{engine}/{hello.name}"
        self.logprob_kind: LogprobKind = hello.logprob_kind
        self.version = hello.version
        self.model = hello.model
        self.context_tokens = hello.context_tokens
        self.gone: str | None = None
        self.failing = False
        """True after a generation failed with EngineUnavailable, until a generation succeeds or the worker reports that
        it is healthy. Until then other workers are preferred."""
        self.deadline: asyncio.TimerHandle | None = None
        """The timer that drops the worker. The timer starts when the connection is lost, and is cancelled when the
        worker reconnects."""
        self._engine = engine
        self._options = options
        self._numbers = numbers
        self._link: Link[ToService] | None = None
        self._generations: dict[int, _Generation] = {}
        self._calls: dict[int, tuple[WorkerCall, asyncio.Future[WorkerReply]]] = {}
        self._unacknowledged = 0
        """Messages received and not acknowledged, over all generations."""

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def _scarce(self) -> int:
        """While at least this many messages are unacknowledged, every chunk is acknowledged as soon as it is
        consumed."""
        return max(1, self._options.total_window // 2)

    @property
    def _patience(self) -> float:
        """Timeout in seconds of a call. A worker without a connection receives the call only after it has
        reconnected."""
        return self._options.resume_seconds + CALL_SECONDS

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    def connect(self, link: Link[ToService], hello: WorkerHello) -> None:
        """Continue over a new connection: send the numbers of the messages received so far, and resend the requests and
        calls that may have been lost."""
        if self._link is not None:
            self._link.close(Close.REPLACED, "this worker has connected again")
        if self.deadline is not None:
            self.deadline.cancel()
        self._link = link
        self.hello, self.version = hello, hello.version
        resumed: dict[int, int] = {}
        lost: list[_Generation] = []
        for number, generation in self._generations.items():
            if number in hello.holds:
                resumed[number] = generation.received
            elif generation.received and not generation.ended:
                lost.append(generation)
        options = self._options
        link.send(
            WorkerWelcome(
                protocol=PROTOCOL,
                resumed=resumed,
                heartbeat=options.heartbeat_seconds,
                silence=options.silence_seconds,
                resume=options.resume_seconds,
                window=options.window,
                total_window=options.total_window,
            )
        )
        for generation in lost:
            self._fail(generation, EngineUnavailable(f"worker {self.name!r} has forgotten a generation"))
        for number, generation in self._generations.items():
            if number in resumed:
                if generation.consumed:
                    self._acknowledge(generation)
            elif not generation.ended:
                link.send(generation.message)
        for call, _ in self._calls.values():
            link.send(call)

    def disconnect(self, link: Link[ToService]) -> bool:
        """Drop the connection. Returns False if a newer connection has replaced it already."""
        if self._link is not link:
            return False
        self._link = None
        return True

    def cut_off(self, code: Close, reason: str) -> None:
        """Close the worker's connection, if any."""
        if self._link is not None:
            self._link.close(code, reason)

    def give_up(self, reason: str) -> None:
        """Mark the worker as gone for good, and fail all its generations and calls."""
        self.gone = reason
        if self.deadline is not None:
            self.deadline.cancel()
        for generation in self._generations.values():
            if not generation.ended:
                self._fail(generation, self._is_gone())
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._is_gone())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        number = next(self._numbers)
        message = StartGeneration(
            generation=number,
            request_id=request.request_id,
            session_key=request.session_key,
            input_ids=pack_ids(request.input_ids),
            sampling=request.sampling,
        )
        generation = _Generation(number, message, TokenCheck(self._engine, request.sampling, ANY_IDS))
        self._generations[number] = generation
        if self.gone is not None:
            self._fail(generation, self._is_gone())
        self._send(message)
        try:
            while True:
                while generation.chunks:
                    yield self._next(generation)
                if generation.error is not None:
                    raise generation.error
                if generation.ended:
                    return
                generation.news.clear()
                await generation.news.wait()
        finally:
            del self._generations[number]
            self._unacknowledged -= generation.received - generation.acknowledged
            self._send(Acknowledge(number, generation.received) if generation.ended else AbortGeneration(number))

    async def _call(self, action: WorkerAction, *, seconds: float | None = CALL_SECONDS, **fields: Any) -> WorkerReply:
        """Send a call with these `fields` and return the reply. Raises EngineUnavailable if the worker does not reply
        in time or is gone, and the error in the worker's reply."""
        if self.gone is not None:
            raise self._is_gone()
        call = WorkerCall(call=next(self._numbers), action=action, **fields)
        future: asyncio.Future[WorkerReply] = asyncio.get_running_loop().create_future()
        self._calls[call.call] = call, future
        self._send(call)
        try:
            async with asyncio.timeout(seconds):
                answer = await future
        except TimeoutError:
            raise EngineUnavailable(f"worker {self.name!r} did not answer {action!r} in {seconds} s") from None
        finally:
            del self._calls[call.call]
        if answer.error is not None:
            raise self._error(answer.error)
        return answer

    def _error(self, said: ErrorRecord) -> EngineError:
        """Convert an error reported by a worker. If it is not an EngineError, the worker has misbehaved."""
        error = error_from(said)
        if isinstance(error, EngineError):
            return error
        return EngineMisbehaved(f"worker {self.name!r} failed: {error.message}")

    def _is_gone(self) -> EngineUnavailable:
        return EngineUnavailable(f"worker {self.name!r} is gone: {self.gone}")

    async def pause(self, mode: PauseMode) -> None:
        """Pause the worker. There is no timeout, because the worker may wait for its generations in flight."""
        await self._call("pause", mode=mode, seconds=None)

    async def resume(self) -> None:
        await self._call("resume", seconds=self._patience)

    async def set_version(self, version: int) -> None:
        await self._call("set_version", version=version, seconds=self._patience)
        self.version = version

    async def update_weights(self, weights: str, version: int) -> None:
        await self._call("update_weights", weights=weights, version=version, seconds=WEIGHTS_SECONDS)
        self.version = version

    async def token_check(self, text: str) -> list[int] | None:
        if not self.hello.tokenizes:
            return None
        answer = await self._call("tokenize", text=text)
        return None if answer.ids is None else unpack_ids(answer.ids)

    async def health(self) -> EngineHealth:
        """See `Engine.health`. A report with impossible numbers closes the connection."""
        if self._link is None:
            return EngineHealth(ok=False, detail=f"worker {self.name!r} has lost its connection")
        try:
            health = (await self._call("health")).health
        except EngineError as error:
            return EngineHealth(ok=False, detail=error.message)
        if health is None:
            return EngineHealth(ok=False, detail=f"worker {self.name!r} sent no health report")
        try:
            check_health(self._engine, health)
        except EngineMisbehaved as error:
            self.cut_off(Close.NONSENSE, error.message)
            return EngineHealth(ok=False, detail=error.message)
        if health.ok:
            self.failing = False
            self.model, self.context_tokens, self.version = health.model, health.context_tokens, health.version
        return msgspec.structs.replace(health, detail=health.detail[:MAX_DETAIL])

    def handle(self, message: ToService) -> None:
        """Process one message. Raises Nonsense for an invalid message."""
        if isinstance(message, WorkerTokens | Failed):
            # If the generation is unknown, it was given up, and the worker has not yet read the abort.
            if (generation := self._generations.get(message.generation)) is not None:
                self._take(generation, message)
        elif isinstance(message, WorkerReply):
            known = self._calls.get(message.call)
            if known is not None and not known[1].done():
                if message.ids is not None and len(message.ids) > 4 * MAX_PROBE_IDS:
                    raise Nonsense(f"{len(message.ids)} bytes of ids for the text of a probe")
                if message.ids is not None:
                    unpack_ids(message.ids)
                known[1].set_result(message)
        elif isinstance(message, Version):
            self.version = message.version
        else:
            raise Nonsense("a second hello")

    def _take(self, generation: _Generation, message: WorkerTokens | Failed) -> None:
        if message.number != generation.received + 1 or generation.ended:
            raise Nonsense(f"message {message.number} of a generation came after {generation.received}")
        if generation.received - generation.acknowledged >= self._options.window:
            raise Nonsense(f"more than {self._options.window} unacknowledged chunks of one generation")
        # Each generation may have one chunk beyond the total window. After a resend, the order of arrival no longer
        # shows which chunks these are, so only their number is checked.
        if self._unacknowledged >= self._options.total_window + len(self._generations):
            raise Nonsense(f"more than {self._options.total_window} unacknowledged chunks")
        if isinstance(message, Failed):
            self._received(generation)
            self._fail(generation, self._error(message.error))
            return
        chunk = chunk_of(message)
        if chunk.finish is not None and not chunk.versions and (chunk.ids or generation.received):
            raise Nonsense("a last chunk without the policy versions of the tokens")
        try:
            generation.check.take(chunk)
        except EngineMisbehaved as error:
            raise Nonsense(error.message) from error
        self._received(generation)
        generation.chunks.append(chunk)
        generation.ended = chunk.finish is not None
        generation.news.set()

    def _received(self, generation: _Generation) -> None:
        """Count a message of the worker. When `_scarce` messages are unacknowledged, all consumed messages are
        acknowledged. Otherwise a reader that has consumed everything could wait for the worker while the worker waits
        for acknowledgements."""
        generation.received += 1
        self._unacknowledged += 1
        if self._unacknowledged == self._scarce:
            for each in self._generations.values():
                self._acknowledge(each)

    def _fail(self, generation: _Generation, error: EngineError) -> None:
        """End a generation with an error. Chunks received before the error are passed on first. The exception is an
        EngineUnavailable before any chunk was passed on: all chunks are dropped, because another worker can then run
        the whole generation."""
        if not generation.consumed and isinstance(error, EngineUnavailable):
            generation.chunks.clear()
        generation.ended, generation.error = True, error
        generation.news.set()

    def _next(self, generation: _Generation) -> Chunk:
        """Take the next chunk. Acknowledges the consumed chunks after every quarter of the window. While many messages
        are unacknowledged, acknowledges them at once, so that the worker can continue."""
        chunk = generation.chunks.popleft()
        generation.consumed += 1
        few = generation.consumed - generation.acknowledged < self._options.window // 4
        if not few or self._unacknowledged >= self._scarce:
            self._acknowledge(generation)
        return chunk

    def _acknowledge(self, generation: _Generation) -> None:
        self._unacknowledged -= generation.consumed - generation.acknowledged
        generation.acknowledged = generation.consumed
        self._send(Acknowledge(generation.number, generation.consumed))

    def _send(self, message: msgspec.Struct) -> None:
        if self._link is not None:
            self._link.send(message)
