"""Finds the lines of a shell script that need a network: package managers, downloads and clones. Also changes scripts
to install uv from a package mirror.

The module is pure. Whether a script needs a network is a guess, used only for messages: when the script runs, a line
may be skipped, or may fail without harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.destinations import Destination

BEFORE = r"(?:^|[;&|(`{!]|\b(?:if|then|else|do|sudo|exec|time|env)\s)\s*(?:\w+=\S*\s+)*"
COMMANDS = (
    r"apt(?:-get)?\s+(?:-\S+\s+)*(?:update|install|upgrade)",
    r"apk\s+(?:-\S+\s+)*add",
    r"(?:dnf|yum|microdnf)\s+(?:-\S+\s+)*install",
    r"(?:(?:\S*python[\d.]*\s+-m\s+)|uv\s+)?\S*pip[\d.]*\s+(?:-\S+\s+)*(?:install|download)(?!.*--no-index)",
    r"uvx\b(?!.*--offline)",
    r"uv\s+(?:run|sync|add|tool\s+(?:run|install))\b(?!.*--offline)",
    r"(?:npm|pnpm|yarn)\s+(?:-\S+\s+)*(?:install|ci|add|i)\b(?!.*--offline)",
    r"npx\s",
    r"(?:cargo|go|gem|conda|mamba)\s+(?:install|get|create)\b",
    r"git\s+clone\s.*(?:://|@)",
    r"(?:curl|wget)\s.*(?:https?|ftp)://(?!localhost|127\.|\[?::1)",
)
NEEDS = re.compile(rf"{BEFORE}({'|'.join(COMMANDS)})")
PREFIX = re.compile(r"\S*python\S*\s+-m\s+")
MIRRORS = (
    (re.compile(r"apt"), "mirror:apt"),
    (re.compile(r"\S*pip|uvx?\b"), "mirror:pip"),
    (re.compile(r"np[mx]\b|pnpm|yarn"), "mirror:npm"),
)
"""The package mirrors, each with a pattern for the beginning of commands that use it."""
URL = re.compile(r"(https?)://([\w.-]+)(?::(\d+))?")
MAX_LINE = 2000
PIP = "mirror:pip"
UV_HOST = "astral.sh"
UV_AT = "/tests/outrider-install-uv.sh"
UV_INSTALLER = re.compile(
    r"(?:curl|wget)\b[^|;&\n]{0,200}https://"
    r"(?:astral\.sh/uv/(?:([0-9.]+)/)?install\.sh|github\.com/astral-sh/uv/releases/download/([0-9.]+)/uv-installer\.sh)"
    r"[^|;&\n]{0,100}\|\s*((?:env\s+)?(?:\w+=[^\s|;&]*\s+){0,8})(?:ba)?sh\b"
)
"""Matches a command that downloads uv's installer and runs it. Group 1 or group 2, depending on the form of the URL,
matches uv's version. Group 3 matches the environment variables for the installer."""


class NetworkUse(NamedTuple):
    """A line of a script that needs a network.

    line: its number.
    command: its first two words.
    needs: the mirror, or the host and port, or "" if that is unknown."""

    line: int
    command: str
    needs: str


def network_uses(script: str) -> Iterator[NetworkUse]:
    """Yield the lines of a shell script that need a network."""
    for number, line in enumerate(script.split("\n"), 1):
        bare = line.strip()
        if bare.startswith("#") or len(bare) > MAX_LINE:
            continue
        if found := NEEDS.search(bare):
            command = " ".join(PREFIX.sub("", found[1]).split()[:2])
            yield NetworkUse(number, command, needed(command, bare))


def needed(command: str, line: str) -> str:
    """Return what a line needs: a mirror, or a host and port. Returns "" if this is unknown."""
    for word, mirror in MIRRORS:
        if word.match(command):
            return mirror
    url = URL.search(line)
    return f"{url[2]}:{url[3] or (443 if url[1] == 'https' else 80)}" if url else ""


def covered(needs: str, destinations: Sequence[str]) -> bool:
    """Return True if a sandbox with the network `destinations` reaches the destination `needs`. If `needs` is "", the
    result is True if the network has any destination at all."""
    if not needs or "*" in destinations:
        return bool(destinations)
    try:
        wanted = Destination.read(needs)
    except ValueError:  # this is not a host, but for example a variable
        return bool(destinations)
    return any(Destination.read(one).covers(wanted) for one in destinations)


def with_uv_of_mirror(script: str) -> str:
    """Return a shell script that does not need uv's web site. Commands that download and run uv's installer are
    replaced by Outrider's own installer, which gets the same version from `mirror:pip`."""
    return UV_INSTALLER.sub(lambda found: f"{found[3]}sh {UV_AT} {found[1] or found[2] or ''}".rstrip(), script)


def uv_installer() -> str:
    return (Path(__file__).parent / "install_uv.sh").read_text()
