"""docs/architecture.md: the table of one model call lists the files that a streamed call enters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import outrider
from api.test_gateway import CHAT, HELLO, a_gateway

from .pages import page

PACKAGE = Path(outrider.__file__).parent


CALLS = 4


async def test_the_table_has_the_files_that_a_call_enters(tmp_path: Path) -> None:
    body = {**HELLO, "stream": True}
    calls: list[set[str]] = []
    async with a_gateway(tmp_path, *["hi there<|im_end|>"] * (CALLS + 1)) as (_, http):
        async with http.post(CHAT, json=body) as reply:
            await reply.read()
        for _ in range(CALLS):
            with files_entered() as files:
                async with http.post(CHAT, json=body) as reply:
                    await reply.read()
            calls.append(files)
    # A file that only some calls enter belongs to background work, such as the watch for silent engines.
    paths = {Path(file) for file in set.intersection(*calls) if Path(file).is_relative_to(PACKAGE)}
    entered = {str(path.relative_to(PACKAGE)) for path in paths}
    entered = {name for name in entered if not name.startswith("lab/")}
    [table] = page("docs/architecture.md").tables("File entered")
    listed = [row[0].partition("`")[2].partition("`")[0] for row in table.rows]
    wanted = "\n".join(f"| [`{name}`](../src/outrider/{name}) | ... |" for name in sorted(entered))
    assert sorted(listed) == sorted(entered), f"the rows of the table are to be:\n{wanted}"


@contextmanager
def files_entered() -> Iterator[set[str]]:
    """Yield the set of the files of all functions that are called in the block."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before, before_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)
