"""Builds the request of the Docker Engine API that creates a container. Only `ulimit` reads the state of this process.
All other functions are pure.

Invariant: a container has no network, and only the privileges that it needs for its own files. It cannot gain further
privileges. It sees only the host paths that are mounted here, all of them read-only. File systems mounted below these
paths must be listed separately (see kernel/mounts.py).
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
"""Maximum number of processes of the container's user. Podman uses the same limit."""
MIN_NANO_CPUS = 10_000_000
"""The smallest CPU limit that daemons accept, in billionths of a processor."""
NEUTRAL = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""Variables that override the variables of an image. An image must not load code into the tool server's interpreter. It
also must not give the container GPUs. CUDA images try this with NVIDIA_VISIBLE_DEVICES=all, which takes effect if
NVIDIA's runtime is the daemon's default."""

ROOT = ("DAC_OVERRIDE",)
"""The only capability that root has in a container with one user. Root needs it, because an image may contain files of
other users, and folders that even their owner may not write."""
MANY_USERS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID"),
    "SYS_CHROOT",
)
"""The capabilities of root in a container with several users. Programs such as `apt`, `su` and `chown` need them. By
default, container engines also give other capabilities, for example for devices and raw sockets. These are left out
here."""


class HostMount(msgspec.Struct, frozen=True):
    """A file, folder or socket of the host, and the path at which the container sees it."""

    source: Path
    target: str


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one container. `command` runs as root, without a shell. `limits` is true if the daemon can
    enforce the limits in `resources`."""

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
        """Return the request's JSON body. `sized` is true if the daemon can limit the size of a container's file
        system."""
        env = {**NEUTRAL, **self.env}
        # Docker also adds this variable, but Docker's value does not override the `void` in NEUTRAL. So the names of
        # the GPUs must replace `void` here.
        if plain := [name for name in self.gpus if "/" not in name]:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(plain)
        host: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "CapAdd": list(ROOT if self.users == 1 else MANY_USERS),
            # Without label=disable, SELinux blocks sockets between the host's processes and the container's.
            "SecurityOpt": ["no-new-privileges", "label=disable"],
            "Mounts": [
                {"Type": "bind", "Source": str(one.source), "Target": one.target, "ReadOnly": True}
                for one in self.shown
            ],
            # Without these limits, the daemon's default applies. If the default is above the daemon's own hard limit,
            # no container starts.
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
    """Return the requests for GPUs in docker's form.

    A plain name, such as `0`, is a GPU of docker's own NVIDIA driver, which needs no description of the machine's
    devices. A name such as `vendor/class=device` is a device of the Container Device Interface (CDI)."""
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
