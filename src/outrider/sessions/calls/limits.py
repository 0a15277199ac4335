"""Limits of a session's model calls: on the size of each request body, and on the tokens that the session may still
sample.

A body with too many bytes or JSON values is refused before it is parsed. So a body that cannot fit into the model's
context costs only the time to count its bytes and values. The checks work for the request format of every API, because
JSON's separators are always the same. Invariant: the bytes held for calls are limited for each session and, for bodies
above LARGE, over all sessions. A body's bytes count from their arrival to the end of the call. The number of a
session's calls is limited in `api/gateway.py`.

Concurrent calls of a session share the session's tokens (`Allowance`). Before a call begins, some tokens are promised
to it, and other calls cannot use these tokens. If too few tokens are free, a new call waits while other calls run,
because the running calls may return unused tokens. Invariant: the numbers of sampled, promised and free tokens add up
to the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import msgspec
import numpy as np

from outrider.concurrency.cancellation import Steps
from outrider.errors import ContextOverflow, Overflow, RequestError, TooLarge
from outrider.lifecycle import StopReason

MAX_BODY = 32 << 20
"""Maximum size of one request body in bytes. Model providers allow between 20 and 50 MB."""
MAX_TEXT_BODY = 9 << 20
"""Maximum size in bytes of one body, without its files, for an engine that takes token ids. This is the size of about
two million tokens of ordinary text."""
MAX_IN_SESSION = 64 << 20
"""Maximum total size in bytes of the bodies of one session's unfinished calls."""
MAX_IN_ALL = 256 << 20
"""Maximum total size in bytes of the bodies above LARGE, over the unfinished calls of all sessions."""
LARGE = 1 << 20
"""A body of at most this many bytes is parsed without counting its JSON values, because parsing takes at most 25 ms."""
BODY_SECONDS = 120.0
"""Seconds within which a body must arrive. Agents need far less, because they run on the same machine."""

BYTES_PER_TOKEN = 64
"""Maximum bytes of a body per token of the model's context. A larger body counts as too long, because hardly any token
has more bytes."""
FREE_SIZE = 1 << 20
"""Bytes that every body may have in addition to BYTES_PER_TOKEN, because not everything in a body is part of the
prompt."""
VALUES_PER_TOKEN = 4
"""Maximum number of JSON values in a body per token of the model's context. Every message, tool, part or field in the
prompt takes a token or more."""
FREE_VALUES = 4096
"""JSON values that every body may have in addition to VALUES_PER_TOKEN, because not all values in a body are part of
the prompt."""
MAX_VALUES = 1 << 17
"""Maximum number of JSON values in any body. Decoding this many takes 15 ms, during which all other threads are
blocked."""
MAX_TOOLS = 4096
"""Maximum number of tools in a request. Model providers allow 128. A chat template takes 0.1 ms per tool."""
MAX_ESCAPES = 1 << 21
"""Maximum number of escaped characters in any body. Decoding this many takes 25 ms."""
_PIECE = 1 << 20
_SEPARATORS = b"{[,"
_WINDOW = 1 << 10
"""Length in bytes of a window that counts as part of a file if it contains only base64 characters. Ordinary text has no
such window."""
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_="
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class TooMuchAtOnce(RequestError):
    """The session has too many unfinished calls, or the bodies of unfinished calls are too large in total."""

    code = "too_much_at_once"
    http_status = 429


class TooSlow(RequestError):
    """A request body did not arrive within the allowed time."""

    code = "too_slow"
    http_status = 408


class Intake:
    """Counts the bytes of all sessions' bodies above LARGE. `seconds` is the time within which each body must arrive.

    When the bodies exceed MAX_IN_ALL, the body that has been arriving for the longest time is given up. Otherwise, a
    client could use up the limit by sending slowly."""

    def __init__(self, seconds: float = BODY_SECONDS) -> None:
        self.size = 0
        self.seconds = seconds
        self._arriving: dict[Body, None] = {}

    def add(self, body: Body, size: int) -> None:
        """Count `size` more bytes of a body. Raises TooMuchAtOnce if the limit is exceeded and this body must be given
        up."""
        self.size += size
        self._arriving.setdefault(body)
        while self.size > MAX_IN_ALL and self._arriving:
            oldest = next(iter(self._arriving))
            if oldest is body:
                raise TooMuchAtOnce(f"the bodies of unfinished requests have more than {MAX_IN_ALL} bytes together")
            oldest.give_up()

    def arrived(self, body: Body) -> None:
        self._arriving.pop(body, None)

    def remove(self, body: Body, size: int) -> None:
        self.arrived(body)
        self.size -= size


class Bodies:
    """Counts the bytes of the request bodies of one session's unfinished calls."""

    def __init__(self, intake: Intake) -> None:
        self.size = 0
        self.intake = intake


class Body:
    """The request body of one call. The call runs inside `with Body(bodies) as body:`, and its bytes count until the
    block ends."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._counted = 0
        self._large = 0
        self._clock: asyncio.Timeout | None = None
        self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.size -= self._counted
        self._bodies.intake.remove(self, self._large)
        self._counted = self._large = 0

    async def received(self, parts: AsyncIterator[bytes], capacity: Callable[[], Awaitable[BodyCapacity]]) -> bytes:
        """Receive all parts and return the body. `capacity` is called only for a body above LARGE. It may wait for an
        engine, and this wait does not count as a part of the time in which the body must arrive.

        Raises ContextOverflow, TooLarge, TooSlow, TooMuchAtOnce, and the errors of `capacity`."""
        held: list[bytes] = []
        size = 0
        bound: BodyCapacity | None = None
        files = FileBytes()
        try:
            async with asyncio.timeout(self._bodies.intake.seconds) as self._clock:
                async for part in parts:
                    held.append(part)
                    size += len(part)
                    self._count(size)
                    if size > LARGE:
                        if bound is None:
                            bound = await self._off_the_clock(capacity)
                            files.add(b"".join(held))
                        else:
                            files.add(part)
                        bound.check_size(size, files.size)
        except TimeoutError as error:
            if self._given_up:
                raise TooMuchAtOnce("the request arrived too slowly, and other requests need its memory") from error
            raise TooSlow(f"the request did not arrive within {self._bodies.intake.seconds:g} s") from error
        finally:
            # even after an error, because a clock that has ended cannot give the body up
            self._bodies.intake.arrived(self)
        return held[0] if len(held) == 1 else b"".join(held)

    async def _off_the_clock(self, capacity: Callable[[], Awaitable[BodyCapacity]]) -> BodyCapacity:
        """Call `capacity`, and stop the clock of the body's arrival meanwhile."""
        clock, time = self._clock, asyncio.get_running_loop().time
        assert clock is not None
        end, begun = clock.when(), time()
        if end is None or self._given_up:
            return await capacity()
        clock.reschedule(None)
        bound = await capacity()
        if not self._given_up:
            clock.reschedule(end + time() - begun)
        return bound

    def give_up(self) -> None:
        """Stop receiving the body, so that `received` raises TooMuchAtOnce."""
        self._given_up = True
        self._bodies.intake.remove(self, self._large)
        self._large = 0
        assert self._clock is not None
        if not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time())

    def _count(self, size: int) -> None:
        self._bodies.size += size - self._counted
        self._counted = size
        if self._bodies.size > MAX_IN_SESSION:
            raise TooMuchAtOnce(f"this session's unfinished requests have more than {MAX_IN_SESSION} bytes together")
        if size > LARGE:
            more, self._large = size - self._large, size
            self._bodies.intake.add(self, more)


class FileBytes:
    """Counts those bytes of an arriving body that belong to files in base64. The bytes of files are counted apart from
    the text, because a file that the model cannot read becomes one line of text (`media.py`). For each file, `size` may
    be too small by up to 2 KiB."""

    def __init__(self) -> None:
        self.size = 0
        self._rest = b""

    def add(self, part: bytes) -> None:
        data = self._rest + part
        whole = len(data) - len(data) % _WINDOW
        for start in range(0, whole, _WINDOW):
            if not data[start : start + _WINDOW].translate(None, _BASE64):
                self.size += _WINDOW
        self._rest = data[whole:]


class BodyCapacity(msgspec.Struct, frozen=True):
    """The size limits of one request body. `context` is the model's context length in tokens, or None if unknown.

    `takes_messages` is True for engines that take messages. For them, MAX_BODY is the only limit of the size. For
    engines that take token ids, the text has a lower limit, and files count only towards MAX_BODY."""

    context: int | None
    takes_messages: bool

    @property
    def size(self) -> int:
        """Maximum size of the body in bytes. If `takes_messages` is False, the files in the body are not counted."""
        if self.takes_messages:
            return MAX_BODY
        if self.context is None:
            return MAX_TEXT_BODY
        return min(MAX_TEXT_BODY, FREE_SIZE + BYTES_PER_TOKEN * self.context)

    @property
    def values(self) -> int:
        """Maximum number of JSON values in the body."""
        shown = MAX_VALUES if self.context is None else VALUES_PER_TOKEN * self.context
        return min(MAX_VALUES, FREE_VALUES + shown)

    def check_size(self, size: int, files: int = 0) -> None:
        """Raise ContextOverflow or TooLarge if a body of `size` bytes is too large. `files` is the number of these
        bytes that belong to files."""
        if size > MAX_BODY:
            raise TooLarge(f"the request body is larger than {MAX_BODY} bytes")
        if self.takes_messages or (text := size - files) <= self.size:
            return
        if self.context is not None and text > FREE_SIZE + BYTES_PER_TOKEN * self.context:
            raise self._overflow(1 + (text - FREE_SIZE) // BYTES_PER_TOKEN)
        raise TooLarge(f"the request body has more than {self.size} bytes of text")

    def check_numbers(self, messages: int, tools: int) -> None:
        """Raise ContextOverflow if there are more messages than the context has tokens, and RequestError if there are
        more than MAX_TOOLS tools."""
        if tools > MAX_TOOLS:
            raise RequestError(f"{tools} tools are too many: at most {MAX_TOOLS} are taken", field="tools")
        if self.context is not None and messages > self.context:
            raise self._overflow(messages)

    def checking(self, body: bytes) -> Steps[None]:
        """Check the size of a body above LARGE, and its numbers of JSON separators and escapes. Raises ContextOverflow
        or TooLarge."""
        separators = escapes = 0
        files = FileBytes()
        for start in range(0, len(body), _PIECE):
            yield _PIECE
            piece = body[start : start + _PIECE]
            if not self.takes_messages:
                files.add(piece)
            escapes += piece.count(b"\\")
            separators += len(piece) - len(piece.translate(None, _SEPARATORS))
        if escapes > MAX_ESCAPES:
            raise TooLarge(f"the request body has more than {MAX_ESCAPES} escaped characters")
        self.check_size(len(body), files.size)
        # `separators` includes separators inside strings. If even this number is within the limit, the slow exact count
        # is not needed.
        if separators > self.values and (values := (yield from count_values(body))) > self.values:
            raise self._overflow(values // VALUES_PER_TOKEN)

    def _overflow(self, tokens: int) -> ContextOverflow:
        if self.context is None:
            return ContextOverflow(f"the prompt has at least {tokens} tokens")
        message = f"the prompt has at least {tokens} tokens; the model's context is {self.context}"
        return ContextOverflow(message, overflow=Overflow(tokens, self.context))


def count_values(body: bytes, piece_size: int = _PIECE) -> Steps[int]:
    """Count the objects, lists and commas of a JSON text outside of its strings. The result is meaningless if `body` is
    not JSON."""
    total = 0
    inside = False
    backslashes = 0
    for start in range(0, len(body), piece_size):
        yield min(piece_size, len(body) - start)
        piece = np.frombuffer(body, np.uint8, min(piece_size, len(body) - start), start)
        places = np.arange(len(piece))
        other = np.maximum.accumulate(np.where(piece == _BACKSLASH, -1 - backslashes, places))
        run = np.empty(len(piece), np.int64)  # for each byte, the number of backslashes directly before it
        run[0] = backslashes
        run[1:] = places[:-1] - other[:-1]
        ends = (piece == _QUOTE) & (run % 2 == 0)
        quoted = (np.cumsum(ends) + inside) % 2 == 1
        separators = (piece == _SEPARATORS[0]) | (piece == _SEPARATORS[1]) | (piece == _SEPARATORS[2])
        total += int(np.count_nonzero(separators & ~quoted))
        inside = bool(quoted[-1])
        backslashes = int(places[-1] - other[-1])
    return total


class LimitReached(RequestError):
    """A call was refused because the session has used up its turns or tokens of a model, or because the running calls
    may use up the rest. `model` is None for the policy."""

    code = "limit_reached"
    http_status = 429

    def __init__(self, reason: StopReason, model: str | None = None) -> None:
        of = "" if model is None else f" of the frozen model {model!r}"
        super().__init__(f"this session has reached its limit{of}: {reason.value}")
        self.reason = reason


class Allowance:
    """The tokens that one session may sample from one model. `sampled` is the number sampled so far by finished and
    running calls."""

    def __init__(self, tokens: int, model: str | None = None) -> None:
        self.sampled = 0
        self._model = model
        self._limit = tokens
        self._free = tokens
        self._running = 0
        self._queue = asyncio.Lock()
        self._returned = asyncio.Event()

    @property
    def unsampled(self) -> int:
        """Number of tokens that are not sampled yet. Promised tokens are included."""
        return self._limit - self.sampled

    def resume(self, sampled: int) -> None:
        """Count the `sampled` tokens of an earlier attempt. Call this before the first call of `share`."""
        self.sampled = sampled
        self._free = max(0, self._limit - sampled)

    async def share(self, promised: int) -> TokenShare:
        """Wait until the session has `promised` free tokens, and return these tokens as the share of one call. The
        caller uses the share in a `with` block. If no other call runs, there is no wait, and the share may have fewer
        tokens.

        Calls are served in order of arrival. Raises LimitReached if no token is free."""
        async with self._queue:
            while self._free < promised and self._running:
                self._returned.clear()
                await self._returned.wait()
            if not self._free:
                raise LimitReached(StopReason.MAX_TOKENS, self._model)
            self._running += 1
            return TokenShare(self, self._take_free(promised))

    def draw(self, share: TokenShare, tokens: int) -> int:
        """Charge sampled tokens to a share, as `TokenShare.take` does."""
        if tokens <= share.promised:
            share.promised -= tokens
            self.sampled += tokens
            return tokens
        own = share.promised
        share.promised -= own
        taken = own + self._take_free(tokens - own)
        self.sampled += taken
        return taken

    def give_back(self, share: TokenShare) -> None:
        """Give back the unused tokens of a share whose call has ended."""
        self._running -= 1
        self._free += share.promised
        self._returned.set()

    def _take_free(self, tokens: int) -> int:
        taken = min(tokens, self._free)
        self._free -= taken
        return taken


class TokenShare:
    """The tokens that one call may sample, taken from an `Allowance`. `promised` is the number that is still promised
    to the call."""

    def __init__(self, allowance: Allowance, promised: int) -> None:
        self.promised = promised
        self._allowance = allowance

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._allowance.give_back(self)

    @property
    def unsampled(self) -> int:
        """Number of the session's tokens that are not sampled yet. Promised tokens are included."""
        return self._allowance.unsampled

    def take(self, tokens: int) -> int:
        """Charge up to `tokens` sampled tokens to this call: first its promised tokens, then the session's free tokens.
        Returns the number of tokens charged, which is lower if the session has too few tokens left."""
        return self._allowance.draw(self, tokens)
