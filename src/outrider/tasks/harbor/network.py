"""Finds the lines of a shell script that need a network: package managers, downloads and clones.

Pure. The search is a guess for messages: a line may be skipped when the script runs, or fail without harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

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
MAX_LINE = 2000


class NetworkUse(NamedTuple):
    """A line that needs a network, by its number, and its command: the first two words."""

    line: int
    command: str


def network_uses(script: str) -> Iterator[NetworkUse]:
    """Yield the lines of a shell script that need a network."""
    for number, line in enumerate(script.split("\n"), 1):
        bare = line.strip()
        if bare.startswith("#") or len(bare) > MAX_LINE:
            continue
        if found := NEEDS.search(bare):
            yield NetworkUse(number, " ".join(PREFIX.sub("", found[1]).split()[:2]))
