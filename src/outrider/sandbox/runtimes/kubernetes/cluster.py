"""The pods of one node in a cluster. This module creates them, follows their states, and removes them.

It does not depend on the programs in a pod. Invariant: the name of a pod of this node is added to `_ours` before the
pod's creation is requested, and stays there until `remove` has ended. `sweep` removes all other pods of this node, the
pods of nodes that have certainly ended, and every pod that ended long ago.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, Self

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Chores
from outrider.concurrency.events import Broadcast
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.kubernetes.api import WAITS, ClusterWaits, KubeApi, KubeApiError
from outrider.sandbox.runtimes.kubernetes.credentials import find_access
from outrider.sandbox.runtimes.kubernetes.pod_request import APP, APP_LABEL
from outrider.sandbox.runtimes.kubernetes.pod_state import Pod, Remedy, trouble_of
from outrider.sandbox.runtimes.node_host import Host, remove_all
from outrider.sandbox.runtimes.remote import NODE_LABEL, QueueClock, StartQueue, is_orphan, node_label

REMOVE_SECONDS = 60.0
PAUSES = RetryPolicy(first=0.5, longest=10.0)
"""Seconds to wait before a failed call is repeated, if the failure may be temporary."""
LEFT_SECONDS = 120.0
"""If a pod of another node ended more than this many seconds ago, this node removes it. A living node would have
removed its own pod earlier."""
QUOTA = "exceeded quota"
"""Text in the error message of an API server that refuses a pod beyond the namespace's quota."""
RIGHTS = "the account needs the rights in docs/runtimes/kubernetes.md"
FORBIDDEN = {
    "failed quota": "the namespace's quota limits a resource that the task does not name: set task.runtime.resources",
    "violates PodSecurity": "set sandboxes.kubernetes.user, or lower the pod security level of the namespace",
    "maximum ": "the namespace has a limit range: change task.runtime.resources",
    "minimum ": "the namespace has a limit range: change task.runtime.resources",
}
"""Hints for requests that the server forbids, although the account has all rights. The keys are texts in the server's
error message."""

log = logging.getLogger("outrider.runtime")


class PodCluster:
    """Runs the pods of a node. All sandboxes of the node share this object (see node_host.py)."""

    def __init__(self, host: Host, *, waits: ClusterWaits = WAITS) -> None:
        self.waits = waits
        self.pods = host.pods
        self.node = node_label(host)
        self.queue = StartQueue(host.starts_per_second)
        self.chores = Chores(host.failures)
        self._ours: set[str] = set()
        self._seen: dict[str, Pod] = {}
        """The newest states of this node's pods, by name."""
        self._version = ""
        self._changed = Broadcast()
        self._no_room = host.no_room
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Connect to the API server, remove pods that dead nodes left (see `sweep`), and start to watch pods. If a pod
        cannot be removed, this is only logged. Raises RuntimeUnavailable and RuntimeFailure."""
        access = await asyncio.to_thread(find_access)
        self.namespace = self.pods.namespace or access.namespace
        self.server = access.url
        async with AsyncExitStack() as undo:
            self.api = KubeApi(access, waits=self.waits)
            undo.push_async_callback(shielded, self.api.close)
            left = await self._left()
            try:
                await remove_all(self.remove, left)
            except RuntimeFailure as failure:  # a pod that cannot be removed must not keep new ones from starting
                log.warning("a pod of a dead node is left: %s", failure)
            await undo.enter_async_context(self.chores)
            self._stack = undo.pop_all()
        self.chores.begin("watch pods", self._watch)
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.sweep()
        except RuntimeFailure as failure:
            log.warning("pods may be left for the next node to remove: %s", failure)
        finally:
            await self._stack.aclose()

    async def _watch(self) -> None:
        """Follow the states of this node's pods until the server ends the watch."""
        selector = f"{NODE_LABEL}={self.node}"
        if not self._version:
            found, self._version = await self.api.list_pods(self.namespace, selector)
            self._seen = {pod.metadata.name: pod for pod in found}
            self._changed.send()
        version, self._version = self._version, ""  # after any failure, the pods are listed again
        try:
            async for event in self.api.watch_pods(self.namespace, selector, version):
                version = event.pod.metadata.resource_version or version
                if event.kind == "DELETED":
                    self._seen.pop(event.pod.metadata.name, None)
                elif event.kind != "BOOKMARK":
                    self._seen[event.pod.metadata.name] = event.pod
                self._changed.send()
        except KubeApiError as error:
            if error.status != 410:  # 410: the server no longer has the changes since `version`
                raise self.failure("watch its pods", error) from error
        else:
            self._version = version

    async def create(self, name: str, body: Mapping[str, Any], clock: QueueClock, *, ahead: bool = False) -> float:
        """Create a pod. The caller must then call `remove`, even if this method raises or is cancelled. Returns the
        time, by `time.monotonic`, until which the pod may wait for the cluster. This time is `queue_seconds` (a
        setting) after the start first reached its turn in the node's queue.

        The method waits for a turn in the node's queue, for a slow or overloaded server, and for room in the
        namespace's quota. The session's time limits do not count these waits. A pod that is made `ahead` does not wait
        for room in the quota. Raises RuntimeFailure, or RuntimeUnavailable if the server refuses the pod."""
        self._ours.add(name)
        with clock.waiting():
            await self.queue.turn()
        limit, failures = time.monotonic() + self.pods.queue_seconds, 0
        while True:
            try:
                with clock.waiting():
                    # Once a request was sent, its response is always awaited, because only the response shows whether
                    # there is a pod to remove.
                    await shielded(lambda: self.api.create_pod(self.namespace, body))
            except KubeApiError as error:
                if error.status == 409 and error.reason == "AlreadyExists" and failures:
                    return limit  # an earlier request created the pod, but its response was lost
                full = error.status == 403 and QUOTA in str(error)
                if not (full or error.passing):
                    raise self._refusal(error) from error
                if time.monotonic() > limit or (full and ahead):
                    raise RuntimeFailure(f"the cluster at {self.server} does not create a pod: {error}") from error
                if full:
                    self._no_room.publish("kubernetes")
                wait = (self.waits.full if full else PAUSES).wait(failures, error.retry_after)
                failures += 1
                with clock.waiting():
                    await asyncio.sleep(wait)
                    await self.queue.turn()
                if time.monotonic() > limit:  # a pod that is made now would be given up at once
                    raise RuntimeFailure(f"the cluster at {self.server} does not create a pod: {error}") from error
            else:
                return limit

    async def running(self, name: str, clock: QueueClock, limit: float, *, ahead: bool = False) -> Pod:
        """Wait until the pod's container runs, and give up at `limit`, which `create` has returned. The session's time
        limits do not count this wait. Raises RuntimeUnavailable and RuntimeFailure with the cluster's own message."""
        trouble = None
        while True:
            changed = self._changed.next()
            pod = self._seen.get(name)
            if pod is not None:
                if pod.runs and pod.metadata.deletion_timestamp is None:
                    return pod
                trouble = trouble_of(pod)
                if trouble is not None and trouble.remedy is not Remedy.WAIT:
                    kind = RuntimeUnavailable if trouble.remedy is Remedy.REFUSE else RuntimeFailure
                    raise kind(f"the pod does not start: {trouble.text}", hint=trouble.hint)
            if time.monotonic() > limit:
                text = "it is not placed, or its image is not pulled" if trouble is None else trouble.text
                raise RuntimeFailure(
                    f"the pod does not run after {self.pods.queue_seconds:g} s: {text}",
                    hint=None if trouble is None else trouble.hint,
                )
            with clock.waiting():
                try:
                    async with asyncio.timeout(self.waits.look):
                        await changed.wait()
                except TimeoutError:
                    await self._look(name)
                    if pod is not None and not pod.placed and not ahead:
                        self._no_room.publish("kubernetes")

    async def _look(self, name: str) -> None:
        """Request the state of a pod about which no event has arrived."""
        try:
            self._seen[name] = await self.api.pod(self.namespace, name)
        except KubeApiError as error:
            if error.status == 404:
                raise RuntimeFailure("somebody else has removed the pod") from error
            if not error.passing:
                raise self._refusal(error) from error

    async def state(self, name: str) -> Pod | None:
        """Return the pod's state, or None if the pod does not exist. Raises RuntimeFailure if the server does not
        respond."""
        try:
            return await self.api.pod(self.namespace, name)
        except KubeApiError as error:
            if error.status == 404:
                return None
            raise self.failure("read a pod", error) from error

    async def remove(self, name: str, *, emptied: Callable[[], bool] = lambda: False) -> None:
        """Remove the pod, and wait until the server has no pod of this name. Raises RuntimeFailure if the pod cannot be
        removed. The next sweep then tries again.

        `emptied` returns True if no program runs in the pod any more. The server then deletes its record of the pod at
        once. Otherwise the pod's machine ends the programs first. If this takes longer than half of REMOVE_SECONDS, the
        machine is treated as lost, and the server deletes its record without waiting for the machine."""
        begun, failures = time.monotonic(), 0
        try:
            while True:
                spent = time.monotonic() - begun
                grace = 0 if emptied() or spent > REMOVE_SECONDS / 2 else 1
                error: KubeApiError | None = None
                try:
                    await self.api.delete_pod(self.namespace, name, uid=None, grace=grace)
                except KubeApiError as failure:
                    if failure.status == 404:
                        return
                    if not failure.passing and failure.status != 409:
                        raise self.failure("remove a pod", failure) from failure
                    error = failure
                if spent > REMOVE_SECONDS:
                    raise RuntimeFailure(
                        f"the cluster did not remove pod {name} within {REMOVE_SECONDS:.0f} s: {error}"
                    )
                await asyncio.sleep(PAUSES.wait(failures, None if error is None else error.retry_after))
                failures += 1
        finally:
            self._ours.discard(name)
            self._seen.pop(name, None)

    async def sweep(self) -> int:
        """Remove three kinds of pods: pods of ended nodes, pods of this node that no sandbox uses, and pods that ended
        long ago. Returns the number of removed pods. Raises RuntimeFailure if the server does not respond, or does not
        remove a pod."""
        left = await self._left()
        await remove_all(self.remove, left)
        return len(left)

    async def _left(self) -> list[str]:
        """Return the names of the pods that `sweep` removes."""
        try:
            found, _ = await self.api.list_pods(self.namespace, f"{APP_LABEL}={APP}")
        except KubeApiError as error:
            raise self.failure("list its pods", error) from error
        return [pod.metadata.name for pod in found if pod.metadata.name not in self._ours and self._is_left(pod)]

    def _is_left(self, pod: Pod) -> bool:
        label = (pod.metadata.labels or {}).get(NODE_LABEL, "")
        if label == self.node or is_orphan(label):
            return True
        ended = pod.ended_at
        return pod.over and ended is not None and time.time() - seconds_of(ended) > LEFT_SECONDS

    def _refusal(self, error: KubeApiError) -> RuntimeFailure:
        """Return the error for a request that the server has refused, and would refuse again."""
        text = f"the cluster at {self.server} refuses: {error}"
        match error.status:
            case 401:
                return RuntimeUnavailable(text, hint="the token or certificate is wrong or expired")
            case 403:
                found = (hint for words, hint in FORBIDDEN.items() if words in str(error))
                return RuntimeUnavailable(text, hint=next(found, RIGHTS))
            case 404:
                return RuntimeUnavailable(text, hint=f"create the namespace {self.namespace}")
            case _:
                return RuntimeUnavailable(text)

    def failure(self, what: str, error: KubeApiError) -> RuntimeFailure:
        if error.status in (401, 403):
            return self._refusal(error)
        return RuntimeFailure(f"the cluster at {self.server} does not {what}: {error}")


def seconds_of(time_text: str) -> float:
    """Return a time of the API, such as 2026-01-02T03:04:05Z, as seconds since the epoch. If the text is not a time,
    returns the current time."""
    try:
        return datetime.fromisoformat(time_text).timestamp()
    except ValueError:
        return time.time()
