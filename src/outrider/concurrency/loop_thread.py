"""Runs an event loop in its own thread, for code that cannot use `await`, such as the blocking client or a trainer.

Invariant: a coroutine runs in the loop's thread, and has ended when `run` or the block of `open` ends. The only
exception is Ctrl-C, which cancels the coroutine and does not wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in its own thread: `with LoopThread("name") as loop: loop.run(coroutine)`.

    The thread is a daemon thread, so that a program can exit without leaving the block.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread and wait for its result. Must be called from another thread. Ctrl-C
        cancels the coroutine."""
        return _outcome(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextmanager
    def open(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an asynchronous context manager, and leave it at the end of the block. One task does both, as task
        groups and cancel scopes require. An error raised in the block is not passed to the manager."""
        opened: Future[tuple[T, asyncio.Event]] = Future()

        async def hold() -> None:
            async with manager as value:
                closing = asyncio.Event()
                opened.set_result((value, closing))
                await closing.wait()

        holding = asyncio.run_coroutine_threadsafe(hold(), self._loop)
        holding.add_done_callback(lambda _: opened.cancel())  # does nothing if the future already has a result
        try:
            value, closing = opened.result()
        except CancelledError:
            _outcome(holding)  # raises the error that entering `manager` raised
            raise
        except KeyboardInterrupt:
            holding.cancel()
            raise
        try:
            yield value
        finally:
            self._loop.call_soon_threadsafe(closing.set)
            _outcome(holding)


def _outcome(future: Future[T]) -> T:
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
