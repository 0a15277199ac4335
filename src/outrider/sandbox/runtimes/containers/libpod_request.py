"""Builds the request that creates a container with GPUs in Podman. It uses Podman's own API, because Podman 4 silently
ignores GPUs in requests of Docker's API.

This request is translated from Docker's request, so that a container's permissions are described in only one place.
Invariant: no part of Docker's request is silently left out. A part without a translation raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.sandbox.runtimes.nvidia import CDI_KIND

FIXED = {
    "HostConfig.NetworkMode": "none",
    "HostConfig.LogConfig": {"Type": "none", "Config": {}},
    "HostConfig.SecurityOpt": ["no-new-privileges", "label=disable"],
    "Healthcheck": {"Test": ["NONE"]},
    "StopSignal": "SIGKILL",
}
"""Parts of Docker's request that never vary. The translation is valid only for these values."""


def libpod_body(body: Mapping[str, Any], gpus: Sequence[str]) -> dict[str, Any]:
    """Translate the body of Docker's request into a body for Podman, and add GPUs. `gpus` are names in the Container
    Device Interface (CDI), by which Podman finds the devices."""
    parts = {name: value for name, value in body.items() if name != "HostConfig"}
    parts |= {f"HostConfig.{name}": value for name, value in body["HostConfig"].items()}
    parts.pop("HostConfig.DeviceRequests", None)
    for name, value in FIXED.items():
        if (found := parts.pop(name)) != value:
            raise ValueError(f"{name} = {found!r} is not the value that the translation assumes")
    env = dict(entry.split("=", 1) for entry in parts.pop("Env"))
    request: dict[str, Any] = {
        "image": parts.pop("Image"),
        "entrypoint": parts.pop("Entrypoint"),
        "command": parts.pop("Cmd"),
        "env": env,
        "labels": parts.pop("Labels"),
        "hostname": parts.pop("Hostname"),
        "user": parts.pop("User"),
        "work_dir": parts.pop("WorkingDir"),
        "stop_signal": 9,
        "umask": "0000",
        "healthconfig": {"Test": ["NONE"]},
        "netns": {"nsmode": "none"},
        "log_configuration": {"driver": "none"},
        "no_new_privileges": True,
        "selinux_opts": ["disable"],
        "remove": parts.pop("HostConfig.AutoRemove"),
        "cap_drop": parts.pop("HostConfig.CapDrop"),
        "cap_add": parts.pop("HostConfig.CapAdd"),
        "mounts": [_mount(one) for one in parts.pop("HostConfig.Mounts")],
        "r_limits": [
            {"type": one["Name"].upper(), "soft": one["Soft"], "hard": one["Hard"]}
            for one in parts.pop("HostConfig.Ulimits")
        ],
        "devices": [{"path": name if "/" in name else f"{CDI_KIND}{name}"} for name in gpus],
    }
    if "HostConfig.Runtime" in parts:
        request["oci_runtime"] = parts.pop("HostConfig.Runtime")
    if "HostConfig.StorageOpt" in parts:
        request["storage_opts"] = parts.pop("HostConfig.StorageOpt")
    if limits := _limits(parts):
        request["resource_limits"] = limits
    if parts:
        raise ValueError(f"{', '.join(parts)} of a request of Docker's have no translation into Podman's")
    return request


def _mount(one: Mapping[str, Any]) -> dict[str, Any]:
    if one.keys() != {"Type", "Source", "Target", "ReadOnly"} or one["Type"] != "bind":
        raise ValueError(f"the mount {one!r} is not of the form that the translation assumes")
    options = ["rbind", "rprivate", "ro" if one["ReadOnly"] else "rw"]
    return {"type": "bind", "source": one["Source"], "destination": one["Target"], "options": options}


def _limits(parts: dict[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if "HostConfig.PidsLimit" in parts:
        limits["pids"] = {"limit": parts.pop("HostConfig.PidsLimit")}
    if "HostConfig.Memory" in parts:
        limits["memory"] = {"limit": parts.pop("HostConfig.Memory"), "swap": parts.pop("HostConfig.MemorySwap")}
    if "HostConfig.NanoCpus" in parts:
        period = 100_000
        limits["cpu"] = {"quota": parts.pop("HostConfig.NanoCpus") * period // 10**9, "period": period}
    return limits
