"""Computes the cost of decoding a MessagePack message before the message is decoded.

msgspec decodes a message in one call that cannot be interrupted. 15 MB of short texts block the event loop for 0.4 s,
and 15 MB of empty lists for several seconds. The size of a message says little about its cost, because a single text of
15 MB takes only 10 ms. So a thread first counts the values of each large message from another machine. Invariant: a
message that passes this check blocks the event loop for less than 50 ms.
"""

from __future__ import annotations

from outrider.wire.link_protocol import Nonsense

SMALL = 64 << 10
"""The cost of messages of up to this many bytes is not checked. The most expensive message of this size, a list of
empty lists, decodes in 26 ms."""
MAX_COST = 400_000
"""Maximum cost of a message. A list or map costs CONTAINER units. A key or a value of another type costs 1 unit. A unit
takes at most 100 ns, so this maximum takes 40 ms."""
CONTAINER = 4
MAX_DEPTH = 64
"""Maximum nesting of lists and maps. Outrider's own messages have about a dozen levels."""

# MessagePack's formats, by the first byte of a value.
#
# - `_FIXED`: the number of bytes that follow.
# - `_SIZED`, `_LISTS`, `_MAPS`: the number of bytes that hold the length. These bytes follow the first byte.
# - `_EXTENSIONS`: after the length comes one more byte, for the type.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = frozenset({0xC7, 0xC8, 0xC9})
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def check_cost(frame: bytes) -> None:
    """Raise Nonsense if a message costs more than MAX_COST, is nested deeper than MAX_DEPTH, or is malformed."""
    at, cost = 0, 0
    left = [1]  # for each open list or map, the number of values still to be read
    end = len(frame)
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= end:
            raise Nonsense("a message that ends too early")
        kind = frame[at]
        at += 1
        items = -1
        if kind <= 0x7F or kind >= 0xE0:  # this byte is the whole value, a small number
            pass
        elif kind <= 0x8F:
            items = 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            items = kind & 0x0F
        elif kind <= 0xBF:
            at += kind & 0x1F
        elif (skipped := _FIXED.get(kind)) is not None:
            at += skipped
        elif (width := _SIZED.get(kind)) is not None:
            at += width + int.from_bytes(frame[at : at + width]) + (kind in _EXTENSIONS)
        elif (width := _LISTS.get(kind)) is not None:
            items = int.from_bytes(frame[at : at + width])
            at += width
        elif (width := _MAPS.get(kind)) is not None:
            items = 2 * int.from_bytes(frame[at : at + width])
            at += width
        else:
            raise Nonsense(f"a message with the byte {kind:#x}, which MessagePack does not have")
        if items < 0:
            cost += 1
        else:
            cost += CONTAINER
            left.append(items)
            if len(left) > MAX_DEPTH:
                raise Nonsense(f"a message with more than {MAX_DEPTH} lists and maps within each other")
        if cost > MAX_COST:
            raise Nonsense(f"a message of {end} bytes with too many values")
