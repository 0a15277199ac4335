"""An event loop in a thread of its own, for code that does not await: the blocking client, trainers.

It knows no client. Invariant: work that is handed over runs in that thread, and nothing of it is left when the loop is
closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """`with LoopThread("name") as loop: loop.run(coroutine)`.

    The thread is a daemon, so that a program that forgets to leave the block can still exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, from any other thread. Ctrl-C cancels it."""
        return _outcome(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextmanager
    def open(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an asynchronous context manager, and leave it at the end of the block. Both happen in one task, as task
        groups and cancel scopes want it."""
        opened: Future[tuple[T, asyncio.Event]] = Future()

        async def hold() -> None:
            async with manager as value:
                closing = asyncio.Event()
                opened.set_result((value, closing))
                await closing.wait()

        holding = asyncio.run_coroutine_threadsafe(hold(), self._loop)
        holding.add_done_callback(lambda _: opened.cancel())  # does nothing where it has a result
        try:
            value, closing = opened.result()
        except CancelledError:
            _outcome(holding)  # raises why it could not be entered
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
