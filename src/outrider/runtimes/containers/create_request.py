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
MIN_NANO_CPUS = 10_000_000
"""Daemons refuse less."""
NEUTRAL = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""What an image sets of these must not load code into the tool server's interpreter; nor, where NVIDIA's runtime is the
daemon's default, give the container GPUs: CUDA's images set NVIDIA_VISIBLE_DEVICES=all."""

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
    gpus: Sequence[str] = ()

    def body(self, sized: bool) -> dict[str, Any]:
        """The JSON body. `sized`: the daemon can bound the size of a container's file system."""
        env = {**NEUTRAL, **self.env}
        if plain := [name for name in self.gpus if "/" not in name]:  # docker says so, too, but behind what is here
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(plain)
        host: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": list(ROOT if self.users == 1 else MANY_USERS),
            # Without it SELinux lets no socket through between processes of the host and of a container.
            "SecurityOpt": ["no-new-privileges", "label=disable"],
            "Mounts": [
                {"Type": "bind", "Source": str(one.source), "Target": one.target, "ReadOnly": True}
                for one in self.shown
            ],
            # Given in every case: a daemon's default may be above its own hard limit, and then no container starts.
            "Ulimits": [
                ulimit("nofile", resource.RLIMIT_NOFILE, MAX_FILES),
                ulimit("nproc", resource.RLIMIT_NPROC, MAX_PROCESSES),
            ],
            "LogConfig": {"Type": "none", "Config": {}},
        }
        if self.oci_runtime is not None:
            host["Runtime"] = self.oci_runtime
        if sized:
            host["StorageOpt"] = {"size": f"{self.resources.disk_mb}m"}
        if self.gpus:
            host["DeviceRequests"] = device_requests(self.gpus)
        if self.limits:
            host["PidsLimit"] = self.resources.pids
            host["Memory"] = host["MemorySwap"] = self.resources.most_memory_mb * MEBIBYTE
            if self.resources.cpus is not None:
                host["NanoCpus"] = max(MIN_NANO_CPUS, round(self.resources.cpus * 1e9))
        return {
            "Image": self.image,
            "Entrypoint": list(self.command[:1]),
            "Cmd": list(self.command[1:]),
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": dict(self.labels),
            "Hostname": "sandbox",
            "User": "0:0",
            "WorkingDir": "/",
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }


def device_requests(gpus: Sequence[str]) -> list[dict[str, Any]]:
    """As docker takes them. A plain name is for NVIDIA's own driver of docker's, which needs no description of the
    machine's devices; `vendor/class=device` is one of the Container Device Interface (CDI)."""
    requests: list[dict[str, Any]] = []
    if plain := [name for name in gpus if "/" not in name]:
        requests.append({"Driver": "nvidia", "DeviceIDs": plain, "Capabilities": [["gpu"]]})
    if described := [name for name in gpus if "/" in name]:
        requests.append({"Driver": "cdi", "DeviceIDs": described})
    return requests


def ulimit(name: str, kind: int, most: int) -> dict[str, Any]:
    """A limit of a container's processes: `most`, or this process's own hard limit where that is lower."""
    own = resource.getrlimit(kind)[1]
    value = most if own == resource.RLIM_INFINITY else min(own, most)
    return {"Name": name, "Soft": value, "Hard": value}
