"""A child process is waited for, and killed if it does not end."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.kernel.child import Child, _status
from outrider.sandbox.runtimes.kernel.process_marks import started, stat_fields

from .test_leaks import Traces


@pytest.mark.parametrize(("script", "by_itself"), [("read x", True), ("exec sleep 4006", False)])
async def test_the_end_comes_in_any_case(script: str, by_itself: bool) -> None:
    before = Traces()
    ours, theirs = socket.socketpair()
    with theirs:
        child = Child.spawn(["/bin/sh", "-c", f"{script}; exit 3"], {"PATH": "/usr/bin:/bin"}, theirs)
    ours.close()
    assert await child.end(30.0 if by_itself else 0.0) is by_itself
    assert before.left() == (set(), False, set())
    assert child.log_tail() == ""


async def test_every_concurrent_waiter_sees_the_exit() -> None:
    """A zygote may have many sandboxes. If the zygote is killed, none of them may blame its agent."""
    before = Traces()
    ours, theirs = socket.socketpair()
    with theirs:
        child = Child.spawn(["/bin/sh", "-c", "read x; exit 3"], {"PATH": "/usr/bin:/bin"}, theirs)
    waiters = [asyncio.create_task(child.ends_within(30.0)) for _ in range(3)]
    early = await child.ends_within(0.01)
    ours.close()
    assert (early, await asyncio.gather(*waiters)) == (False, [True, True, True])
    assert await child.ends_within(0.0)
    await child.end(0.0)
    assert before.left() == (set(), False, set())


def test_a_programs_name_is_no_line_of_its_status() -> None:
    name = Path(f"/proc/self/task/{os.getpid()}/comm")
    own = name.read_bytes()
    try:
        name.write_bytes(b"\rPPid:\t1")
        assert _status(os.getpid(), "PPid") == [os.getppid()]
    finally:
        name.write_bytes(own.removesuffix(b"\n"))


def test_a_programs_name_may_have_any_bytes() -> None:
    """To kill a sandbox's processes, a node reads the names of all processes of the host."""
    name = Path(f"/proc/self/task/{os.getpid()}/comm")
    own, begun = name.read_bytes(), started(os.getpid())
    try:
        name.write_bytes(b"\xff) Z 1 (\xfe")
        assert stat_fields(os.getpid())[:2] == ["R", str(os.getppid())]
        assert started(os.getpid()) == begun != ""
    finally:
        name.write_bytes(own.removesuffix(b"\n"))
