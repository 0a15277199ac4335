"""The printable characters in which byte-level BPE vocabularies write bytes (GPT-2's mapping)."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {chr(byte): byte for byte in plain}
    shifted = (byte for byte in range(256) if byte not in set(plain))
    mapping.update({chr(256 + offset): byte for offset, byte in enumerate(shifted)})
    return mapping


BYTE_OF_CHAR = _byte_alphabet()
