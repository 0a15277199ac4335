"""Removes secrets from text that people and programs read: errors, events, the status, the log.

Outrider's own keys are recognised by their prefix, and other secrets by the text around them, such as `password=`.
Samples and artifacts are not redacted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

KEY_PREFIX = "outrider_"
"""The prefix of session keys and control API tokens. Keys and tokens in a text are found by this prefix."""
HIDDEN = "[redacted]"

_OWN = re.compile(rf"{KEY_PREFIX}[\w-]{{32,}}")
_PLACES = re.compile(
    r"""(?P<before>://)[^/\s"'<>]+(?=@)"""  # a URL's user and password, which may contain an @
    r"""|(?P<header>\bbearer\s+)[^\s"',;\[\]]{8,}"""
    r"""|(?P<name>(?:api[_-]?key|password|passwd|secret)["']?\s*[=:]\s*["']?)[^\s"'&,;{}\[\]]{6,}""",
    re.IGNORECASE,
)
_NAMES_OF_SECRETS = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
SHORTEST = 8
"""The shortest value of a variable that counts as a secret, in characters. Without a limit, values such as `1` or
`true` would be removed from every text."""

MOST_TRIES = 1000
"""Maximum number of ends of a secret that are compared with the beginning of a log (see `_end_length`)."""


def without_keys(text: str) -> str:
    """Return the text without Outrider's own tokens and session keys."""
    return _OWN.sub(HIDDEN, text) if KEY_PREFIX in text else text


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without Outrider's own keys, without `secrets`, and without values in places where secrets
    usually are, such as `password=`. A secret is also found where it is part of a JSON string. There, a private key of
    several lines is one line, for example in the log of a program that writes JSON lines."""
    for secret in secrets:
        for form in _forms(secret):
            text = text.replace(form, HIDDEN)
    return _PLACES.sub(
        lambda found: f"{found['before'] or found['header'] or found['name']}{HIDDEN}", without_keys(text)
    )


def redacted_tail(text: str, secrets: Iterable[str]) -> str:
    """Like `redacted`, for text that is the end of a longer text. A secret whose beginning is cut off is also removed,
    if at least SHORTEST characters of it are left."""
    secrets = tuple(secrets)
    length = max((_end_length(text, form) for secret in secrets for form in _forms(secret)), default=0)
    return (HIDDEN if length else "") + redacted(text[length:], secrets)


def _end_length(text: str, secret: str) -> int:
    """Return the length of the longest end of the secret with which the text begins, or 0 if it is shorter than
    SHORTEST. At most MOST_TRIES ends are compared, because the comparison of all ends of a secret that repeats itself
    takes quadratic time."""
    begin = text[:SHORTEST]
    at = 0
    for _ in range(MOST_TRIES if len(begin) == SHORTEST else 0):
        at = secret.find(begin, at + 1)
        if at < 0:
            return 0
        if text.startswith(secret[at:]):
            return len(secret) - at
    return 0


def _forms(secret: str) -> tuple[str, ...]:
    """Return the secret, and its form in a JSON string if this differs."""
    return tuple(dict.fromkeys((secret, json.dumps(secret, ensure_ascii=False)[1:-1])))


def secrets_in(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return the values of variables whose names suggest a secret, such as API_KEY. Longer values come first, because
    they may contain shorter ones."""
    found = {value for name, value in variables if len(value) >= SHORTEST and _NAMES_OF_SECRETS.search(name)}
    return sorted(found, key=len, reverse=True)
