"""Makes untrusted text safe to show. Text from an agent or a task must not control a terminal, or look like a log line.

Invariant: text returned by `printable` has no control characters except tab and newline.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1: escape sequences begin with a control character
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these change the writing direction, so shown and real text differ
    "\u2028\u2029"  # other line ends
    "\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"  # invisible characters
    "\ud800-\udfff"  # lone surrogates, which cannot be encoded
    "]"
)


def printable(text: str) -> str:
    r"""Return the text with unsafe characters written as \xNN, \uNNNN or \UNNNNNNNN. Unsafe are control characters
    (except tab and newline), invisible characters, direction marks and lone surrogates."""
    return _CONTROL.sub(_escaped, text)


def printable_json(text: str) -> str:
    """Return the JSON document `text`, but write the characters that `printable` replaces as JSON escapes. These
    escapes do not change the document's value."""
    return _CONTROL.sub(_escaped_in_json, text)


def indented(text: str) -> str:
    """Return printable text in which all lines except the first are indented, so that none looks like a separate log
    record."""
    return printable(text).replace("\n", "\n    ")


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _escaped_in_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
