"""The wire format of the tool server: the part of msgpack that both ends use (no floats, no extensions).

A frame is a u32 big-endian length and that many bytes of msgpack: `[call, method, {arguments}]` from the host,
`[call, "ok" | "error" | "part", {fields}]` to it. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, ClassVar


def pack(value: object, out: bytearray) -> None:
    if value is None:
        out.append(0xC0)
    elif value is True or value is False:
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        out.append(0xD3)
        out += value.to_bytes(8, "big", signed=True)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
        out.append(0xDB)
        out += len(data).to_bytes(4, "big") + data
    elif isinstance(value, (bytes, bytearray)):
        out.append(0xC6)
        out += len(value).to_bytes(4, "big")
        out += value
    elif isinstance(value, (list, tuple)):
        out.append(0xDD)
        out += len(value).to_bytes(4, "big")
        for item in value:
            pack(item, out)
    elif isinstance(value, dict):
        out.append(0xDF)
        out += len(value).to_bytes(4, "big")
        for key, item in value.items():
            pack(key, out)
            pack(item, out)
    else:
        raise TypeError("cannot pack " + type(value).__name__)


class Unpacker:
    """Reads one msgpack value out of a complete frame."""

    SIZED: ClassVar[dict[int, tuple[str, int]]] = {
        0xC4: ("b", 1),
        0xC5: ("b", 2),
        0xC6: ("b", 4),
        0xD9: ("s", 1),
        0xDA: ("s", 2),
        0xDB: ("s", 4),
    }
    GROUPED: ClassVar[dict[int, tuple[str, int]]] = {0xDC: ("a", 2), 0xDD: ("a", 4), 0xDE: ("m", 2), 0xDF: ("m", 4)}
    PLAIN: ClassVar[dict[int, bool | None]] = {0xC0: None, 0xC2: False, 0xC3: True}

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError("frame ends early")
        self.at += count
        return piece

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)

    def message(self) -> tuple[int, str, dict[str, Any]]:
        """The whole frame, as a call."""
        call, method, args = self.value()
        return call, method, args

    def value(self) -> Any:
        tag = self.number(1)
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90:
            return self.group("m", tag & 0x0F)
        if tag < 0xA0:
            return self.group("a", tag & 0x0F)
        if tag < 0xC0:
            return self.text(tag & 0x1F)
        if tag in self.PLAIN:
            return self.PLAIN[tag]
        if tag in self.SIZED:
            kind, width = self.SIZED[tag]
            size = self.number(width)
            return self.text(size) if kind == "s" else self.take(size)
        if tag in self.GROUPED:
            kind, width = self.GROUPED[tag]
            return self.group(kind, self.number(width))
        if 0xCC <= tag <= 0xCF:
            return self.number(1 << (tag - 0xCC))
        if 0xD0 <= tag <= 0xD3:
            return self.number(1 << (tag - 0xD0), signed=True)
        raise ValueError(f"unknown msgpack tag {tag:#x}")

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8", "surrogateescape")

    def group(self, kind: str, size: int) -> Any:
        if kind == "a":
            return [self.value() for _ in range(size)]
        return {self.value(): self.value() for _ in range(size)}
