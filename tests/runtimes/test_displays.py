"""Invalid rich results. An input may write anything to its interpreter's descriptor for results."""

from __future__ import annotations

import time
import tracemalloc

import msgspec
import pytest

from outrider.sandbox.runtimes.tool_server.client import UNREADABLE
from outrider.sandbox.runtimes.tool_server.sandbox import SHOWN_MAX, unpacked_displays

from .world import World

pytestmark = pytest.mark.timeout(120)


def array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def mapping(count: int) -> bytes:
    return b"\xdf" + count.to_bytes(4, "big")


MANY = SHOWN_MAX - 5
BAD = {
    "empty maps": array(MANY) + b"\x80" * MANY,
    "empty forms": array(1) + mapping(MANY // 2 - 5) + b"\xa0\xa0" * (MANY // 2 - 5),
    "a form in a form": b"\x91\x81\xa1a\x91\xa1b",
    "maps in forms": b"\x91\x81\xa1a" + array(MANY - 10) + b"\x80" * (MANY - 10),
    "deep": b"\x91\x81\xa1a" + b"\x91" * 1_000_000 + b"\xc0",
    "deep at once": b"\x91" * 1_000_000,
    "numbers": b"\x91\x81\x01\x02",
    "no text": b"\x91\x81\xa1a\xa1\xff",
    "cut short": b"\x91\x81\xa1a",
    "more behind": b"\x90\x90",
    "too large": b"\x91\x81\xa1a" + b"\xc6" + SHOWN_MAX.to_bytes(4, "big") + bytes(SHOWN_MAX),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_rich_results_is_refused_in_no_time_and_memory(bad: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(UNREADABLE):
        unpacked_displays(BAD[bad])
    taken, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1
    assert peak < 1 << 20


def test_rich_results_come_as_they_were_sent() -> None:
    sent = [{"text/html": "é", "image/png": b"\0\xff"}, {}, {"long": "x" * 70_000, "data": b"y" * 70_000}]
    assert [one.data for one in unpacked_displays(msgspec.msgpack.encode(sent))] == sent
    assert unpacked_displays(b"") == ()


@pytest.mark.parametrize("nested", ["b'\\x91' * 1000000", "b'\\xdd\\x00\\x80\\x00\\x00' + b'\\x80' * (1 << 23)"])
async def test_a_made_up_result_is_a_note(world: World, nested: str) -> None:
    shell = await (await world.start("process")).open_shell("python")
    forge = (
        f"import os\nfaked = {nested}\nframe = (1).to_bytes(4, 'big') + bytes(8) + faked\n"
        "view = memoryview(len(frame).to_bytes(4, 'big') + frame)\nwhile view: view = view[os.write(4, view):]"
    )
    assert (await shell.run(forge, seconds=60)).output.endswith("[the rich results of this input cannot be read]\n")
    assert (await shell.run("6 * 7", seconds=60)).output == "42\n"
