"""The thread that samples from a model. Between two steps, other threads may lock the model for other work.

Invariant: the model is used either by the sampler or by the thread that holds the weights, never by both at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Self

import torch

from outrider.engines.base import Chunk, GenerateRequest
from outrider.engines.embedded.batch import Row, RowBatch
from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.engines.embedded.sequence import RequestChecker
from outrider.errors import EngineUnavailable

MAX_WAITING = 4096
"""Maximum number of generations, running or waiting. More generations are refused with EngineUnavailable, and the
caller retries them."""


class QueuedRow(Row):
    """A row with a queue of its chunks. The sampler thread writes to the queue, and a task of the event loop reads the
    chunks."""

    def __init__(self, checker: RequestChecker, request: GenerateRequest) -> None:
        super().__init__(checker.check(request))
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Chunk | EngineUnavailable] = asyncio.Queue()  # max_tokens limits the queue's size

    def give(self, item: Chunk | EngineUnavailable) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no consumer
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class SamplerThread:
    """Samples up to `rows` generations of `batch` at once, between `__enter__` and `__exit__`. `engine` must have this
    thread's `generate` as its generate function, and gives the tokens their version. `threads` is the number of torch's
    threads, None for torch's default."""

    def __init__(
        self,
        engine: FunctionEngine,
        batch: RowBatch[QueuedRow],
        checker: RequestChecker,
        *,
        rows: int,
        threads: int | None = None,
    ) -> None:
        self.checker = checker
        self.end: str | None = None
        """The reason why the thread has ended, None while the thread runs."""
        self._engine = engine
        self._batch = batch
        self._slots = rows
        self._threads = threads
        self._waiting: deque[QueuedRow] = deque()
        self._new: list[QueuedRow] = []
        """The generations that the current or latest step adds to the batch."""
        self._count = 0
        self._state = threading.Condition()
        """Guards `_waiting`, `_new`, `_count` and the attributes below, except `_thread`."""
        self._stepping = False
        self._frozen = False
        self._wanted = 0
        self._owed = False
        """True if the sampler must run a step before the next `weights` block, unless the sampler has no work. Without
        this rule, a trainer that enters one `weights` block after another would starve the sampler."""
        self._holder: int | None = None
        self._stale = False
        self._stepped = engine.version
        self._closed = False
        # The thread is a daemon, so that a step, which cannot be interrupted, does not delay the exit of the process.
        self._thread = threading.Thread(target=self._run, name=engine.name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join()

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Stop sampling while the block runs, so that the block can use the model alone. The block begins between two
        steps of the sampler. Between two blocks the sampler runs at least one step, if it has work. Raises RuntimeError
        inside another block of the same thread."""
        with self._state:
            if self._holder == threading.get_ident():
                raise RuntimeError("this thread has the weights already")
            self._wanted += 1
            self._state.wait_for(self._may_hold)
            self._wanted -= 1
            self._holder = threading.get_ident()
        try:
            yield
        finally:
            with self._state:
                self._holder = None
                self._owed = True
                self._state.notify_all()

    def weights_changed(self) -> None:
        """Make the next step compute all keys and values again, before it samples a token."""
        with self._state:
            self._stale = True

    def freeze(self, frozen: bool) -> None:
        """Stop sampling after the current step if `frozen` is True, otherwise resume sampling."""
        with self._state:
            self._frozen = frozen
            self._state.notify_all()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Run one generation and yield its chunks, as specified by `Engine.generate`."""
        row = QueuedRow(self.checker, request)
        with self._state:
            if self.end is not None:
                raise EngineUnavailable(self.end)
            if self._count >= MAX_WAITING:
                raise EngineUnavailable(f"the model has {MAX_WAITING} generations already")
            self._count += 1
            self._waiting.append(row)
            self._state.notify_all()
        try:
            while True:
                item = await row.queue.get()
                if isinstance(item, EngineUnavailable):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            with self._state:
                row.gone = True
                self._count -= 1

    def _run(self) -> None:
        end = f"the {self._engine.name} is closed"
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while self._step():
                """Each step samples one token for each running generation."""
        except Exception as error:  # the model may raise any error, and waiting generations must receive it
            end = f"the model failed: {type(error).__name__}: {error}"
        with self._state:
            self.end = end
            left = {*self._waiting, *self._new, *self._batch.rows}
            self._waiting.clear()
            self._state.notify_all()
        for row in left:
            row.give(EngineUnavailable(end))

    def _step(self) -> bool:
        """Wait for work, and run one step of sampling. If the sampler is closed, runs no step and returns False."""
        with self._state:
            self._state.wait_for(self._may_step)
            if self._closed:
                return False
            self._stepping, self._owed = True, False
            version = self._engine.version
            stale = self._stale or version != self._stepped
            self._stale, self._stepped = False, version
            self._new = []
            while self._waiting and len(self._batch.rows) + len(self._new) < self._slots:
                row = self._waiting.popleft()
                if not row.gone:
                    self._new.append(row)
        try:
            for row, chunk in self._batch.step(self._new, version, stale=stale):
                row.give(chunk)
        finally:
            with self._state:
                self._stepping = False
                self._state.notify_all()
        return True

    def _may_step(self) -> bool:
        free = self._holder is None and (self._owed or not self._wanted)
        return self._closed or (free and self._has_work)

    def _may_hold(self) -> bool:
        owed = self._owed and self._has_work and not self._closed
        return self._holder is None and not self._stepping and not owed

    @property
    def _has_work(self) -> bool:
        return self.end is None and not self._frozen and bool(self._waiting or self._batch.rows)
