"""The wire format of the tool server. It is the part of msgpack that both ends use, without floats and extensions.

A frame is a length (u32, big-endian) and that many bytes of msgpack. The host sends `[call, method, {arguments}]`. The
server sends `[call, "ok" | "error" | "part", {fields}]`. Text that is not UTF-8, such as an odd file name, is sent as
raw bytes. In this module, it is a str with surrogate escapes.

Invariant: `Unpacker` returns every packed value unchanged, except that a tuple becomes a list. If all text is UTF-8,
msgspec unpacks the same value. All functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, ClassVar


def pack(value: Any, out: bytearray) -> None:
    """Append a value. Lengths and numbers always use the widest encoding, which keeps the code short. This costs
    little, because frames are small."""
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogateescape")
        out += b"\xdb" + len(data).to_bytes(4, "big") + data
    elif kind is int:
        out.append(0xD3)
        out += value.to_bytes(8, "big", signed=True)
    elif kind is bytes or kind is bytearray:
        out += b"\xc6" + len(value).to_bytes(4, "big")
        out += value
    elif kind is dict:
        out += b"\xdf" + len(value).to_bytes(4, "big")
        for key, item in value.items():
            pack(key, out)
            pack(item, out)
    elif kind is list or kind is tuple:
        out += b"\xdd" + len(value).to_bytes(4, "big")
        for item in value:
            pack(item, out)
    elif value is None:
        out.append(0xC0)
    elif kind is bool:
        out.append(0xC3 if value else 0xC2)
    else:
        raise TypeError("cannot pack " + kind.__name__)


class Unpacker:
    """Reads one msgpack value from a complete frame. Raises ValueError if the frame ends early or contains an unknown
    tag."""

    PLAIN: ClassVar[dict[int, bool | None]] = {0xC0: None, 0xC2: False, 0xC3: True}

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        start = self.at
        self.at = end = start + count
        if end > len(self.data):
            raise ValueError("frame ends early")
        return self.data[start:end]

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)

    def value(self) -> Any:
        tag = self.take(1)[0]
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self.mapping(tag & 0x0F)
        if tag < 0xA0:
            return self.sequence(tag & 0x0F)
        if tag < 0xC0:
            return self.text(tag & 0x1F)
        if tag >= 0xE0:
            return tag - 0x100
        if tag in self.PLAIN:
            return self.PLAIN[tag]
        if 0xC4 <= tag <= 0xC6:
            return self.take(self.number(1 << (tag - 0xC4)))
        if 0xCC <= tag <= 0xCF:
            return self.number(1 << (tag - 0xCC))
        if 0xD0 <= tag <= 0xD3:
            return self.number(1 << (tag - 0xD0), signed=True)
        if 0xD9 <= tag <= 0xDB:
            return self.text(self.number(1 << (tag - 0xD9)))
        if 0xDC <= tag <= 0xDD:
            return self.sequence(self.number(2 << (tag - 0xDC)))
        if 0xDE <= tag <= 0xDF:
            return self.mapping(self.number(2 << (tag - 0xDE)))
        raise ValueError(f"unknown msgpack tag {tag:#x}")

    def text(self, size: int) -> str:
        return str(self.take(size), "utf-8", "surrogateescape")

    def sequence(self, size: int) -> list[Any]:
        return [self.value() for _ in range(size)]

    def mapping(self, size: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(size)}
