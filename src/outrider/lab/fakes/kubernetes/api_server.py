"""A fake Kubernetes API server for tests. It has the part of the API that sandboxes use: pods, commands in pods,
watches, daemon sets, and the errors of a busy or strict cluster.

Pods run on a `FakeMachine`. Invariant: the official Python client can read every response.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from outrider.lab.fakes.kubernetes.machine import FakeImage, FakeMachine, now

NODE = "fake-node"
NAMESPACE = "rl"
"""The namespace that the kubeconfig selects."""
HISTORY = 1000
"""Number of past changes that the server keeps. A watch can start only from one of these changes."""
PODS = "/api/v1/namespaces/{namespace}/pods"
DAEMON_SETS = "/apis/apps/v1/namespaces/{namespace}/daemonsets"

Json = dict[str, Any]


class ApiFailure(Exception):
    """An error reply, whose body is a Kubernetes `Status`."""

    def __init__(self, status: int, reason: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason
        self.headers = {key.replace("_", "-"): value for key, value in headers.items()}

    def body(self) -> Json:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.status,
        }


Fault = Callable[[web.Request], Any]
"""A test's function that the server calls with each request. It can raise, wait, or return its own response. If it
returns None, the server handles the request."""


@dataclass
class ClusterRules:
    """Settings of the server, which a test may change at any time.

    - `token`: the only accepted token.
    - `role`: the rules of the account's Role in `NAMESPACE`, as in Kubernetes. None allows everything.
    - `denied`: further actions to forbid: a verb on pods, such as `create`, or a verb with a resource, such as
      `create pods/exec`.
    - `quota`: the maximum number of pods.
    - `room`: the maximum number of pods that are scheduled on the machine. Further pods stay pending.
    - `faults`: functions that are called in order for each request.
    """

    token: str | None = None
    role: Sequence[Mapping[str, Sequence[str]]] | None = None
    denied: frozenset[str] = frozenset()
    quota: int | None = None
    room: int | None = None
    faults: list[Fault] = field(default_factory=list)


class FakeApiServer:
    """The state and the routes of the fake API server. `fake_cluster` creates and serves it."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.rules = ClusterRules()
        self.pods: dict[tuple[str, str], Json] = {}
        self.daemon_sets: dict[tuple[str, str], Json] = {}
        self.created: list[str] = []
        """Names of all pods ever created, in order."""
        self.deletions: list[tuple[str, int | None]] = []
        """Names and grace periods in all requests that delete a pod."""
        self.changes: list[tuple[int, str, Json]] = []
        """The newest changes: (version, type, pod)."""
        self.watches: list[web.Request] = []
        """The open watches."""
        self.url = ""
        self._versions = itertools.count(1)
        self._version = 0
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._removals: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=4 << 20)
        app.router.add_get("/version", self._server_version)
        app.router.add_get(PODS, self._list)
        app.router.add_post(PODS, self._create)
        app.router.add_get(PODS + "/{name}", self._get)
        app.router.add_delete(PODS + "/{name}", self._delete)
        app.router.add_route("*", PODS + "/{name}/exec", self._exec)
        app.router.add_post(DAEMON_SETS, self._create_daemon_set)
        app.router.add_get(DAEMON_SETS + "/{name}", self._get_daemon_set)
        app.router.add_delete(DAEMON_SETS + "/{name}", self._delete_daemon_set)
        return app

    def forget_changes(self) -> None:
        """Drop all past changes, as a real server does after some minutes. A watch that starts from an older version
        then fails with status 410."""
        self.changes.clear()
        self._forgotten = self._version
        self._note()

    def kubeconfig(self) -> str:
        """Return a kubeconfig for this server. It is JSON, which is also valid YAML."""
        user = {} if self.rules.token is None else {"token": self.rules.token}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                "users": [{"name": "fake", "user": user}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
            }
        )

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self.rules.token is not None and request.headers.get("Authorization") != f"Bearer {self.rules.token}":
                raise ApiFailure(401, "Unauthorized", "Unauthorized")
            for fault in tuple(self.rules.faults):
                found = fault(request)
                if asyncio.iscoroutine(found):
                    found = await found
                if found is not None:
                    return found  # type: ignore[no-any-return]  # the response of a fault
            self._authorize(request)
            return await handler(request)  # type: ignore[no-any-return]  # a handler of this server
        except ApiFailure as failure:
            return web.json_response(failure.body(), status=failure.status, headers=failure.headers)

    def _authorize(self, request: web.Request) -> None:
        """Raise ApiFailure if the account may not make the request, as in a cluster with RBAC. Unknown paths are
        checked, too."""
        for action in actions_of(request):
            words = f"{action.verb} {action.resource}"
            if words in self.rules.denied or words.removesuffix(" pods") in self.rules.denied:
                allowed = False
            else:
                allowed = self.rules.role is None or any(action.allowed_by(rule) for rule in self.rules.role)
            if not allowed:
                raise ApiFailure(
                    403,
                    "Forbidden",
                    f'{action.resource} is forbidden: User "fake" cannot {action.verb} resource "{action.resource}" in '
                    f'API group "{action.group}" in the namespace "{action.namespace}"',
                )

    async def _server_version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "30", "gitVersion": "v1.30.0-outrider-fake"})

    def _find(self, request: web.Request) -> Json:
        key = (request.match_info["namespace"], request.match_info["name"])
        if key not in self.pods:
            raise ApiFailure(404, "NotFound", f'pods "{key[1]}" not found')
        return self.pods[key]

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._find(request))

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        namespace, name = request.match_info["namespace"], pod["metadata"]["name"]
        check_pod(pod)
        if (namespace, name) in self.pods:
            raise ApiFailure(409, "AlreadyExists", f'pods "{name}" already exists')
        if self.rules.quota is not None and len(self.pods) >= self.rules.quota:
            used = f"requested: pods=1, used: pods={len(self.pods)}, limited: pods={self.rules.quota}"
            raise ApiFailure(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: fake, {used}')
        pod |= {"kind": "Pod", "apiVersion": "v1", "status": {"phase": "Pending"}}
        pod["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        self.pods[namespace, name] = pod
        self.created.append(name)
        self._publish("ADDED", pod)
        self.schedule()
        return web.json_response(pod, status=201)

    def schedule(self) -> None:
        """Start pending pods on the machine while it has room."""
        for pod in list(self.pods.values()):
            if "nodeName" in pod["spec"]:
                continue
            placed = sum("nodeName" in one["spec"] for one in self.pods.values())
            if self.rules.room is not None and placed >= self.rules.room:
                text = "0/1 nodes are available: 1 Insufficient cpu."
                condition = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": text,
                }
                if pod["status"].get("conditions") != [condition]:
                    pod["status"] = {"phase": "Pending", "conditions": [condition]}
                    self._publish("MODIFIED", pod)
                continue
            pod["spec"]["nodeName"] = NODE
            self._publish("MODIFIED", pod)
            self.machine.start(pod, partial(self._report, pod))

    def _report(self, pod: Json, status: Json) -> None:
        pod["status"] = status
        if (pod["metadata"]["namespace"], pod["metadata"]["name"]) in self.pods:
            self._publish("MODIFIED", pod)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self._find(request)
        body = await request.json() if request.can_read_body else {}
        grace = body.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        grace = None if grace is None else int(grace)
        self.deletions.append((pod["metadata"]["name"], grace))
        wanted = (body.get("preconditions") or {}).get("uid")
        if wanted is not None and wanted != pod["metadata"]["uid"]:
            raise ApiFailure(409, "Conflict", "the UID in the precondition does not match the UID in record")
        if grace == 0:
            self._forget(pod)
            self._later(self._kill(pod))
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace or 30}
            self._publish("MODIFIED", pod)
            self._later(self._kill(pod))
        return web.json_response(pod)

    def _later(self, work: Any) -> None:
        task = self.machine.tasks.create_task(work, name="removal of a pod")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _kill(self, pod: Json) -> None:
        await self.machine.kill(pod["metadata"]["uid"])
        self._forget(pod)
        self.schedule()

    def _forget(self, pod: Json) -> None:
        if self.pods.pop((pod["metadata"]["namespace"], pod["metadata"]["name"]), None) is not None:
            self._publish("DELETED", pod)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info["namespace"]
        matches = selector_of(request.query.get("labelSelector", ""))

        def wanted(pod: Mapping[str, Any]) -> bool:
            return pod["metadata"]["namespace"] == namespace and matches(pod["metadata"].get("labels") or {})

        if request.query.get("watch") in ("1", "true", "True"):
            return await self._watch(request, wanted)
        found = [pod for pod in self.pods.values() if wanted(pod)]
        first = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or 0) or len(found) or 1
        meta: Json = {"resourceVersion": str(self._version)}
        if first + limit < len(found):
            meta["continue"] = str(first + limit)
        items = found[first : first + limit]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, wanted: Callable[[Json], bool]) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or self._version)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        seconds = float(request.query.get("timeoutSeconds") or 300)
        self.watches.append(request)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    changed = self._changed
                    if since < self._forgotten:
                        gone = ApiFailure(410, "Expired", f"too old resource version: {since} ({self._version})")
                        await answer.write(json.dumps({"type": "ERROR", "object": gone.body()}).encode() + b"\n")
                        return answer
                    for version, kind, pod in self.changes:
                        if version > since and wanted(pod):
                            await answer.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
                    since = self._version
                    await changed.wait()
        except (TimeoutError, ConnectionError):
            return answer
        finally:
            self.watches.remove(request)

    def _publish(self, kind: str, pod: Json) -> None:
        self._version = next(self._versions)
        pod["metadata"]["resourceVersion"] = str(self._version)
        self.changes.append((self._version, kind, json.loads(json.dumps(pod))))
        if len(self.changes) > HISTORY:
            self._forgotten = self.changes.pop(0)[0]
        self._note()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self._find(request)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise ApiFailure(400, "BadRequest", "Upgrade request required")
        return await self.machine.exec(pod["metadata"]["uid"], request)

    async def _create_daemon_set(self, request: web.Request) -> web.Response:
        body = await request.json()
        namespace, name = request.match_info["namespace"], body["metadata"]["name"]
        if (namespace, name) in self.daemon_sets:
            raise ApiFailure(409, "AlreadyExists", f'daemonsets.apps "{name}" already exists')
        images = [one["image"] for one in body["spec"]["template"]["spec"].get("initContainers", ())]
        pulled = int(all(image in self.machine.images for image in images))
        body["status"] = {"desiredNumberScheduled": 1, "numberReady": pulled, "numberUnavailable": 1 - pulled}
        self.daemon_sets[namespace, name] = body
        return web.json_response(body, status=201)

    def _daemon_set(self, request: web.Request) -> tuple[str, str]:
        key = (request.match_info["namespace"], request.match_info["name"])
        if key not in self.daemon_sets:
            raise ApiFailure(404, "NotFound", f'daemonsets.apps "{key[1]}" not found')
        return key

    async def _get_daemon_set(self, request: web.Request) -> web.Response:
        return web.json_response(self.daemon_sets[self._daemon_set(request)])

    async def _delete_daemon_set(self, request: web.Request) -> web.Response:
        del self.daemon_sets[self._daemon_set(request)]
        return web.json_response({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    async def close(self) -> None:
        await asyncio.gather(*self._removals)


@dataclass(frozen=True)
class ApiAction:
    """What a request does, in the terms of Kubernetes' access control (RBAC): API group, namespace, resource and
    verb."""

    group: str
    namespace: str
    resource: str
    verb: str

    def allowed_by(self, rule: Mapping[str, Sequence[str]]) -> bool:
        """Return True if the action is allowed by this rule of a Role in NAMESPACE."""
        named = self.group in rule["apiGroups"] and self.resource in rule["resources"] and self.verb in rule["verbs"]
        return named and self.namespace == NAMESPACE


VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def actions_of(request: web.Request) -> list[ApiAction]:
    """Return the actions that the account must be permitted for this request. `/version` needs none."""
    match request.path.strip("/").split("/"):
        case ["api", _, *rest]:
            group = ""
        case ["apis", group, _, *rest]:
            pass
        case _:
            return []
    if not rest:
        return []
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, name, *below = [*rest, ""] if len(rest) == 1 else rest
    if request.method == "DELETE":
        verb = "delete" if name else "deletecollection"
    elif request.method in ("GET", "HEAD"):
        verb = "get" if name else "watch" if "watch" in request.query else "list"
    else:
        verb = VERBS[request.method]
    resource = "/".join([resource, *below])
    verbs = ["get", "create"] if resource == "pods/exec" else [verb]  # newer servers require the right to both verbs
    return [ApiAction(group, namespace, resource, one) for one in verbs]


def check_pod(pod: Json) -> None:
    """Raise ApiFailure for a pod that a real server would reject as invalid."""
    names = [one["name"] for one in pod["spec"]["containers"]]
    wrong = next((key for key, value in (pod["metadata"].get("labels") or {}).items() if len(value) > 63), None)
    if wrong is not None or not names:
        raise ApiFailure(422, "Invalid", f'Pod "{pod["metadata"]["name"]}" is invalid: metadata.labels: {wrong}')


def selector_of(text: str) -> Callable[[Mapping[str, str]], bool]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    return lambda labels: all(labels.get(key) == value.lstrip("=") for key, _, value in pairs)


@asynccontextmanager
async def fake_cluster(images: Mapping[str, FakeImage]) -> AsyncIterator[FakeApiServer]:
    """Serve the API of a cluster with one machine on a port of 127.0.0.1. At the end of the block, all pods end."""
    async with FakeMachine(images) as machine:
        server = FakeApiServer(machine)
        runner = web.AppRunner(server.app(), shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port, *_ = runner.addresses[0]
            server.url = f"http://{host}:{port}"
            yield server
        finally:
            for pod in list(server.pods.values()):
                await machine.kill(pod["metadata"]["uid"])
            await server.close()
            await runner.cleanup()
