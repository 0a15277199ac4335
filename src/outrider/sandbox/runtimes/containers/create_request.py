"""The request that creates a container, in the form of the Docker Engine API. Pure except for reading this process's
own limits.

Invariant: a container has no network, has no privilege beyond its own files and cannot gain any, and is shown only the
host paths mounted here, all read-only. File systems mounted below those paths must be named separately (see
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
"""Maximum number of processes of the container's user. Podman has the same limit."""
MIN_NANO_CPUS = 10_000_000
"""The minimum limit of processor time that daemons accept, in billionths of a processor."""
NEUTRAL = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""Overrides for variables that images set. An image must not load code into the tool server's interpreter. Nor must it
give the container GPUs: CUDA images set NVIDIA_VISIBLE_DEVICES=all, which takes effect where NVIDIA's runtime is the
daemon's default."""

ROOT = ("DAC_OVERRIDE",)
"""Capability for images with files of other users, and with folders whose mode denies writing even to root."""
MANY_USERS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID"),
    "SYS_CHROOT",
)
"""Capabilities for `apt`, `su`, `chown` and similar programs. They are a part of the defaults of container engines:
the capabilities for devices and raw sockets, for example, are missing."""


class HostMount(msgspec.Struct, frozen=True):
    """A folder, file or socket of the host, and its path inside."""

    source: Path
    target: str


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one container. `command` runs as root, without a shell. `limits` is true if the daemon can
    limit containers to `resources`."""

    image: str
    command: Sequence[str]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    shown: Sequence[HostMount]
    resources: Resources
    limits: bool
    users: int = 1
    oci_runtime: str | None = None
    gpus: Sequence[str] = ()

    def body(self, sized: bool) -> dict[str, Any]:
        """Return the JSON body. `sized` is true if the daemon can bound the size of a container's file system."""
        env = {**NEUTRAL, **self.env}
        # The names of the GPUs must replace the value `void` of NEUTRAL, because docker adds this variable only after
        # the entries of this request.
        if plain := [name for name in self.gpus if "/" not in name]:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(plain)
        host: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": list(ROOT if self.users == 1 else MANY_USERS),
            # Without label=disable SELinux blocks sockets between processes of the host and of a container.
            "SecurityOpt": ["no-new-privileges", "label=disable"],
            "Mounts": [
                {"Type": "bind", "Source": str(one.source), "Target": one.target, "ReadOnly": True}
                for one in self.shown
            ],
            # Every request sets these limits, because a daemon's default for containers may exceed the daemon's own
            # hard limit, and then no container starts.
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
    """Return the GPU requests in docker's form. A plain name is for docker's own NVIDIA driver, which needs no
    description of the machine's devices. `vendor/class=device` names a device of the Container Device Interface
    (CDI)."""
    requests: list[dict[str, Any]] = []
    if plain := [name for name in gpus if "/" not in name]:
        requests.append({"Driver": "nvidia", "DeviceIDs": plain, "Capabilities": [["gpu"]]})
    if described := [name for name in gpus if "/" in name]:
        requests.append({"Driver": "cdi", "DeviceIDs": described})
    return requests


def ulimit(name: str, kind: int, most: int) -> dict[str, Any]:
    """Return a limit of a container's processes: `most`, or this process's own hard limit if that is lower."""
    own = resource.getrlimit(kind)[1]
    value = most if own == resource.RLIM_INFINITY else min(own, most)
    return {"Name": name, "Soft": value, "Hard": value}
