"""The events that arrive in one read, made one chunk: what came together goes on together.

Under load an engine's tokens pile up on the way here, and a step downstream costs the same for one as for twenty. It
knows no protocol. Invariant: tokens keep their order, and those before an event that fails are not lost with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

import msgspec

from outrider.engines.base import Chunk
from outrider.errors import EngineUnavailable


class EventReader(Protocol):
    """Reads one generation event by event. The finishing chunk is kept for `last`."""

    @property
    def finished(self) -> bool: ...
    def read(self, payload: bytes) -> Chunk | None: ...
    def last(self) -> Chunk: ...


async def arrivals(batches: AsyncIterator[Sequence[bytes]], reader: EventReader) -> AsyncGenerator[Chunk, None]:
    """A chunk for every batch that brings tokens before the finish, then the last one, which may bring none.

    Raises what the reader and the batches do. A connection that breaks after the finish is no failure: only a usage
    count was still to come.
    """
    waiting: Chunk | None = None
    try:
        async for payloads in batches:
            for payload in payloads:
                waiting = _together(waiting, reader.read(payload))
            if waiting is not None and not reader.finished:
                yield waiting
                waiting = None
    except Exception as error:  # whatever it is: the tokens that came before it are passed on first
        if not (reader.finished and isinstance(error, EngineUnavailable)):
            if waiting is not None:
                yield waiting
            raise
    last = reader.last()
    yield last if waiting is None else _joined(waiting, last)


def _together(first: Chunk | None, second: Chunk | None) -> Chunk | None:
    if first is None or second is None:
        return first or second
    return _joined(first, second)


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return msgspec.structs.replace(
        second,
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_ids=first.prompt_ids or second.prompt_ids,
    )
