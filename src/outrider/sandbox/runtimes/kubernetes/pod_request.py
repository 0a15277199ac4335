"""Builds the request that creates the pod of a sandbox. All functions are pure.

Invariant: a pod has no credentials of the cluster and sees nothing of its machine. It has only the privileges that it
needs for its own files, and cannot gain more. If the pod's user is root, this user is root only in the pod's own user
namespace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.config import PodsConfig
from outrider.sandbox.pythons.portable import PORTABLE_AT, portable_command
from outrider.sandbox.runtimes.containers.create_request import MANY_USERS, NEUTRAL, ROOT
from outrider.sandbox.runtimes.kubernetes.pod_state import CONTAINER
from outrider.sandbox.runtimes.tool_server.bundle import FLAGS
from outrider.spec import Resources, RuntimeSpec

APP_LABEL, APP = "app.kubernetes.io/name", "outrider-sandbox"
"""The label of every sandbox's pod. The chart's network policy selects pods by it."""
IDLE_SECONDS = 60
"""A pod ends by itself if it has no tool server for this many seconds. This happens if its node was killed, or cannot
reach the cluster any more."""
BACKSTOP_SECONDS = 900
"""Seconds for the start of a pod, in addition to the sandbox's lifetime. When both have passed, the cluster itself ends
the pod."""
HOLD = (
    "import _signal,posix,time\n"
    "_signal.signal(15,lambda *a:posix._exit(0))\n"
    # makes the kernel remove orphans that this process adopts, as soon as they exit
    "_signal.signal(17,_signal.SIG_IGN)\n"
    "seen=time.monotonic()\n"
    f"while time.monotonic()-seen<{IDLE_SECONDS}:\n"
    " if any(name.isdigit() and name!='1' for name in posix.listdir('/proc')): seen=time.monotonic()\n"
    " time.sleep(1)\n"
)
"""The first program of a pod. It ends on SIGTERM, or after IDLE_SECONDS without any other process."""
TOOLS, TOOLS_AT = "tools", "/run/outrider-tools"
"""A volume with the tool server's interpreter and the programs of harnesses: its name, and its path in the container
that fills it."""
TOOLS_MB = 4096
COPY_MODULE = "outrider.sandbox.runtimes.kubernetes.copy_tools"
OWN = "own"
"""Name of the volume with folders that a user other than root may write."""
OWN_HOME = "/home/outrider"
"""Home folder of a user other than root."""


def pod_name(node: str, sandbox: str) -> str:
    """Return the name of a sandbox's pod. `node` is the node's label. `sandbox` is the name of the sandbox's folder,
    which is unique on the node."""
    return f"outrider-{hashlib.sha256(f'{node}/{sandbox}'.encode()).hexdigest()[:20]}"


def label_value(text: str) -> str:
    """Return `text` as a valid value of a label: at most 63 letters, digits, `-`, `_` and `.`."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-")


def python_of(pods: PodsConfig) -> list[str]:
    """Return the command of the interpreter that runs the tool server in a pod."""
    return ["python3"] if pods.tools_image is None else portable_command()


def pod_body(
    name: str,
    labels: Mapping[str, str],
    pods: PodsConfig,
    spec: RuntimeSpec,
    *,
    shown: Sequence[Path],
    env: Mapping[str, str],
) -> dict[str, Any]:
    """Return the JSON body of the pod for `spec`. `shown` are folders of the tools image, which the pod sees at the
    same paths. `env` are the variables of the pod's first program."""
    folders = [] if pods.tools_image is None else [PORTABLE_AT, *map(str, shown)]
    tools = [{"name": TOOLS, "mountPath": folder, "subPath": str(number)} for number, folder in enumerate(folders)]
    writable = [] if pods.user is None else own_folders(spec)
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": round(spec.lifetime_seconds) + BACKSTOP_SECONDS,
        # The pod does not use the cluster's DNS server, which would resolve any internet name for the agent.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": pod_security(pods),
        "containers": [
            {
                "name": CONTAINER,
                "image": spec.image,
                "imagePullPolicy": "IfNotPresent",
                "command": [*python_of(pods), *FLAGS, "-c", HOLD],
                "workingDir": "/",
                "env": [{"name": name, "value": value} for name, value in {**NEUTRAL, **env}.items()],
                "resources": resource_limits(spec.resources),
                "securityContext": container_security(pods, spec.users or 1),
                "volumeMounts": [
                    *({**one, "readOnly": True} for one in tools),
                    *({"name": OWN, "mountPath": folder, "subPath": folder.strip("/")} for folder in writable),
                ],
            }
        ],
        "volumes": [
            *([{"name": TOOLS, "emptyDir": {"sizeLimit": f"{TOOLS_MB}Mi"}}] if tools else []),
            *([{"name": OWN, "emptyDir": {"sizeLimit": f"{spec.resources.disk_mb}Mi"}}] if writable else []),
        ],
    }
    if tools:
        body["initContainers"] = [
            {
                "name": TOOLS,
                "image": pods.tools_image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["python3", "-m", COPY_MODULE, TOOLS_AT, *map(str, shown)],
                "resources": resource_limits(spec.resources),
                "securityContext": container_security(pods, 1),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [{"name": TOOLS, "mountPath": TOOLS_AT}],
            }
        ]
    if pods.user is None:
        body["hostUsers"] = False
    if pods.node_selector:
        body["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        body["tolerations"] = [dict(one) for one in pods.tolerations]
    if pods.runtime_class is not None:
        body["runtimeClassName"] = pods.runtime_class
    if pods.priority_class is not None:
        body["priorityClassName"] = pods.priority_class
    if pods.pull_secrets:
        body["imagePullSecrets"] = [{"name": name} for name in pods.pull_secrets]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {APP_LABEL: APP, **labels}},
        "spec": body,
    }


def own_folders(spec: RuntimeSpec) -> list[str]:
    """Return the folders to make for a user other than root: the home folder, and the working folder if that is the
    default one. The image must contain any other working folder."""
    default = RuntimeSpec.model_fields["workdir"].default
    return [OWN_HOME, *([spec.workdir] if spec.workdir == default else [])]


def pod_security(pods: PodsConfig) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if pods.user is not None:
        security |= {"runAsNonRoot": True, "runAsUser": pods.user, "runAsGroup": pods.user, "fsGroup": pods.user}
    else:
        security |= {"runAsUser": 0, "runAsGroup": 0}
    return security


def container_security(pods: PodsConfig, users: int) -> dict[str, Any]:
    capabilities: dict[str, Sequence[str]] = {"drop": ["ALL"]}
    if pods.user is None:
        capabilities["add"] = list(ROOT if users == 1 else MANY_USERS)
    return {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": capabilities}


def resource_limits(resources: Resources) -> dict[str, Any]:
    """Return the resource requests and limits of a container. The container requests the memory and CPUs that the task
    names, or small defaults."""
    limits = {"memory": f"{resources.most_memory_mb}Mi", "ephemeral-storage": f"{resources.disk_mb}Mi"}
    requests = {"memory": f"{resources.memory_mb or 64}Mi", "ephemeral-storage": f"{min(resources.disk_mb, 64)}Mi"}
    cpus = "50m"
    if resources.cpus is not None:
        cpus = limits["cpu"] = f"{max(1, round(resources.cpus * 1000))}m"
    return {"limits": limits, "requests": {**requests, "cpu": cpus}}
