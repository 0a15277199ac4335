"""`python -m campaign.starter`: starts the programs of a campaign as its own children, by fork.

The programs' imports are done once, so that a killed service is up again after a tenth of a second instead of two.
Requests arrive on standard input, one line of JSON each: `{"module", "arguments", "log", "temporary"}` runs
`main(arguments)` of a module in a new process. The starter writes `{"started": pid}` in reply, and `{"ended": pid,
"status": number}` whenever a program ends. Orphaned processes become children of the starter, so all processes that its
programs have left are its descendants. When its input ends, the starter kills its descendants and exits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from campaign import seams

ENDING = (signal.SIGINT, signal.SIGTERM)
PROGRAMS = ("campaign.engine", "campaign.machine", "campaign.reader", "campaign.service")


def descendants(*of: int) -> dict[int, str]:
    """Return the command lines of the descendants of `of`, zombies included, by process number."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process has just ended
    below = set(of)
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: _command(pid) for pid in below.difference(of)}


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def main() -> None:
    seams.install()
    for name in PROGRAMS:
        import_module(name)
    from outrider.sandbox.runtimes.guest.isolation import syscalls

    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in ENDING:  # a Ctrl-C also reaches the campaign, which then ends this process by closing its input
        signal.signal(number, signal.SIG_IGN)
    started: set[int] = set()
    _say({"ready": os.getpid()})
    requests = b""
    while True:
        readable, _, _ = select.select([0, ended], [], [])
        if ended in readable:
            os.read(ended, 4096)
        for pid, status in _reaped():
            if pid in started:  # other children are orphans of the programs
                started.discard(pid)
                _say({"ended": pid, "status": status})
        if 0 not in readable:
            continue
        if not (data := os.read(0, 65_536)):
            break
        *lines, requests = (requests + data).split(b"\n")
        for line in lines:
            started.add(pid := _start(json.loads(line)))
            _say({"started": pid})
    while below := descendants(os.getpid()):
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        list(_reaped())


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _reaped() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _start(request: dict[str, Any]) -> int:
    """Fork a process for the request and return its number; does not return in the new process."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *ENDING):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for place, descriptor in ((0, nothing), (1, log), (2, log)):
            os.dup2(descriptor, place)
        os.closerange(3, 1024)
        tempfile.tempdir = os.environ["TMPDIR"] = request["temporary"]
        import_module(request["module"]).main(*request["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
