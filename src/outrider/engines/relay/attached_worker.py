"""The service's side of one worker: the worker's generations and calls. They continue when the worker reconnects.

Invariants: the messages of a generation are processed in the order of their numbers, each once, even if the worker
reconnects. Windows (see `RelayOptions`) limit how many chunks from a worker can wait here to be read.
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
"""A worker has this number of seconds to report its health, or to tokenise a text for the check of its tokenizer."""
MAX_PROBE_IDS = 1 << 16
"""Maximum number of ids in a worker's reply to a check of its tokenizer."""
WEIGHTS_SECONDS = 600.0
"""A worker has this number of seconds to load weights."""


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a worker's connection.

    - `heartbeat_seconds`: maximum time between two messages.
    - `silence_seconds`: a connection without messages is closed after this time.
    - `resume_seconds`: a worker that loses its connection has this time to reconnect. Its generations wait meanwhile.
    - `window`: maximum number of unacknowledged chunks of a generation.
    - `total_window`: maximum number of unacknowledged chunks of a worker. A generation without unacknowledged chunks
      may always send one, so that a slow reader of one generation does not stop the other generations.
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
    """One generation on a worker.

    `received`: the number of the last message that has arrived.
    `consumed`: the number of the last message that was passed on.
    `ended`: True once the last message has arrived or the generation has failed.
    `news`: set when there is a chunk or the end to pass on."""

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

    `engine` is the name of the engine for error messages. `gone` is the reason why the worker was given up, or None
    while it is connected or may reconnect. To check the worker's tokenizer, the service needs some members of `Engine`
    and the method of `TokenizesText`. This class has these members.
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
        self._unsent: deque[_Generation] = deque()
        """Generations that the worker must still be given over the present connection, oldest first."""
        self._unsent_added = asyncio.Event()
        self._calls: dict[int, tuple[WorkerCall, asyncio.Future[WorkerReply]]] = {}
        self._unacknowledged = 0
        """Number of messages received and not acknowledged, over all generations."""

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def _scarce(self) -> int:
        """While at least this number of messages are unacknowledged, every chunk is acknowledged as soon as it is
        consumed."""
        return max(1, self._options.total_window // 2)

    @property
    def _patience(self) -> float:
        """Timeout of `resume` and `set_version` in seconds. It includes the time to reconnect, because a worker without
        a connection receives the call only after it has reconnected."""
        return self._options.resume_seconds + CALL_SECONDS

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    def connect(self, link: Link[ToService], hello: WorkerHello) -> None:
        """Continue over a new connection. For each generation, send the number of the last message received. Also send
        again the requests and calls that may have been lost."""
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
        self._unsent.clear()
        for number, generation in self._generations.items():
            if number in resumed:
                if generation.consumed:
                    self._acknowledge(generation)
            elif not generation.ended:
                self._unsent.append(generation)
        self._unsent_added.set()
        for call, _ in self._calls.values():
            link.send(call)

    async def send_generations(self, link: Link[ToService]) -> None:
        """Send the messages that begin generations over `link`, as far as the link has room. Long prompts that begin at
        once, for example after a pause of the policy, would otherwise fill the queue of the link until the link closes.
        Returns when a newer connection has replaced `link`."""
        while self._link is link:
            if self._unsent:
                await link.room()
                self._send_unsent()
            else:
                self._unsent_added.clear()
                await self._unsent_added.wait()

    def _send_unsent(self) -> None:
        while self._unsent and self._link is not None and not self._link.crowded:
            generation = self._unsent.popleft()
            if not generation.ended and generation.number in self._generations:
                self._link.send(generation.message)

    def disconnect(self, link: Link[ToService]) -> bool:
        """Forget the connection. Returns False if a newer connection has already replaced it."""
        if self._link is not link:
            return False
        self._link = None
        return True

    def cut_off(self, code: Close, reason: str) -> None:
        """Close the worker's connection if it has one."""
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
        if self._link is not None:  # `connect` adds the generations that have begun without a connection
            self._unsent.append(generation)
            self._send_unsent()
            self._unsent_added.set()
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
        """Send a call with these `fields` and return the reply. If the worker replies with an error, raises that error.
        Raises EngineUnavailable if the worker does not reply in time or is gone."""
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

    def _error(self, record: ErrorRecord) -> EngineError:
        """Convert an error that a worker has reported. An error that is not an EngineError means that the worker
        misbehaves."""
        error = error_from(record)
        if isinstance(error, EngineError):
            return error
        return EngineMisbehaved(f"worker {self.name!r} failed: {error.message}")

    def _is_gone(self) -> EngineUnavailable:
        return EngineUnavailable(f"worker {self.name!r} is gone: {self.gone}")

    async def pause(self, mode: PauseMode) -> None:
        """Pause the worker. There is no timeout, because the worker may wait for generations in flight to end."""
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
        """See `Engine.health`. If the worker reports impossible numbers, its connection is closed."""
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
        """Process a message of the worker. Raises Nonsense if it is invalid."""
        if isinstance(message, WorkerTokens | Failed):
            # Ignore an unknown generation: it was given up here, and the worker has not read the abort yet.
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
        # Each generation may have one chunk beyond `total_window`. Check only the total number: after messages were
        # sent again, the order of arrival no longer shows which chunks are beyond it.
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
        """Count a message from the worker. When the number of unacknowledged messages reaches `_scarce`, acknowledge
        all messages that were consumed. Otherwise a consumer that has read everything could wait for the worker, while
        the worker waits for acknowledgements."""
        generation.received += 1
        self._unacknowledged += 1
        if self._unacknowledged == self._scarce:
            for each in self._generations.values():
                self._acknowledge(each)

    def _fail(self, generation: _Generation, error: EngineError) -> None:
        """End a generation with an error. Chunks that arrived before the error are passed on first. There is one
        exception: after an EngineUnavailable, if no chunk was passed on yet, all chunks are dropped. Another worker can
        then run the whole generation."""
        if not generation.consumed and isinstance(error, EngineUnavailable):
            generation.chunks.clear()
        generation.ended, generation.error = True, error
        generation.news.set()

    def _next(self, generation: _Generation) -> Chunk:
        """Return the next chunk to the consumer. Consumed chunks are acknowledged after every quarter of the window, or
        at once while many messages are unacknowledged, so that the worker can continue."""
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
