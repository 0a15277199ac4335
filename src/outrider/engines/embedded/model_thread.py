"""The thread that owns the model: it runs commands between steps and hands each step's output to the event loop.

Invariant: only this thread touches the batch, and only the event loop touches the other attributes, except the inbox,
which both use.
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
from outrider.engines.embedded.batch import BatchOutput, SequenceBatch
from outrider.engines.embedded.sequence import RequestChecker
from outrider.errors import EngineUnavailable, OutriderError

T = TypeVar("T")

Command = Callable[[SequenceBatch], None]


class ModelThread:
    """The model's thread. `load` makes the batch and runs in the thread. On the event loop `sink` is called with each
    step's output, and `ended` once, when the thread ends, with the reason.

    The inbox needs no bound of its own: a request puts at most two commands there (add, remove), and the engine bounds
    the requests. `checker` is set once `start` has returned.
    """

    checker: RequestChecker

    def __init__(
        self,
        load: Callable[[], SequenceBatch],
        *,
        threads: int,
        name: str,
        sink: Callable[[list[BatchOutput]], None],
        ended: Callable[[OutriderError], None],
    ) -> None:
        self._load = load
        self._threads = threads
        self._sink = sink
        self._on_end = ended
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # A daemon, because a step cannot be interrupted and must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"outrider-{name}", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Future[Any]] = set()
        self._draining: list[asyncio.Future[None]] = []
        self._end: OutriderError | None = None

    async def start(self) -> None:
        """Load the model. Raises an OutriderError raised by `load`, and EngineUnavailable for any other error."""
        self._thread.start()
        self.checker = await self.call(lambda batch: batch.checker)

    async def close(self) -> None:
        """End the thread after its current step. Open calls fail. Idempotent."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def post(self, command: Command) -> None:
        """Run `command` before the next step, in order. `command` must not raise."""
        self._inbox.put(command)

    async def call(self, command: Callable[[SequenceBatch], T]) -> T:
        """Run `command` before the next step and return its result. Raises the command's OutriderError, and
        EngineUnavailable once the thread has ended."""
        future: asyncio.Future[T] = self._future()

        def run(batch: SequenceBatch) -> None:
            try:
                result = command(batch)
            except OutriderError as error:
                self._tell(_fail, future, error)
            else:
                self._tell(_succeed, future, result)

        self._inbox.put(run)
        return await future

    async def pause(self, mode: PauseMode) -> None:
        """Call `SequenceBatch.pause`. "finish" then waits until no sequence runs or another call changes the mode."""
        await self.call(lambda batch: self._emit(batch.pause(mode)))
        if mode == "finish":
            drained: asyncio.Future[None] = self._future()
            self.post(lambda _: self._draining.append(drained))
            await drained

    def _future(self) -> asyncio.Future[Any]:
        if self._end is not None:
            raise EngineUnavailable(self._end.message)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(future)  # open futures must fail when the thread ends
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
        except Exception as error:  # waiting callers must get any error
            end = EngineUnavailable(f"the embedded engine failed: {type(error).__name__}: {error}")
        self._tell(self._ended, end)

    def _serve(self, batch: SequenceBatch) -> None:
        while True:
            while not batch.has_work or not self._inbox.empty():
                command = self._inbox.get()  # blocks while there is nothing to compute
                if command is None:
                    return
                command(batch)
                self._check_drained(batch)
            self._emit(batch.step())
            self._check_drained(batch)

    def _check_drained(self, batch: SequenceBatch) -> None:
        if self._draining and (not batch.running or batch.paused != "finish"):
            for future in self._draining:
                self._tell(_succeed, future, None)
            self._draining.clear()

    def _emit(self, outputs: list[BatchOutput]) -> None:
        if outputs:
            self._tell(self._sink, outputs)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Run a callback on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the callback has no receiver
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _ended(self, end: OutriderError) -> None:
        self._end = end
        for future in tuple(self._calls):
            _fail(future, end)
        self._on_end(end)


def _succeed(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
