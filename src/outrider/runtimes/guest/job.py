"""One command: started, fed, listened to, limited, killed with its descendants, reported."""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.runtimes.guest.calls import Calls
from outrider.runtimes.guest.capture import Capture, Drain, Feed
from outrider.runtimes.guest.processes import kill_tree, spawn

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
        source, sink = posix.pipe() if args["stdin"] else (posix.open("/dev/null", posix.O_RDONLY), -1)
        out = posix.pipe()
        err = out if args["merged"] else posix.pipe()
        env = self.calls.environment(args["env"], self.call)
        argv = args["argv"] or [self.calls.shell(), "-c", args["script"]]
        try:
            pid = spawn(argv, env, args["cwd"], {0: source, 1: out[1], 2: err[1]})
        except OSError:
            for fd in {out[0], err[0], sink} - {-1}:
                posix.close(fd)
            raise
        finally:
            for fd in {source, out[1], err[1]}:
                posix.close(fd)
        if sink >= 0:
            Feed(self.calls.loop, sink, args["stdin"])
        readers = [out[0]] if args["merged"] else [out[0], err[0]]
        return pid, [Drain(self.calls.loop, fd, Capture(self.cap)) for fd in readers]

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
                "err": self.drains[1].finish() if len(self.drains) > 1 else b"",
                "timed_out": self.limit_hit,
                "us": int((time.monotonic() - self.started) * 1e6),
            },
        )
