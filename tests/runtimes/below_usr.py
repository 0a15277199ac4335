"""Runs a command as root, in a mount namespace, on a machine that has file systems mounted below /usr.

    unshare --mount --propagation slave python below_usr.py FORM SCRATCH COMMAND...

FORM is `plain`, `stacked` or `locked`. `plain` is the form of a container: /usr is an overlay, and file systems are
mounted in it. `stacked` has a second overlay on top, which is the maximum that the kernel stacks. `locked` has the
mounts of `plain`, but the command runs in a user namespace and has no privileges to undo them. The folder `/usr/below`
exists only in the mount namespace. SCRATCH is an empty folder. The command's environment contains the form.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
BELOW = Path("/usr/below")
FORM = "BELOW_USR"
"""The environment variable with the form."""
BIND, REC, SHARED, UNBINDABLE = 1 << 12, 1 << 14, 1 << 20, 1 << 17


def mount(source: str, target: Path | str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, str(target), kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind or source} on {target}: {os.strerror(ctypes.get_errno())}")


def overlay(scratch: Path, name: str) -> None:
    for part in ("upper", "work"):
        (scratch / f"{name}-{part}").mkdir()
    where = f"lowerdir=/usr,upperdir={scratch}/{name}-upper,workdir={scratch}/{name}-work"
    mount("overlay", "/usr", "overlay", 0, where)


def folder(name: str) -> Path:
    (BELOW / name).mkdir(parents=True)
    return BELOW / name


def hide(name: str) -> Path:
    """Make a folder with a file, over which the caller then mounts something. Returns the folder."""
    (folder(name) / "hidden").write_text("hidden")
    return BELOW / name


def mount_all(scratch: Path) -> None:
    """Mount one file system of each kind that a machine may have below /usr."""
    driver = hide("driver")
    mount("none", driver, "tmpfs")
    (driver / "lib").write_text("driver")
    (driver / "suid").write_bytes(Path("/usr/bin/id").read_bytes())
    (driver / "suid").chmod(0o4755)
    os.mknod(driver / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    (driver / "deeper").mkdir()
    mount("none", driver / "deeper", "tmpfs")
    (driver / "deeper/lib").write_text("deeper")
    mount("none", driver, None, SHARED)
    mount("none", driver / "deeper", None, UNBINDABLE)
    (driver / "proc").mkdir()
    mount("proc", driver / "proc", "proc")

    tool = BELOW / "tool"
    tool.write_text("hidden")
    (scratch / "tool").write_text("#!/bin/sh\necho tool\n")
    (scratch / "tool").chmod(0o755)
    mount(str(scratch / "tool"), tool, None, BIND)

    mount("none", hide("with blank"), "tmpfs")
    (BELOW / "with blank/lib").write_text("blank")
    mount("none", hide("twice"), "tmpfs")
    (BELOW / "twice/hidden").write_text("hidden")
    mount("none", BELOW / "twice", "tmpfs")
    (BELOW / "twice/lib").write_text("twice")
    mount("proc", hide("proc"), "proc")
    mount("sysfs", hide("sys"), "sysfs")

    reader, writer = os.pipe()  # the pipe of an automounter that never answers
    mount("auto", hide("auto"), "autofs", 0, f"fd={writer},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct")
    os.mknod(scratch / "fuse", 0o600 | stat.S_IFCHR, os.makedev(10, 229))
    answers = os.open(scratch / "fuse", os.O_RDWR)  # the connection of a file system whose server never answers
    mount("fuse", hide("silent"), "fuse", 0, f"fd={answers},rootmode=40000,user_id=1000,group_id=1000")
    for fd in (reader, writer, answers):
        os.set_inheritable(fd, True)

    socket.socket(socket.AF_UNIX).bind(str(scratch / "socket"))
    (BELOW / "socket").write_text("hidden")
    mount(str(scratch / "socket"), BELOW / "socket", None, BIND)


def main() -> None:
    form, given, *command = sys.argv[1:]
    scratch = Path(given, "mounts")
    scratch.mkdir()
    mount("none", scratch, "tmpfs")
    overlay(scratch, "one")
    if form == "stacked":
        overlay(scratch, "two")
    mount_all(scratch)
    if form == "locked":
        command = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "slave", *command]
    sys.exit(subprocess.run(command, check=False, close_fds=False, env={**os.environ, FORM: form}).returncode)


if __name__ == "__main__":
    main()
