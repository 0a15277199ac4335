"""The one thread that owns the model: it runs commands between steps and hands what comes out to the event loop.

It knows no protocol and no request's consumer. Invariant: the batch is touched by this thread alone; all else
here is touched by the event loop alone, except the inbox, which joins the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from outrider.engines.base import PauseMode
from outrider.engines.embedded.batch import Batch, Event
from outrider.engines.embedded.generation import Admission
from outrider.errors import EngineUnavailable, OutriderError

T = TypeVar("T")

Command = Callable[[Batch], None]


class Worker:
    """`load` makes the batch, in the thread. On the event loop, `sink` is called with each step's events, and
    `lost` once, when the thread ends, with the reason.

    The inbox needs no bound of its own: a request puts at most two commands there (add, remove), and the
    engine bounds the requests. `admission` is there once `start` has returned.
    """

    admission: Admission

    def __init__(
        self,
        load: Callable[[], Batch],
        *,
        threads: int,
        name: str,
        sink: Callable[[list[Event]], None],
        lost: Callable[[OutriderError], None],
    ) -> None:
        self._load = load
        self._threads = threads
        self._sink = sink
        self._lost = lost
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"outrider-{name}", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Future[Any]] = set()
        self._draining: list[asyncio.Future[None]] = []
        self._end: OutriderError | None = None

    async def start(self) -> None:
        """Load the model. Raises what `load` raises, when it is an OutriderError, else EngineUnavailable."""
        self._thread.start()
        self.admission = await self.call(lambda batch: batch.admission)

    async def close(self) -> None:
        """End the thread after its current step. Calls still open fail. Idempotent."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def post(self, command: Command) -> None:
        """Run `command` before the next step, in order; it must not raise."""
        self._inbox.put(command)

    async def call(self, command: Callable[[Batch], T]) -> T:
        """Run `command` before the next step; its result, or what it raised. EngineUnavailable once ended."""
        future: asyncio.Future[T] = self._future()

        def run(batch: Batch) -> None:
            try:
                result = command(batch)
            except OutriderError as error:
                self._tell(_fail, future, error)
            else:
                self._tell(_succeed, future, result)

        self._inbox.put(run)
        return await future

    async def pause(self, mode: PauseMode) -> None:
        """`Batch.pause`, and for "finish" the wait until nothing runs or another mode took its place."""
        await self.call(lambda batch: self._emit(batch.pause(mode)))
        if mode == "finish":
            drained: asyncio.Future[None] = self._future()
            self.post(lambda _: self._draining.append(drained))
            await drained

    def _future(self) -> asyncio.Future[Any]:
        if self._end is not None:
            raise EngineUnavailable(self._end.message)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        end: OutriderError = EngineUnavailable("the embedded engine is closed")
        try:
            with torch.inference_mode():
                self._serve(self._load())
        except OutriderError as error:
            end = error
        except Exception as error:  # whatever it is, those who wait must hear of it
            end = EngineUnavailable(f"the embedded engine failed: {type(error).__name__}: {error}")
        self._tell(self._ended, end)

    def _serve(self, batch: Batch) -> None:
        while True:
            while not batch.has_work or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command(batch)
                self._check_drained(batch)
            self._emit(batch.step())
            self._check_drained(batch)

    def _check_drained(self, batch: Batch) -> None:
        if self._draining and (not batch.running or batch.paused != "finish"):
            for future in self._draining:
                self._tell(_succeed, future, None)
            self._draining.clear()

    def _emit(self, events: list[Event]) -> None:
        if events:
            self._tell(self._sink, events)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back on the event loop. A loop that was closed has nobody left to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _ended(self, end: OutriderError) -> None:
        self._end = end
        for future in tuple(self._calls):
            _fail(future, end)
        self._lost(end)


def _succeed(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
