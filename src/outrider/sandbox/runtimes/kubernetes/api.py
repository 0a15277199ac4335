"""The calls of the Kubernetes API that sandboxes need. They are made with aiohttp.

This module repeats no call and undoes none. Invariant: every failure is a `KubeApiError` with the server's own text and
status. The status is 0 if it is unknown whether the server carried out the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from outrider.concurrency.retries import RetryPolicy
from outrider.sandbox.runtimes.kubernetes.credentials import ClusterAccess
from outrider.sandbox.runtimes.kubernetes.pod_state import Pod

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
WATCH_SECONDS = 300
"""The server ends a watch after this many seconds. Then a new watch begins."""
WATCH_SILENCE = 60.0
"""A watch is treated as lost if no event arrives for WATCH_SECONDS + WATCH_SILENCE seconds."""
PAGE = 500
"""Maximum number of objects in one page of a list."""
LINE_MAX = 4 << 20
"""Maximum bytes of one event of a watch. An API server stores no object larger than 1.5 MiB."""
BODY_MAX = 64 << 20
MESSAGE_MAX = 2000
EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")

T = TypeVar("T")


FULL_PAUSES = RetryPolicy(first=1.0, longest=15.0)
"""The pauses before a pod is requested again, while the namespace's quota is used up."""


class ClusterWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a node waits for a cluster, in seconds.

    - `call`: time limit of a call of the API, including its whole reply.
    - `open`: maximum time that the server may take to start a command in a pod.
    - `enter`: how long the command that starts the tool server is repeated if it fails. The cluster may report a pod as
        running before the pod's machine accepts commands.
    - `full`: see FULL_PAUSES.
    - `look`: if no event arrives for this time, the node requests the pod's state, because an event may have been lost.
    - `ping`: time between two pings on the connection to a command in a pod. Load balancers close connections that are
        silent for a minute.
    - `silence`: if neither output of a command nor the reply to a ping arrives for this time, the connection to the
      command is treated as broken. This limit is much longer than `ping`, because replies to pings are late while the
      command does not read its input.
    """

    call: float = 60.0
    open: float = 10.0
    enter: float = 30.0
    full: RetryPolicy = FULL_PAUSES
    look: float = 5.0
    ping: float = 20.0
    silence: float = 120.0


WAITS = ClusterWaits()


class KubeApiError(Exception):
    """A failed call.

    - `status` is the HTTP status, or 0 if there was no response.
    - `reason` is the server's code for the error, such as `AlreadyExists`.
    - `retry_after` is how many seconds the server asks clients to wait."""

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after

    @property
    def passing(self) -> bool:
        """True if the same call may succeed later. This is so if there was no response, or if the server is overloaded
        or has itself failed."""
        return self.status in (0, 408, 429) or self.status >= 500


class StatusReply(msgspec.Struct):
    """The `Status` object that reports a failed call or the end of a command in a pod."""

    status: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0


class ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    next: str = msgspec.field(name="continue", default="")


class PodList(msgspec.Struct):
    """One page of a list of pods."""

    metadata: ListMeta = msgspec.field(default_factory=ListMeta)
    items: list[Pod] = []


class WatchEvent(msgspec.Struct):
    """An event of a watch. If the type is ERROR, the object is a `StatusReply`."""

    type: str
    object: msgspec.Raw


class PodEvent(msgspec.Struct, frozen=True):
    kind: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    pod: Pod


class KubeApi:
    """A client of one API server. Close it after use. Calls may run concurrently, and a failed call raises
    KubeApiError."""

    def __init__(self, access: ClusterAccess, *, waits: ClusterWaits = WAITS) -> None:
        self._access = access
        self._waits = waits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=access.tls if access.tls is not None else True),
            timeout=aiohttp.ClientTimeout(total=waits.call, sock_connect=CONNECT_SECONDS),
            headers={"Accept": "application/json"},
            read_bufsize=LINE_MAX,
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self, method: str, path: str, reply: type[T], *, query: Mapping[str, str] = {}, body: Any = None
    ) -> T:
        """Send a request and return the decoded response."""
        async with (
            translated(),
            self._session.request(
                method,
                self._access.url + path,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers={**self._access.headers(), "Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer,
        ):
            data = await read_body(answer)
            if not 200 <= answer.status < 300:
                raise failure_of(answer, data)
            return msgspec.json.decode(data, type=reply)

    def pods_path(self, namespace: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")

    async def create_pod(self, namespace: str, body: Mapping[str, Any]) -> Pod:
        return await self.call("POST", self.pods_path(namespace), Pod, body=body)

    async def pod(self, namespace: str, name: str) -> Pod:
        return await self.call("GET", self.pods_path(namespace, name), Pod)

    async def delete_pod(self, namespace: str, name: str, *, uid: str | None, grace: int) -> None:
        """Request the removal of a pod. If `uid` is given, only a pod with this uid is removed. If `grace` is 0, the
        server deletes its record of the pod at once. Otherwise the pod's machine first ends the pod, within `grace`
        seconds."""
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self.call("DELETE", self.pods_path(namespace, name), msgspec.Raw, body=body)

    async def list_pods(self, namespace: str, selector: str) -> tuple[list[Pod], str]:
        """Return the pods with these labels, and the version of the list. A watch can start at this version."""
        found: list[Pod] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = await self.call("GET", self.pods_path(namespace), PodList, query=query)
            found += page.items
            if not page.metadata.next:
                return found, page.metadata.resource_version
            query["continue"] = page.metadata.next

    async def watch_pods(self, namespace: str, selector: str, version: str) -> AsyncIterator[PodEvent]:
        """Yield the changes of pods with these labels since `version`. Ends when the server ends the watch. Raises
        KubeApiError. The error's status is 410 if the server no longer has these changes."""
        query = {
            "labelSelector": selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=WATCH_SECONDS + WATCH_SILENCE
        )
        async with (
            translated(),
            self._session.get(
                self._access.url + self.pods_path(namespace),
                params=query,
                headers=self._access.headers(),
                timeout=timeout,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != 200:
                raise failure_of(answer, await read_body(answer))
            async for line in answer.content:
                if not line.strip():
                    continue
                event = msgspec.json.decode(line, type=WatchEvent)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=StatusReply)
                    raise KubeApiError(status.code or 500, status.message[:MESSAGE_MAX], reason=status.reason)
                if event.type in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
                    yield PodEvent(event.type, msgspec.json.decode(event.object, type=Pod))  # type: ignore[arg-type]  # checked in the line above

    async def exec(
        self, namespace: str, name: str, container: str, command: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """Run a command in a container. Returns a WebSocket for the command's input and outputs (see exec_stream.py).
        The caller must reply to the WebSocket's pings, and close the WebSocket."""
        query = [("command", word) for word in command]
        query += [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        async with translated(), asyncio.timeout(self._waits.open):
            return await self._session.ws_connect(
                self._access.url + self.pods_path(namespace, name) + "/exec",
                params=query,
                headers=self._access.headers(),
                protocols=EXEC_PROTOCOLS,
                autoping=False,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
            )


async def read_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of a response. Raises ValueError for more than BODY_MAX bytes."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > BODY_MAX:
            raise ValueError(f"a response of more than {BODY_MAX} bytes")
    return bytes(body)


def failure_of(answer: aiohttp.ClientResponse, body: bytes) -> KubeApiError:
    """Return the error for a failed response. `body` may be plain text instead of a `Status`, because proxies and
    overloaded servers send plain text."""
    try:
        status = msgspec.json.decode(body, type=StatusReply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = StatusReply(message=body.decode("utf-8", "replace").strip())
    asked = answer.headers.get("Retry-After", "")
    return KubeApiError(
        answer.status,
        (status.message or answer.reason or "")[:MESSAGE_MAX],
        reason=status.reason,
        retry_after=float(asked) if asked.isdecimal() else None,
    )


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    try:
        yield
    except aiohttp.WSServerHandshakeError as error:
        # The response's text is missing, because aiohttp does not read the body if the server refuses a WebSocket.
        raise KubeApiError(error.status, f"no command may be started: status {error.status}") from error
    except TimeoutError as error:
        raise KubeApiError(0, "no answer in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # msgspec.ValidationError is a subclass of ValueError
        raise KubeApiError(0, f"{type(error).__name__}: {error}"[:MESSAGE_MAX]) from error
