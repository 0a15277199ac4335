"""Finds the paths in a sandbox that match a pattern.

The rules are those of Python's `glob.glob(pattern, recursive=True)`. A name that begins with a dot only matches a part
of the pattern that also begins with a dot. Invariant: every search ends, even if links form a cycle, because `**` does
not follow links.
"""

from __future__ import annotations

import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.paths import exists, is_folder, is_link

if TYPE_CHECKING:
    from collections.abc import Iterator

WILD = "*?["


def found_paths(root: str, pattern: str, limit: int) -> bytes:
    """Return the sorted matching paths below `root`, with a NUL byte after each. Returns at most `limit` + 1 paths: the
    additional path tells the host that there are more than `limit`."""
    found: set[str] = set()
    for path in matches(root, "", pattern.split("/")):
        found.add(path)
        if len(found) > limit:
            break
    return b"".join(sorted(path.encode("utf-8", "surrogateescape") + b"\0" for path in found))


def matches(root: str, above: str, parts: list[str]) -> Iterator[str]:
    """Yield the matching paths. `above` is the folder in which to search, with a final slash, or "". `parts` are the
    remaining parts of the pattern. An empty last part matches only folders."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from matches_below(root, above, rest)
    elif not part:
        if above and is_folder(root + "/" + above):
            yield above
    elif not any(char in part for char in WILD):
        if rest or exists(root + "/" + above + part):
            yield from matches(root, above + part + "/", rest) if rest else [above + part]
    else:
        for name in matching_names(root + "/" + above, part):
            if not rest:
                yield above + name
            elif is_folder(root + "/" + above + name):
                yield from matches(root, above + name + "/", rest)


def matches_below(root: str, above: str, rest: list[str]) -> Iterator[str]:
    """Yield the matches of `rest`, the pattern after `**`, in `above` and in every folder below it. If `rest` is empty,
    everything below `above` matches. `**` skips hidden names and does not follow links."""
    waiting = [above]  # no recursion, because an agent can nest folders deeper than Python's stack
    while waiting:
        folder = waiting.pop()
        if rest:
            yield from matches(root, folder, rest)
        for name in names_in_folder(root + "/" + folder):
            if name.startswith("."):
                continue
            if not rest:
                yield folder + name
            path = root + "/" + folder + name
            if is_folder(path) and not is_link(path):
                waiting.append(folder + name + "/")


def names_in_folder(folder: str) -> list[str]:
    try:
        return posix.listdir(folder)
    except OSError:
        return []


def matching_names(folder: str, part: str) -> list[str]:
    import fnmatch  # imported here, because it loads slowly and only a forked child needs it

    names = names_in_folder(folder)
    if not part.startswith("."):
        names = [name for name in names if not name.startswith(".")]
    return fnmatch.filter(names, part)
