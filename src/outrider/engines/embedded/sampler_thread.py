"""The thread that samples from a model. Between two steps, another thread may take the model for other work, such as
new weights.

Invariant: at any time, either the sampler or one other thread uses the model.
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
"""Maximum number of generations, running or waiting. Further ones are refused with EngineUnavailable, and their callers
try again."""


class QueuedRow(Row):
    """A row of the batch with a queue of its chunks. The sampler thread fills the queue, and a task of the event loop
    reads it."""

    def __init__(self, checker: RequestChecker, request: GenerateRequest) -> None:
        super().__init__(checker.check(request))
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Chunk | EngineUnavailable] = asyncio.Queue()  # max_tokens limits its size

    def give(self, item: Chunk | EngineUnavailable) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody reads the queue
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class SamplerThread:
    """Samples up to `rows` generations of `batch` at once, from `__enter__` to `__exit__`. `engine` must call this
    thread's `generate`, and provides the version of the tokens. `threads` is the number of torch's threads, or None for
    torch's default."""

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
        """The reason why the thread has ended, or None while it runs."""
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
        # A daemon thread, because a step cannot be interrupted and must not delay the exit of the process.
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
        """Stop sampling while the block runs, so that only the block uses the model. The block begins between two
        steps. Between two such blocks, the sampler runs at least one step if it has work. Raises RuntimeError inside
        another such block of the same thread."""
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
        """Called after a change of weights. The next step then computes all keys and values again before it samples."""
        with self._state:
            self._stale = True

    def freeze(self, frozen: bool) -> None:
        """With True, stop sampling after the current step. With False, resume."""
        with self._state:
            self._frozen = frozen
            self._state.notify_all()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Run one generation and yield its chunks, as `Engine.generate` does."""
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
        except Exception as error:  # the model may raise any error, which the waiting generations must receive
            end = f"the model failed: {type(error).__name__}: {error}"
        with self._state:
            self.end = end
            left = {*self._waiting, *self._new, *self._batch.rows}
            self._waiting.clear()
            self._state.notify_all()
        for row in left:
            row.give(EngineUnavailable(end))

    def _step(self) -> bool:
        """Wait for work and run one step. Returns False without a step if the sampler is closed."""
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
