"""What a namespace sandbox is to look like, as plain data: what guest/isolation/isolate.py carries out.

It knows the spec and the host's folders, and makes nothing but the skeleton of a root. Invariant: of the host, a plan
shows its system folders, a fixed list of harmless files below /etc, and what the caller names.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Container, Mapping
from pathlib import Path

import msgspec

from outrider.spec import MEBIBYTE, Resources

BYTES_PER_FILE = 4096
"""What a sandbox may write bounds the number of its files, too: each takes kernel memory."""
FILES_OF_MEMORY = 0.75
OPEN_FILES_LEAST = 1024
"""What programs take for granted."""
OPEN_FILES_MOST = 1 << 16
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
EMPTY_FOLDERS = ("dev", "etc", "proc", "root", "run", "tmp", "usr", "var/tmp")
ETC_FOLDERS = ("alternatives", "ssl/certs", "pki/ca-trust/extracted", "pki/tls/certs", "crypto-policies")
ETC_COPIED = ("ld.so.cache", "localtime", "mime.types", "os-release", "protocols", "services", "ssl/openssl.cnf")
ETC_MADE = {
    "passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": b"root:x:0:\nnogroup:x:65534:\n",
    "hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}


Ids = tuple[int, int, int]
"""The first id inside, the first outside, how many."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` are (folder of the host, where it is inside), the first of them the root, each under a throw-away
    writable one; `shown` is (path of the host, where it is inside), read-only. `bytes` and `files` bound what may be
    written. `memory` is what `counted_memory` says. `saved` is an archive of writable layers to begin with, "" for
    none. `uids` and `gids` are which users there are; `mappers` the programs that can give more than one."""

    base: str
    layers: tuple[tuple[str, str], ...]
    shown: tuple[tuple[str, str], ...]
    bytes: int
    files: int
    gateway: str
    cgroups: tuple[str, ...] = ()
    rlimits: Mapping[str, int] = {}
    memory: int = 0
    saved: str = ""
    uids: tuple[Ids, ...] = msgspec.field(default_factory=lambda: ((0, os.geteuid(), 1),))
    gids: tuple[Ids, ...] = msgspec.field(default_factory=lambda: ((0, os.getegid(), 1),))
    mappers: Mapping[str, str] = {}


class Root(msgspec.Struct, frozen=True):
    """The folders of the host that a sandbox's root is made of."""

    layers: tuple[tuple[str, str], ...]
    shown: tuple[tuple[str, str], ...]


def image_root(folder: Path) -> Root:
    return Root(((str(folder), "/"),), ())


def host_root(skeleton: Path) -> Root:
    """The host's system folders over a skeleton that `make_skeleton` made. Where this user owns /usr it gets a
    throw-away writable layer; over that of another owner one would be of no use."""
    own = os.stat("/usr").st_uid == os.geteuid()
    usr = ("/usr", "/usr")
    folders = [f"/{name}" for name in SYSTEM_FOLDERS if Path("/", name).is_dir() and not _link(name)]
    return Root(
        ((str(skeleton), "/"), *((usr,) if own else ())),
        (*(() if own else (usr,)), *zip(folders, folders, strict=True)),
    )


def make_skeleton(folder: Path) -> None:
    """A root without its system folders: empty folders, links, and files below /etc, made up or copies of harmless
    ones, as they are now."""
    for name in EMPTY_FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    for name in SYSTEM_FOLDERS:
        if aim := _link(name):
            (folder / name).symlink_to(aim)
    copied = {name: Path("/etc", name) for name in ETC_COPIED}
    files = ETC_MADE | {name: path.read_bytes() for name, path in copied.items() if path.is_file()}
    for name, data in files.items():
        path = folder / "etc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name in ETC_FOLDERS:
        if Path("/etc", name).is_dir():
            shutil.copytree(Path("/etc", name).resolve(), folder / "etc" / name, symlinks=True, dirs_exist_ok=True)


def _link(name: str) -> str | None:
    path = Path("/", name)
    return os.readlink(path) if path.is_symlink() else None


def rlimits(resources: Resources, controllers: Mapping[str, object], *, own_users: bool = False) -> dict[str, int]:
    """What each process is bound by where no control group does it for all of them together. With `own_users` the
    sandbox has a user namespace: else the number of processes would be that of the user on all of the host."""
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))}
    if "pids" not in controllers and own_users:
        limits["RLIMIT_NPROC"] = resources.pids
    if counted := counted_memory(resources, controllers):
        # Not the address space: Node cannot compile WebAssembly in less than some tens of GiB of it.
        limits["RLIMIT_DATA"] = counted
    return limits


def counted_memory(resources: Resources, controllers: Container[str]) -> int:
    """Maximum bytes of memory of all programs of the sandbox, kept by its tool server (guest/memory_watch.py).

    It is 0 where a control group keeps it."""
    return 0 if "memory" in controllers else resources.most_memory_mb * MEBIBYTE


def open_files(soft: int, hard: int) -> int:
    """Descriptors that a program may have open, by what its node may. The kernel lets a process send one only while the
    user has no more on their way than the process may have open: half of the node's own leaves the node as many,
    whatever its sandboxes send each other."""
    soft, hard = (OPEN_FILES_MOST * 2 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    return max(min(OPEN_FILES_MOST, soft // 2), min(OPEN_FILES_LEAST, hard))


def room(resources: Resources) -> tuple[int, int]:
    """Bytes and files that may be written. They live in memory: where a task says how much, files may take a part of
    it, so that a full disk is an error and not the death of all programs."""
    size = resources.disk_mb * MEBIBYTE
    if resources.memory_mb is not None:
        size = min(size, round(resources.memory_mb * MEBIBYTE * FILES_OF_MEMORY))
    return size, max(4096, size // BYTES_PER_FILE)


def supported() -> str | None:
    """None when the kernel has the calls that a sandbox is made by, else what is missing."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"needs Linux on x86-64 or arm64, this is {platform.system()} on {platform.machine()}"
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if version < (5, 12):
        return f"needs Linux 5.12 or newer, this is {platform.release()}"
    return None
