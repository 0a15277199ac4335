"""Reads from a pod's status whether the pod runs, has ended, or cannot start. All functions are pure.

If a pod does not start, `trouble_of` returns what to do. For each reason that the cluster may give, the decision is in
the table `TROUBLES`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

CONTAINER = "sandbox"
"""Name of the container in which the agent's programs run."""


class ObjectMeta(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class StateDetail(msgspec.Struct, rename="camel"):
    """Details of a container's state. `exit_code` is None unless the container has terminated."""

    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    finished_at: str | None = None


class ContainerStates(msgspec.Struct):
    waiting: StateDetail | None = None
    running: StateDetail | None = None
    terminated: StateDetail | None = None


class ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    state: ContainerStates = msgspec.field(default_factory=ContainerStates)
    last_state: ContainerStates = msgspec.field(default_factory=ContainerStates)
    image_id: str = msgspec.field(name="imageID", default="")


class PodCondition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class Pod(msgspec.Struct):
    """A pod, with only the fields that Outrider uses."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def runs(self) -> bool:
        """True if the container of the sandbox runs."""
        own = self._own()
        return own is not None and own.state.running is not None

    @property
    def over(self) -> bool:
        """True if no program will run in the pod any more."""
        own = self._own()
        ended = own is not None and own.state.terminated is not None
        return ended or self.status.phase in ("Succeeded", "Failed")

    @property
    def placed(self) -> bool:
        """True if the cluster has assigned the pod to a machine. Until then, the pod waits in the cluster's queue."""
        return self.spec.node_name != ""

    @property
    def ended_at(self) -> str | None:
        """The time at which the sandbox's container ended."""
        own = self._own()
        return None if own is None or own.state.terminated is None else own.state.terminated.finished_at

    @property
    def out_of_memory(self) -> bool:
        own = self._own()
        ended = None if own is None else own.state.terminated or own.last_state.terminated
        return ended is not None and ended.reason == "OOMKilled"

    @property
    def evicted_for_own_use(self) -> bool:
        """True if the cluster removed the pod because its own programs wrote too many bytes to files."""
        return self.status.reason == "Evicted" and "ephemeral" in self.status.message

    @property
    def disrupted(self) -> bool:
        """True if the cluster ends the pod for a reason outside the pod. For example, the pod makes room for another
        pod, or its machine is shut down."""
        return any(one.type == "DisruptionTarget" and one.status == "True" for one in self.status.conditions or ())

    def _own(self) -> ContainerStatus | None:
        return next((one for one in self.status.container_statuses or () if one.name == CONTAINER), None)


class Remedy(StrEnum):
    """What to do about a pod that does not run yet."""

    WAIT = "wait"
    """Wait until the time limit, because the cluster tries again by itself."""
    FAIL = "fail"
    """Let this attempt fail. The session is tried again on another node or later."""
    REFUSE = "refuse"
    """Refuse the task. No attempt can succeed until somebody changes the task or the cluster."""


class Trouble(msgspec.Struct, frozen=True):
    remedy: Remedy
    text: str
    hint: str | None = None


NEEDS_PYTHON = "use an image with python3 of 3.8 or newer, or set sandboxes.kubernetes.tools_image"
TROUBLES: dict[str, tuple[Remedy, str]] = {
    "ErrImagePull": (Remedy.WAIT, "check the image's name, and the secrets for its registry"),
    "ImagePullBackOff": (Remedy.REFUSE, "check the image's name, and the secrets for its registry"),
    "InvalidImageName": (Remedy.REFUSE, "name an image as NAME:TAG or NAME@DIGEST"),
    "ErrImageNeverPull": (Remedy.REFUSE, "load the image on every machine of the cluster"),
    "ImageInspectError": (Remedy.FAIL, ""),
    "RegistryUnavailable": (Remedy.WAIT, ""),
    "CreateContainerConfigError": (Remedy.REFUSE, ""),
    "CreateContainerError": (Remedy.FAIL, ""),
    "RunContainerError": (Remedy.FAIL, ""),
    "StartError": (Remedy.REFUSE, NEEDS_PYTHON),
    "ContainerCannotRun": (Remedy.REFUSE, NEEDS_PYTHON),
    "Unschedulable": (Remedy.WAIT, "no machine of the cluster has room: lower task.runtime.resources, or add machines"),
    "SchedulerError": (Remedy.WAIT, ""),
}
"""The reaction to each reason that the cluster gives, and a hint for the user. If the pod or a container waits for a
reason that is not listed, Outrider also waits."""


def trouble_of(pod: Pod) -> Trouble | None:
    """Return why the pod does not run, or None if nothing prevents its start."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None:
        return Trouble(Remedy.FAIL, "somebody else has removed the pod")
    for one in (*(status.init_container_statuses or ()), *(status.container_statuses or ())):
        if (waiting := one.state.waiting) is not None and waiting.reason in TROUBLES:
            return of_table(waiting.reason, waiting.message)
        ended = one.state.terminated
        if ended is not None and (ended.exit_code or one.name == CONTAINER):
            if ended.reason in TROUBLES:
                return of_table(ended.reason, ended.message)
            text = f"container {one.name!r} has exited with {ended.exit_code}: {ended.reason} {ended.message}"
            return Trouble(Remedy.FAIL, text.strip())
    if status.phase in ("Failed", "Succeeded"):
        return Trouble(Remedy.FAIL, f"the pod has ended: {status.reason} {status.message}".strip())
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False" and condition.reason in TROUBLES:
            return of_table(condition.reason, condition.message)
    return None


def of_table(reason: str, message: str) -> Trouble:
    remedy, hint = TROUBLES[reason]
    return Trouble(remedy, f"{reason}: {message}".rstrip(": "), hint or None)
