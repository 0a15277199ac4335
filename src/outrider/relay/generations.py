"""Runs the generations of a relay worker. A generation samples one reply. It runs only once, even if the connection
breaks: the messages of a generation are kept until the service acknowledges them, and can be sent again over a new
connection.

This module sends messages and does not receive any. The service sets two windows: the maximum number of unacknowledged
messages of one generation, and of all generations together. Invariants:

- The messages of a generation are numbered from 1 without gaps.
- The engine's next chunk is requested only if both windows have room, or if the generation has no unacknowledged
  message. So the number of kept messages is limited.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

import msgspec
import numpy as np

from outrider.engines.base import Engine, GenerateRequest
from outrider.engines.relay.messages import Failed, StartGeneration, ToWorker, WorkerWelcome, tokens_of
from outrider.errors import EngineMisbehaved, EngineUnavailable, OutriderError
from outrider.plugins import plugin_code
from outrider.wire.link import Link
from outrider.wire.link_protocol import encode


class _Generation:
    """One generation. `produced` is the number of its last message, and `acknowledged` is the number of its last
    acknowledged message. `kept` contains the encoded messages that are not acknowledged yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.produced = 0
        self.acknowledged = 0
        self.kept: deque[bytes] = deque()
        self.ended = False
        self.room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Generations:
    """The generations of one worker. The service's first message, a `WorkerWelcome`, sets the sizes of the windows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._link: Link[ToWorker] | None = None
        self._generations: dict[int, _Generation] = {}
        self._window = self._total_window = 1
        self._unacknowledged = 0

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._generations)

    def start(self, message: StartGeneration, tasks: asyncio.TaskGroup) -> None:
        if message.generation in self._generations:
            return
        generation = _Generation(message.generation)
        self._generations[generation.number] = generation
        request = GenerateRequest(
            request_id=message.request_id,
            session_key=message.session_key,
            input_ids=np.frombuffer(message.input_ids, dtype="<i4").astype(np.int32),
            sampling=message.sampling,
        )
        generation.task = tasks.create_task(self._run(generation, request), name=f"relay {message.request_id}")

    def acknowledge(self, number: int, upto: int) -> None:
        """Forget the generation's messages up to number `upto`. If these include the generation's last message, forget
        the generation, too."""
        if (generation := self._generations.get(number)) is None:
            return
        was_full = self._unacknowledged >= self._total_window
        while generation.kept and generation.acknowledged < upto:
            generation.kept.popleft()
            generation.acknowledged += 1
            self._unacknowledged -= 1
        generation.room.set()
        if was_full:
            self._wake_all()
        if generation.ended and not generation.kept:
            del self._generations[number]

    def abort(self, number: int) -> None:
        """Stop a generation and forget it. Does nothing if there is no such generation."""
        if (generation := self._generations.pop(number, None)) is None:
            return
        was_full = self._unacknowledged >= self._total_window
        self._unacknowledged -= len(generation.kept)
        if generation.task is not None:
            generation.task.cancel()
        if was_full:
            self._wake_all()

    def abort_all(self) -> None:
        for number in self.held:
            self.abort(number)

    def attach(self, link: Link[ToWorker], welcome: WorkerWelcome) -> None:
        """Continue over a new connection. Messages that the service has not received are sent again. Generations that
        the service no longer has are stopped."""
        self._window, self._total_window = welcome.window, welcome.total_window
        for number in self.held:
            if number not in welcome.resumed:
                self.abort(number)
                continue
            generation = self._generations[number]
            received = welcome.resumed[number]
            for place, frame in enumerate(generation.kept, start=generation.acknowledged + 1):
                if place > received:
                    link.send_encoded(frame)
        self._link = link
        self._wake_all()

    def detach(self) -> None:
        self._link = None

    async def _run(self, generation: _Generation, request: GenerateRequest) -> None:
        try:
            with plugin_code():
                async with aclosing(self._engine.generate(request)) as chunks:
                    while not generation.ended:
                        while generation.kept and (
                            len(generation.kept) >= self._window or self._unacknowledged >= self._total_window
                        ):
                            generation.room.clear()
                            await generation.room.wait()
                        chunk = await anext(chunks, None)
                        if not self._holds(generation):  # the engine's code has suppressed the cancellation
                            return
                        if chunk is None:
                            raise EngineUnavailable("the worker's engine ended its stream before the generation's end")
                        if not chunk.ids and not chunk.logprobs and chunk.finish is None:
                            continue
                        if len(chunk.ids) != len(chunk.logprobs):
                            raise EngineMisbehaved(
                                f"{len(chunk.logprobs)} log-probabilities for {len(chunk.ids)} sampled tokens"
                            )
                        generation.ended = chunk.finish is not None
                        self._send(generation, tokens_of(generation.number, generation.produced + 1, chunk))
        except OutriderError as error:
            self._fail(generation, error)
        except Exception as error:  # the engine's code may raise any error
            self._fail(generation, EngineMisbehaved(f"the worker's engine raised {type(error).__name__}: {error}"))

    def _holds(self, generation: _Generation) -> bool:
        """Return False if the generation was aborted. No more messages may be sent for such a generation, because the
        service would not acknowledge them."""
        return self._generations.get(generation.number) is generation

    def _fail(self, generation: _Generation, error: OutriderError) -> None:
        # The engine's code may turn the cancellation into another error, or may fail after the last chunk.
        if generation.ended or not self._holds(generation):
            return
        generation.ended = True
        message = Failed(generation=generation.number, number=generation.produced + 1, error=error.record())
        self._send(generation, message)

    def _send(self, generation: _Generation, message: msgspec.Struct) -> None:
        frame = encode(message)
        generation.produced += 1
        generation.kept.append(frame)
        self._unacknowledged += 1
        if self._link is not None:
            self._link.send_encoded(frame)

    def _wake_all(self) -> None:
        for generation in self._generations.values():
            generation.room.set()
