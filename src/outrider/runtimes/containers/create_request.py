"""The request by which a container is created, as the Docker Engine API has it. Pure but for this process's own limits.

It knows no daemon. Invariant: a container has no network and no privilege beyond its own files, nor a way to get any,
and shows of the host what is mounted here, all of it read-only. File systems mounted below that have to be named by
themselves (see kernel/mounts.py).
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
"""Podman's own limit."""
NEUTRAL = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": ""}
"""What an image sets of these must not load code into the tool server's interpreter."""

ROOT = ("DAC_OVERRIDE",)
"""Images have files of other users, and folders whose mode lets not even root write to them."""
MANY_USERS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID"),
    "SYS_CHROOT",
)
"""For `apt`, `su`, `chown` and the like: what engines give by default, without devices and raw sockets."""


class Shown(msgspec.Struct, frozen=True):
    """A folder, file or socket of the host, and where it is inside."""

    source: Path
    target: str


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`command` runs as root, without a shell. `limits`: the daemon can limit containers to `resources`."""

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
        """The JSON body. `sized`: the daemon can bound the size of a container's file system."""
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
    """Limits of a container's processes, none above this process's own.

    Without them a daemon sets its default, which may be above its own hard limit, and then no container starts."""
    return [
        ulimit("nofile", hard(resource.RLIMIT_NOFILE, MAX_FILES)),
        ulimit("nproc", hard(resource.RLIMIT_NPROC, MAX_PROCESSES)),
    ]


def hard(kind: int, most: int) -> int:
    limit = resource.getrlimit(kind)[1]
    return most if limit == resource.RLIM_INFINITY else min(limit, most)
