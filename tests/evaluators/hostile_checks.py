"""Checks that act as hostile code in an answer would act if it ran. The zygote of `test_checks.py` runs these
checks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


def warm_up() -> None:
    pass


def _tried(act: Any) -> str:
    try:
        act()
    except OSError as error:
        return "refused" if error.errno in (errno.EPERM, errno.EACCES) else str(error)
    return "done"


def _forge() -> None:
    """Write a forged result to every file descriptor that can be written to."""
    for fd in range(256):
        try:
            os.write(fd, b'{"score": 1}\n{"status": 0, "seconds": 0}')
        except OSError:
            continue


def check(request: dict[str, Any]) -> dict[str, Any]:
    path = request.get("path", "")
    acts: dict[str, Any] = {
        "write": lambda: Path(path).write_text("x"),
        "append": lambda: os.open(path, os.O_WRONLY | os.O_APPEND),
        "remove": lambda: os.unlink(path),
        "folder": lambda: os.mkdir(path + "-new"),
        "read": lambda: Path(path).read_text(),
        "connect": lambda: socket.create_connection(("127.0.0.1", int(request["port"]))),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "program": lambda: subprocess.run(["/bin/true"], check=True),
        "fork": os.fork,
        "kill": lambda: os.kill(os.getppid(), signal.SIGKILL),
        "ignore": lambda: signal.signal(signal.SIGPROF, signal.SIG_IGN),
        "timer": lambda: signal.setitimer(signal.ITIMER_PROF, 0),
    }
    match request["act"]:
        case "nothing":
            return {"said": "nothing"}
        case "work":
            while time.process_time() < request.get("for", 0.1):
                pass
            return {"said": "worked"}
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(0)
        case "raise":
            raise SystemExit(0)
        case "crash":
            os.abort()
        case "memory":
            return {"said": str(len(bytearray(4 << 30)))}
        case "talk":
            return {"said": "x" * (4 << 20)}
        case "forge":
            _forge()
            return {"said": "forged"}
        case act:
            return {"said": _tried(acts[act])}
