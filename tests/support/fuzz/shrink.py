"""Shrinks a failing request, if the request also fails alone in a new session.

Independent of the dialect. Invariant: the returned body was tried and failed.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from support.fuzz.speaker import Request, Violation, check
from support.fuzz.stage import Ground, a_stage
from support.fuzz.wire import exchange

TRIES = 300
Fails = Callable[[bytes], Awaitable[bool]]


async def shrunk(ground: Ground, request: Request, key: str) -> bytes | None:
    """Return the smallest body found for which a new session answers with a 5xx, breaks off or hangs. Returns None if
    the request alone does not fail in this way. `key` is the key of the session to which the request was sent."""

    async def fails(body: bytes) -> bool:
        async with a_stage(ground, random.Random(0)) as stage:
            told = msgspec.structs.replace(
                request,
                path=request.path.replace(key, stage.key),
                query=request.query.replace(key.encode(), stage.key.encode()),
                headers=tuple(
                    (name, value.replace(key.encode(), stage.key.encode())) for name, value in request.headers
                ),
                pieces=(body,),
            )
            try:
                answer = await exchange(stage.application, told)
                check(answer.status < 500, "a server error")
            except Violation:
                return True
            return False

    body = b"".join(request.pieces)
    return await smaller(body, fails) if await fails(body) else None


async def smaller(body: bytes, fails: Fails) -> bytes:
    """Remove parts of a body as long as the body still fails, in at most TRIES tries. The body is returned unchanged if
    it is not JSON, or if it does not fail after being parsed and written again."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not await fails(json.dumps(value).encode()):
        return body
    tries = TRIES
    shrinking = True
    while shrinking and tries:
        shrinking = False
        for candidate in _without_one(value):
            tries -= 1
            if await fails(json.dumps(candidate).encode()):
                value, shrinking = candidate, True
                break
            if not tries:
                break
    return json.dumps(value).encode()


def _without_one(value: Any) -> Iterator[Any]:
    """Yield copies of `value` from each of which one item is missing, outer items first."""
    paths: list[tuple[Any, ...]] = [()]
    for path in paths:
        inner = _at(value, path)
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        for key in keys:
            paths.append((*path, key))
            smaller = copy.deepcopy(value)
            del _at(smaller, path)[key]
            yield smaller


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
