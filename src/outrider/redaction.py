"""Removes secrets from text that people and programs read: errors, events, the status, the log.

The module recognises Outrider's own keys by their form, and other secrets by their place in the text. Samples and
artifacts are not redacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KEY_PREFIX = "outrider_"
"""Prefix of control API tokens and session keys. Tokens and keys in a text are found by this prefix."""
HIDDEN = "[redacted]"

_OWN = re.compile(rf"{KEY_PREFIX}[\w-]{{32,}}")
_PLACES = re.compile(
    r"""(?P<before>://)[^/\s"'<>]+(?=@)"""  # the user and password of a URL, which may contain an @
    r"""|(?P<header>\bbearer\s+)[^\s"',;\[\]]{8,}"""
    r"""|(?P<name>(?:api[_-]?key|password|passwd|secret)["']?\s*[=:]\s*["']?)[^\s"'&,;{}\[\]]{6,}""",
    re.IGNORECASE,
)
_NAMES_OF_SECRETS = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
SHORTEST = 8
"""Minimum characters of a variable's value that counts as a secret. Without this minimum, values such as `1` or `true`
would be removed from every text."""


def without_keys(text: str) -> str:
    """Return the text without tokens and session keys of Outrider."""
    return _OWN.sub(HIDDEN, text) if KEY_PREFIX in text else text


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without keys of Outrider, the given `secrets`, and values in the usual places of secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _PLACES.sub(
        lambda found: f"{found['before'] or found['header'] or found['name']}{HIDDEN}", without_keys(text)
    )


def secrets_in(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return the values of variables whose names suggest a secret. The longest comes first, because one value may be
    part of another."""
    found = {value for name, value in variables if len(value) >= SHORTEST and _NAMES_OF_SECRETS.search(name)}
    return sorted(found, key=len, reverse=True)
