"""The wire format of the tool server: the part of msgpack that both ends use (no floats, no extensions).

A frame is a u32 big-endian length and as many bytes of msgpack: `[call, method, {arguments}]` from the host, `[call,
"ok" | "error" | "part", {fields}]` to the host. Text that is not UTF-8, such as an odd file name, is sent as its bytes;
this module reads and writes such text as a str with surrogate escapes. Invariant: `Unpacker` reads every packed value
back unchanged (a tuple as a list), and so does msgspec if all text is UTF-8. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, ClassVar


def pack(value: Any, out: bytearray) -> None:
    """Append a value. Lengths and numbers always have the widest form, which keeps the code short. The frames are
    small, so this costs little."""
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
    """Reads one msgpack value out of a complete frame. Raises ValueError for a frame that ends early, or an unknown
    tag."""

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
        start = self.at
        self.at = end = start + count
        if end > len(self.data):
            raise ValueError("frame ends early")
        return self.data[start:end]

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)

    def message(self) -> tuple[int, str, dict[str, Any]]:
        """Return the whole frame as a call: its number, method and arguments."""
        call, method, args = self.value()
        return call, method, args

    def value(self) -> Any:
        tag = self.take(1)[0]
        if tag < 0x80:
            return tag
        if 0xA0 <= tag < 0xC0:
            return str(self.take(tag & 0x1F), "utf-8", "surrogateescape")
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90:
            return self.group("m", tag & 0x0F)
        if tag < 0xA0:
            return self.group("a", tag & 0x0F)
        if tag in self.SIZED:
            kind, width = self.SIZED[tag]
            data = self.take(self.number(width))
            return str(data, "utf-8", "surrogateescape") if kind == "s" else data
        if 0xCC <= tag <= 0xCF:
            return self.number(1 << (tag - 0xCC))
        if tag in self.PLAIN:
            return self.PLAIN[tag]
        if tag in self.GROUPED:
            kind, width = self.GROUPED[tag]
            return self.group(kind, self.number(width))
        if 0xD0 <= tag <= 0xD3:
            return self.number(1 << (tag - 0xD0), signed=True)
        raise ValueError(f"unknown msgpack tag {tag:#x}")

    def group(self, kind: str, size: int) -> Any:
        if kind == "a":
            return [self.value() for _ in range(size)]
        return {self.value(): self.value() for _ in range(size)}
