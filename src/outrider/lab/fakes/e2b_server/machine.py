"""One sandbox of the fake E2B server: a set of Linux namespaces with its own root folder.

The programs in it are the host's own, read-only. All other folders are empty, writable, and in memory. Resources are
not limited. Invariant: when `stop` returns, no process of the sandbox is alive.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ISOLATE = (
    *(
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--net",
        "--ipc",
        "--uts",
        "--fork",
    ),
    "--kill-child=KILL",
)
ENTER = ("--user", "--preserve-credentials", "--mount", "--pid", "--net", "--ipc", "--uts", "--root")
ROOT = """
set -e
mount --make-rprivate /
mount -t tmpfs none /mnt
cd /mnt
mkdir proc dev tmp root run var var/tmp home home/user old
for name in usr etc; do mkdir $name; mount --rbind -o ro /$name $name; done
for name in bin sbin lib lib32 lib64; do
  if [ -L /$name ]; then cp -P /$name $name; elif [ -d /$name ]; then mkdir $name; mount --rbind /$name $name; fi
done
mount -t proc none proc
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 none dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
chmod 1777 tmp var/tmp dev/shm
ip link set lo up 2>/dev/null || true
pivot_root . old
umount -l /old
rmdir /old
cd /
echo ready
exec sleep infinity
"""
"""Shell script that builds the root folder of a sandbox, and then sleeps to keep the namespaces alive."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "E2B_SANDBOX": "true",
}
FILES = r"""
import json, os, shutil, stat, sys
def entry(path):
    state = os.lstat(path)
    kind = "FILE_TYPE_DIRECTORY" if os.path.isdir(path) else "FILE_TYPE_FILE"
    found = {"name": os.path.basename(path), "type": kind, "path": path, "size": str(state.st_size)}
    found |= {"mode": state.st_mode & 0o7777, "permissions": stat.filemode(state.st_mode), "owner": "root"}
    found |= {"group": "root"}
    if stat.S_ISLNK(state.st_mode):
        found["symlinkTarget"] = os.readlink(path)
    return found
def listed(path, depth):
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        yield entry(inner)
        if depth > 1 and os.path.isdir(inner) and not os.path.islink(inner):
            yield from listed(inner, depth - 1)
def do(op, path, target="", depth=1):
    if op == "stat":
        return {"entry": entry(path)}
    if op == "list":
        return {"entries": list(listed(path, depth))}
    if op == "make":
        os.makedirs(path)
        return {"entry": entry(path)}
    if op == "move":
        os.rename(path, target)
        return {"entry": entry(target)}
    if op == "remove":
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        return {}
    if op == "write":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return {"name": os.path.basename(path), "type": "file", "path": path}
    if op == "read":
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        return None
try:
    reply = do(**json.loads(sys.argv[1]))
except FileExistsError:
    sys.exit("already_exists")
except FileNotFoundError:
    sys.exit("not_found")
except OSError as error:
    sys.exit("invalid_argument: " + str(error))
if reply is not None:
    print(json.dumps(reply))
"""
"""Python program that carries out one file operation. It runs inside the sandbox, so that no symbolic link leads
outside."""


class FileFault(Exception):
    """A file operation failed. `code` is an error code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Machine:
    """A running sandbox. Create it with `start`."""

    def __init__(self, holder: Process, init: int) -> None:
        self._holder = holder
        self._init = init
        self.processes: dict[int, Process] = {}

    @classmethod
    async def start(cls) -> Self:
        holder = await asyncio.create_subprocess_exec(
            *ISOLATE, "sh", "-c", ROOT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        if await holder.stdout.readline() != b"ready\n":
            await end(holder)
            raise OSError(f"no namespaces: {(await holder.stderr.read()).decode()}")
        return cls(holder, child_of(holder.pid))

    async def stop(self) -> None:
        """Kill all processes of the sandbox. When the first process of its pid namespace ends, the kernel kills the
        rest."""
        await end(self._holder)
        for process in list(self.processes.values()):
            await end(process)

    async def run(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> Process:
        """Start a process, with pipes for standard input, output and error."""
        enter = ("nsenter", "--target", str(self._init), *ENTER)
        there = ("sh", "-c", 'cd "$0" && exec "$@"', cwd or "/root")
        process = await asyncio.create_subprocess_exec(
            *enter, *there, *command, env={**ENVIRONMENT, **env}, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        self.processes[process.pid] = process
        return process

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process that `run` has started. `pid` is the id of the program `nsenter`, which has
        started the process as its child. The signal is sent to this child."""
        try:
            (inside,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except (OSError, ValueError):
            return
        kill(int(inside), number)

    async def file(self, op: str, path: str, data: bytes = b"", **more: Any) -> bytes:
        """Carry out the file operation `op` in the sandbox. Raises FileFault."""
        process = await self.run(["python3", "-I", "-c", FILES, json.dumps({"op": op, "path": path, **more})], {}, "/")
        out, complaint = await process.communicate(data)
        self.processes.pop(process.pid, None)
        if process.returncode != 0:
            code, _, message = complaint.decode("utf-8", "replace").strip().partition(": ")
            raise FileFault(code if code in ("not_found", "already_exists") else "invalid_argument", message or code)
        return out


async def end(process: Process) -> None:
    if process.returncode is None:
        kill(process.pid, signal.SIGKILL)
    await process.wait()


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
