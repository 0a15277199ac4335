"""A process that was begun is waited for, and killed where it does not end."""

from __future__ import annotations

import socket

import pytest

from outrider.runtimes.kernel.child import Child

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
