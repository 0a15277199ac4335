"""What a container is asked to be, in the words of the Docker Engine API. Pure but for a look at this process's limits.

It knows no daemon. Invariant: a container has no network and no privilege beyond its own files, nor a way to get any,
and shows of the host what is mounted here, all of it read-only: what is mounted in that has to be named by itself (see
kernel/mounts.py).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outrider.spec import MEBIBYTE, Resources

MAX_FILES = 1 << 16
MAX_PROCESSES = 1 << 15
"""Podman holds itself to that many."""
NEUTRAL = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": ""}
"""Whatever the image sets must not get into the tool server's interpreter."""

ROOT = ("DAC_OVERRIDE",)
"""Images have files that are not root's, and folders that by their mode not even root may write to."""
MANY_USERS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID"),
    "SYS_CHROOT",
)
"""For `apt`, `su`, `chown` and the like: those that engines give by themselves, but for devices and raw sockets."""


class Shown(msgspec.Struct, frozen=True):
    """A folder, file or socket of the host, and where it is inside."""

    source: Path
    target: str


class ContainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`command` runs as root, without a shell. `limits`: the daemon can hold containers to `resources`."""

    image: str
    command: Sequence[str]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    shown: Sequence[Shown]
    resources: Resources
    limits: bool
    users: int = 1
    oci_runtime: str | None = None

    def body(self, sized: bool) -> dict[str, Any]:
        """The body of a create request. `sized`: the daemon can bound a container's file system."""
        return {
            "Image": self.image,
            "Entrypoint": list(self.command[:1]),
            "Cmd": list(self.command[1:]),
            "Env": [f"{name}={value}" for name, value in {**NEUTRAL, **self.env}.items()],
            "Labels": dict(self.labels),
            "Hostname": "sandbox",
            "User": "0:0",
            "WorkingDir": "/",
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": self._host_config(sized),
        }

    def _host_config(self, sized: bool) -> dict[str, Any]:
        config: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": list(ROOT if self.users == 1 else MANY_USERS),
            # Between processes of the host and of a container SELinux lets no socket through.
            "SecurityOpt": ["no-new-privileges", "label=disable"],
            "Mounts": [mount(one) for one in self.shown],
            "Ulimits": ulimits(),
            "LogConfig": {"Type": "none", "Config": {}},
        }
        if self.oci_runtime is not None:
            config["Runtime"] = self.oci_runtime
        if sized:
            config["StorageOpt"] = {"size": f"{self.resources.disk_mb}m"}
        return {**config, **(self._limits() if self.limits else {})}

    def _limits(self) -> dict[str, int]:
        limits = {"PidsLimit": self.resources.pids}
        limits["Memory"] = limits["MemorySwap"] = self.resources.most_memory_mb * MEBIBYTE
        if self.resources.cpus is not None:
            limits["NanoCpus"] = max(10_000_000, round(self.resources.cpus * 1e9))  # less is refused
        return limits


def mount(one: Shown) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(one.source), "Target": one.target, "ReadOnly": True}


def ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def ulimits() -> list[dict[str, Any]]:
    """Given in every case, and not above what this process may have: a daemon's own choice may be above what it may
    itself have, and then no container starts."""
    return [
        ulimit("nofile", hard(resource.RLIMIT_NOFILE, MAX_FILES)),
        ulimit("nproc", hard(resource.RLIMIT_NPROC, MAX_PROCESSES)),
    ]


def hard(kind: int, most: int) -> int:
    limit = resource.getrlimit(kind)[1]
    return most if limit == resource.RLIM_INFINITY else min(limit, most)
