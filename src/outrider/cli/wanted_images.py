"""Parses the images that a command must pull, and pulls them with a line of progress for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from outrider.cli.terminal import Terminal
from outrider.errors import ErrorRecord, InvalidField, OutriderError, record_of

T = TypeVar("T")

AT_ONCE = 4
"""Maximum number of images that one command pulls in parallel."""
HELP = "REFERENCE NAME for one image; NAME=REFERENCE for each of several."


def read_images(words: Sequence[str]) -> dict[str, str]:
    """Parse the words REFERENCE NAME for a single image, or a word NAME=REFERENCE for each of several images. Returns
    the references by name. Raises InvalidField."""
    found: dict[str, str] = {}
    if len(words) == 2 and not any("=" in word for word in words):
        return {words[1]: words[0]}
    for word in words:
        name, is_pair, reference = word.partition("=")
        if not is_pair or not name or not reference:
            raise InvalidField(
                f"{word!r} is not NAME=REFERENCE",
                field="image",
                hint="one image: REFERENCE NAME; several: debian=docker.io/library/debian:13 python=docker.io/…",
            )
        if name in found:
            raise InvalidField(f"the name {name!r} is given twice", field="image", hint="give each image its own name")
        found[name] = reference
    return found


async def pull_each(
    images: Mapping[str, str], pull: Callable[[str, str], Awaitable[T]], terminal: Terminal
) -> dict[str, T | ErrorRecord]:
    """Call `pull(reference, name)` for every image, at most AT_ONCE at a time. Returns the result or the error of each
    call, by image name.

    For several images, print a line when each call begins and ends. For a single image, raise its error instead of
    returning it."""
    slots, done, total = asyncio.Semaphore(AT_ONCE), 0, len(images)

    async def one(name: str, reference: str) -> T | OutriderError:
        nonlocal done
        async with slots:
            if total > 1:
                terminal.note(f"pulling {reference} as {name}")
            try:
                result: T | OutriderError = await pull(reference, name)
            except OutriderError as error:
                result = error
        done += 1
        if total > 1:
            ended = f"failed: {result.message}" if isinstance(result, OutriderError) else "is here"
            terminal.note(f"{name} {ended} ({done} of {total})")
        return result

    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(one(name, reference)) for name, reference in images.items()}
    results: dict[str, T | ErrorRecord] = {}
    for name, task in tasks.items():
        if isinstance(result := task.result(), OutriderError):
            if total == 1:
                raise result
            results[name] = record_of(result)
        else:
            results[name] = result
    return results
