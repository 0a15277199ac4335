"""Pulls images on every machine of a cluster before sandboxes need them, with a DaemonSet whose containers do nothing.

Invariant: `pull_ahead` always removes its DaemonSet, unless the cluster does not respond.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.config import PodsConfig
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.kubernetes.api import KubeApi, KubeApiError
from outrider.sandbox.runtimes.kubernetes.copy_tools import PROGRAM
from outrider.sandbox.runtimes.kubernetes.credentials import find_access
from outrider.sandbox.runtimes.kubernetes.pod_request import COPY_MODULE, TOOLS, TOOLS_AT, TOOLS_MB

LOOK_SECONDS = 1.0
UID = 10001
"""User id in the containers. Outrider's image has the same user."""
MOST_IMAGES = 200
APP_LABEL, APP = "app.kubernetes.io/name", "outrider-images"


class DaemonSetStatus(msgspec.Struct, rename="camel"):
    desired_number_scheduled: int = 0
    number_ready: int = 0
    observed_generation: int = 0


class DaemonSet(msgspec.Struct):
    status: DaemonSetStatus = msgspec.field(default_factory=DaemonSetStatus)


class Pulled(msgspec.Struct, frozen=True):
    """The images that were pulled, and how many machines of the cluster have all of them."""

    images: tuple[str, ...]
    machines: int


async def pull_ahead(
    images: Sequence[str], pods: PodsConfig, *, seconds: float, progress: Callable[[int, int], object] = lambda *_: None
) -> Pulled:
    """Pull images on every machine that may run pods of sandboxes. Raises RuntimeUnavailable. Raises RuntimeFailure if
    a machine lacks images after `seconds`.

    `progress` is called with two numbers: how many machines have all images, and how many machines there are."""
    if pods.tools_image is None:
        raise RuntimeUnavailable(
            "images cannot be pulled without Outrider's own image",
            hint="set sandboxes.kubernetes.tools_image: its interpreter is the only program that every image can run",
        )
    access = await asyncio.to_thread(find_access)
    namespace = pods.namespace or access.namespace
    name = f"outrider-images-{hashlib.sha256(chr(10).join(images).encode()).hexdigest()[:12]}"
    path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
    api, refused = KubeApi(access), False
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(shielded, api.close)
        try:
            try:
                # Even a cancelled call waits for the response, which shows whether there is a DaemonSet to remove.
                await shielded(lambda: api.call("POST", path, msgspec.Raw, body=daemon_set(name, images, pods)))
            except KubeApiError as error:
                if error.reason != "AlreadyExists":  # AlreadyExists: an interrupted call has left the DaemonSet
                    refused = not error.passing  # without a response, there may be a DaemonSet
                    raise failure(error) from error
            return await ready(api, f"{path}/{name}", images, seconds, progress)
        finally:
            if not refused:
                await shielded(lambda: remove(api, f"{path}/{name}"))


async def ready(
    api: KubeApi, path: str, images: Sequence[str], seconds: float, progress: Callable[[int, int], object]
) -> Pulled:
    have = machines = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    status = (await api.call("GET", path, DaemonSet)).status
                except KubeApiError as error:
                    if not error.passing:
                        raise failure(error) from error
                else:
                    have, machines = status.number_ready, status.desired_number_scheduled
                    progress(have, machines)
                    if machines and have >= machines:
                        return Pulled(tuple(images), machines)
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError as error:
        raise RuntimeFailure(
            f"only {have} of {machines} machines have all images after {seconds:g} s",
            hint="check the names of the images, and the secrets for their registries; "
            f"kubectl get pods -l {APP_LABEL}={APP} shows the reason while the command runs",
        ) from error


async def remove(api: KubeApi, path: str) -> None:
    try:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        await api.call("DELETE", path, msgspec.Raw, body=body)
    except KubeApiError as error:
        if error.status != 404:
            raise failure(error) from error


def failure(error: KubeApiError) -> RuntimeFailure:
    if error.status in (401, 403):
        hint = "the account needs the rights to create, get and delete daemonsets"
        return RuntimeUnavailable(f"the cluster refuses: {error}", hint=hint)
    return RuntimeFailure(f"the cluster does not pull images: {error}")


def daemon_set(name: str, images: Sequence[str], pods: PodsConfig) -> dict[str, Any]:
    """Return the JSON body of the DaemonSet. Its init containers run one after another. The first copies a program that
    every image can run. Each of the others uses one of the images, and runs this program."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    resources = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "512Mi"}}
    common: dict[str, Any] = {
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "resources": resources,
        "volumeMounts": [{"name": TOOLS, "mountPath": TOOLS_AT}],
    }
    tools = {"name": TOOLS, "image": pods.tools_image, "command": ["python3", "-m", COPY_MODULE, TOOLS_AT], **common}
    pulls = [
        {"name": f"image-{number}", "image": image, "command": [f"{TOOLS_AT}/{PROGRAM}", "--version"], **common}
        for number, image in enumerate(images)
    ]
    wait = {"name": "wait", "image": pods.tools_image, "command": ["sleep", "infinity"], **common}
    labels = {APP_LABEL: APP, "outrider.images": name}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(pods.node_selector),
        "tolerations": [dict(one) for one in pods.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in pods.pull_secrets],
        "initContainers": [tools, *pulls],
        "containers": [wait],
        "volumes": [{"name": TOOLS, "emptyDir": {"sizeLimit": f"{TOOLS_MB}Mi"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
