"""Waiting for a condition that has no event, such as the state of another process."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
STEP_SECONDS = 0.005


@overload
async def until(condition: Callable[[], Awaitable[T | None]], seconds: float = ...) -> T: ...


@overload
async def until(condition: Callable[[], T], seconds: float = ...) -> T: ...


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Call `condition`, a function or a coroutine function, until its result is true. Returns the result. Fails after
    `seconds`, with the source of the condition."""
    give_up_at = time.monotonic() + seconds
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not true within {seconds:g} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(STEP_SECONDS)
