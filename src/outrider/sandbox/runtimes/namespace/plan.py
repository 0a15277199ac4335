"""The plan of a namespace sandbox. It is plain data, which guest/isolation/isolate.py carries out.

This module reads the host's folders, and creates only the skeleton of a root. Invariant: a plan shows only these files
of the host: the system folders, a fixed list of harmless files below /etc, a fixed list of devices, and the paths that
the caller names.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.sandbox.runtimes.kernel.mounts import MountPoint
from outrider.sandbox.runtimes.limits import kernel_version
from outrider.sandbox.runtimes.shown_folders import SYSTEM_FOLDERS

EMPTY_FOLDERS = ("dev", "etc", "proc", "root", "run", "tmp", "usr", "var/tmp")
ETC_FOLDERS = ("alternatives", "ssl/certs", "pki/ca-trust/extracted", "pki/tls/certs", "crypto-policies")
ETC_COPIED = ("ld.so.cache", "localtime", "mime.types", "os-release", "protocols", "services", "ssl/openssl.cnf")
ETC_MADE = {
    "passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": b"root:x:0:\nnogroup:x:65534:\n",
    "hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
HIDDEN_KINDS = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "mqueue", "nfsd", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs"),
        *("sysfs", "tracefs"),
    }
)
"""Kinds of file systems that no sandbox may see, even if they are mounted below a system folder, as in a chroot. Most
belong to the kernel and reveal facts about the host. In `autofs`, looking up a name may wait for a server."""

Ids = tuple[int, int, int]
"""A range of ids, as in a line of /proc/PID/uid_map: the first id in the sandbox, the first id on the host, and the
number of ids."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one sandbox.

    - `base`: the folder at which the root is mounted, in the sandbox's own mount namespace.
    - `layers`: pairs (folder on the host, path inside), with the root first. Each layer gets a writable layer on top,
      which is thrown away later. A layer other than the root is read-only if it cannot get a writable layer.
    - `folders`: pairs of the same form, mounted read-only.
    - `inner`: pairs for the host's mounts inside the folders above (see `inner_of`). Each must be mounted separately,
      or hidden if the host folder is "".
    - `shown`: pairs (path on the host, path inside) of further read-only mounts, made after all mounts above.
    - `named`: the read-only mounts that the task names. No part of their host paths may be a link.
    - `devices`: pairs for further device files that programs may use.
    - `bytes`, `files`: the maximum total size and number of written files.
    - `gateway`: the path of the gateway's socket.
    - `cgroups`: see `ControlGroup.entrances`.
    - `memory`: see `counted_memory`.
    - `owners`: a file with the owners of the image's files (see rootfs/owners.py), or "".
    - `saved`: an archive of writable layers with which the sandbox starts, or "".
    - `uids`, `gids`: the ranges of user ids and group ids.
    - `mappers`: the programs that can map more than one user."""

    base: str
    layers: tuple[tuple[str, str], ...]
    folders: tuple[tuple[str, str], ...] = ()
    inner: tuple[tuple[str, str], ...] = ()
    shown: tuple[tuple[str, str], ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    bytes: int
    files: int
    gateway: str
    cgroups: tuple[str, ...] = ()
    rlimits: Mapping[str, int] = {}
    memory: int = 0
    owners: str = ""
    saved: str = ""
    uids: tuple[Ids, ...]
    gids: tuple[Ids, ...]
    mappers: Mapping[str, str] = {}


class Root(msgspec.Struct, frozen=True):
    """The folders of the host that form the root of a sandbox. `Plan` explains the fields."""

    layers: tuple[tuple[str, str], ...]
    folders: tuple[tuple[str, str], ...] = ()


def image_root(folder: Path) -> Root:
    return Root(((str(folder), "/"),))


def host_root(skeleton: Path) -> Root:
    """Return a root that consists of a skeleton (see `make_skeleton`) and the host's system folders. /usr gets a
    writable layer only if this user owns /usr, because programs cannot write to an overlay over another user's
    files."""
    own = os.stat("/usr").st_uid == os.geteuid()
    usr = ("/usr", "/usr")
    folders = [f"/{name}" for name in SYSTEM_FOLDERS if Path("/", name).is_dir() and not _link(name)]
    return Root(
        ((str(skeleton), "/"), *((usr,) if own else ())),
        (*(() if own else (usr,)), *zip(folders, folders, strict=True)),
    )


def inner_of(root: Root, mounts: Sequence[MountPoint]) -> tuple[tuple[str, str], ...]:
    """Return `Plan.inner` for a root. `mounts` are all mounts of the host, with outer mounts first. A copy of a visible
    mount also contains the mounts inside it. So such an inner mount needs its own pair only if its kind is in
    HIDDEN_KINDS."""
    found: list[tuple[str, str]] = []
    for folder, inside in (*root.layers[1:], *root.folders):
        shown, hidden = tuple[str, ...](), tuple[str, ...]()
        for mount in mounts:
            if not mount.path.startswith(f"{folder}/") or mount.path.startswith(hidden):
                continue
            place = f"{inside}{mount.path[len(folder) :]}"
            if mount.kind in HIDDEN_KINDS:
                hidden += (f"{mount.path}/",)
                found.append(("", place))
            elif not mount.path.startswith(shown):
                shown += (f"{mount.path}/",)
                found.append((mount.path, place))
    return tuple(found)


def make_skeleton(folder: Path) -> None:
    """Make a root without its system folders. It has empty folders, links, and files below /etc. The files have fixed
    texts, or are copies of harmless files of the host. The call blocks."""
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


def unsupported() -> str | None:
    """Return why this machine cannot run namespace sandboxes. Returns None if the machine's system, processor and
    kernel are supported."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"needs Linux on x86-64 or arm64, this is {platform.system()} on {platform.machine()}"
    if kernel_version() < (5, 12):
        return f"needs Linux 5.12 or newer, this is {platform.release()}"
    return None
