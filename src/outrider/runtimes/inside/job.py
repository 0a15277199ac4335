"""One command: started, fed, listened to, limited, killed with its descendants, reported."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from outrider.runtimes.inside.calls import Calls
from outrider.runtimes.inside.capture import Capture, Drain
from outrider.runtimes.inside.processes import kill_tree, spawn

if TYPE_CHECKING:
    from typing import Any


class Job:
    """One command from start to reply. Its children that outlive it keep their pipes: what they still write is read
    and dropped, so that they neither hang the call nor die of SIGPIPE."""

    def __init__(self, calls: Calls, call: int, args: dict[str, Any]) -> None:
        self.calls = calls
        self.call = call
        self.cap = args["cap"]
        self.limit_hit = False
        self.started = time.monotonic()
        self.mark = calls.mark(call)
        self.pid, self.drains = self._start(args)
        calls.loop.exits[self.pid] = self.exited
        calls.loop.at(self, args["ms"] / 1000, self.expire)
        calls.running[call] = self.cancel

    def _start(self, args: dict[str, Any]) -> tuple[int, list[Drain]]:
        source = memory_file(args["stdin"]) if args["stdin"] else os.open("/dev/null", os.O_RDONLY)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        env = self.calls.environment(args["env"], self.call)
        try:
            pid = spawn(args["argv"], env, args["cwd"], {0: source, 1: out_write, 2: err_write})
        except OSError:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            for fd in (source, out_write, err_write):
                os.close(fd)
        return pid, [Drain(self.calls.loop, fd, Capture(self.cap)) for fd in (out_read, err_read)]

    def expire(self) -> None:
        self.limit_hit = True
        self.cancel()

    def cancel(self) -> None:
        kill_tree({self.pid}, self.mark)

    def exited(self, code: int) -> None:
        self.calls.loop.timers.pop(self, None)
        self.calls.running.pop(self.call, None)
        self.calls.reply(
            self.call,
            {
                "code": None if self.limit_hit else code,
                "out": self.drains[0].finish(),
                "err": self.drains[1].finish(),
                "timed_out": self.limit_hit,
                "us": int((time.monotonic() - self.started) * 1e6),
            },
        )


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("stdin")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
