"""docs/architecture.md: the table of one model call has the files that a streamed call enters."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import outrider
from api.test_gateway import CHAT, HELLO, a_gateway

from .pages import page

PACKAGE = Path(outrider.__file__).parent


async def test_the_table_has_the_files_that_a_call_enters(tmp_path: Path) -> None:
    codes: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code.co_filename)

    body = {**HELLO, "stream": True}
    async with a_gateway(tmp_path, *["hi there<|im_end|>"] * 2) as (_, http):
        async with http.post(CHAT, json=body) as reply:
            await reply.read()
        before, before_threads = sys.getprofile(), threading.getprofile()
        sys.setprofile(note)
        threading.setprofile(note)
        try:
            async with http.post(CHAT, json=body) as reply:
                await reply.read()
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)
    paths = {Path(code) for code in codes if Path(code).is_relative_to(PACKAGE)}
    entered = {str(path.relative_to(PACKAGE)) for path in paths}
    entered = {name for name in entered if not name.startswith("lab/")}
    [table] = page("docs/architecture.md").tables("File entered")
    listed = [row[0].partition("`")[2].partition("`")[0] for row in table.rows]
    wanted = "\n".join(f"| [`{name}`](../src/outrider/{name}) | ... |" for name in sorted(entered))
    assert sorted(listed) == sorted(entered), f"the rows of the table are to be:\n{wanted}"
