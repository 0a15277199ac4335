"""The container engines docker and podman, and a client of their daemon. All sandboxes of a node share the client.

This module handles containers by name and label, and ignores the programs inside. Invariant: a container of this node
is added to `_ours` before its creation is requested, and stays there until `remove` has ended. `sweep` finds containers
by their label. It removes this node's containers that are not in `_ours`, and all containers of dead nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.environment import environment, install_command
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.base import Availability
from outrider.sandbox.runtimes.containers.create_request import ContainerRequest
from outrider.sandbox.runtimes.containers.libpod_request import libpod_body
from outrider.sandbox.runtimes.node_host import Host, lives, remove_all

if TYPE_CHECKING:  # imported only for types, because the module needs aiodocker, which is optional
    from outrider.sandbox.runtimes.containers.docker_api import LocalImage

NODE_LABEL = "outrider.node"
SESSION_LABEL = "outrider.session"
REMOVE_SECONDS = 60.0
PAUSE_SECONDS = 0.02
PROBE_SECONDS = 3.0
NO_GPU = ("device driver", "CDI device", "unknown device")
"""Texts in the error messages of a daemon that refuses to give a container a GPU."""
SIZE_REFUSED = ("storage-opt", "storage opt", "overlay.size", "pquota", "quota")
"""Texts in the error messages of a daemon that cannot limit the size of a container's file system."""

log = logging.getLogger("outrider.runtime")


@dataclass(frozen=True)
class ContainerEngine:
    """A container engine, such as docker.

    - `name` is the engine's name.
    - `variable` is the environment variable with the address of the daemon's socket.
    - `hint` is the error hint for a machine without a daemon, `gpu_hint` for a daemon that cannot give a GPU.
    - `socket_paths` returns the usual paths of the socket, most likely first.
    - `libpod` is true if the daemon has Podman's own API besides Docker's."""

    name: str
    variable: str
    hint: str
    gpu_hint: str
    socket_paths: Callable[[], Sequence[Path]]
    libpod: bool = False

    def daemon(self, host: Host) -> ContainerDaemon:
        """Make the object that runs this engine's containers for a node. `await host.part(engine.daemon)` calls this
        method and opens the object (see node_host.py)."""
        return ContainerDaemon(self, host)

    def find(self) -> Path:
        """Return the path of the daemon's socket. Raises RuntimeUnavailable."""
        if find_spec("aiodocker") is None:
            raise RuntimeUnavailable("aiodocker is not installed", hint=install_command("docker"))
        if named := environment(self.variable):
            scheme, _, place = named.rpartition("://")
            if scheme not in ("", "unix") or not place.startswith("/"):
                raise RuntimeUnavailable(
                    f"{self.variable}={named} does not name a daemon of this machine",
                    hint="sandboxes share folders with the service: name a Unix socket, unix:///path",
                )
            return Path(place)
        for path in self.socket_paths():
            with contextlib.suppress(OSError):  # after `su`, XDG_RUNTIME_DIR may be another user's
                if path.is_socket():
                    return path
        looked = ", ".join(map(str, self.socket_paths()))
        raise RuntimeUnavailable(f"no {self.name} daemon at {looked}", hint=self.hint)

    def available(self) -> Availability:
        try:
            path = self.find()
        except RuntimeUnavailable as error:
            return Availability(ok=False, detail=error.message, hint=error.hint)
        try:
            version = get(path, "/_ping").version
            limits = "" if limits_hold(path) else ", no limits (rootless with cgroup version 1)"
        except PermissionError:
            return Availability(ok=False, detail=f"{path} may not be used by this user", hint=self.hint)
        except (OSError, HTTPException) as error:
            return Availability(ok=False, detail=f"the {self.name} daemon at {path}: {error}", hint=self.hint)
        return Availability(ok=True, detail=f"{version} at {path}{limits}")

    def oci_runtimes(self) -> frozenset[str]:
        """Return the names of the OCI runtimes that the daemon can use. The set is empty if the daemon does not
        respond. The call blocks."""
        try:
            return frozenset(msgspec.json.decode(get(self.find(), "/info").body, type=Info).runtimes)
        except (RuntimeUnavailable, OSError, HTTPException, msgspec.MsgspecError):
            return frozenset()


def docker_sockets() -> Sequence[Path]:
    return (Path("/var/run/docker.sock"), _run_folder() / "docker.sock")


def podman_sockets() -> Sequence[Path]:
    places = (_run_folder() / "podman/podman.sock", Path("/run/podman/podman.sock"))
    return places if os.getuid() else places[::-1]


def _run_folder() -> Path:
    return Path(environment("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")


DOCKER_ENGINE = ContainerEngine(
    name="docker",
    variable="DOCKER_HOST",
    hint="start dockerd and join the group docker, or set DOCKER_HOST=unix:///path/to/docker.sock",
    gpu_hint="install the NVIDIA Container Toolkit and restart dockerd; for a GPU that is named vendor/class=device in "
    "sandboxes.gpus, Docker 25 or newer with the feature cdi, and a description of it in /etc/cdi",
    socket_paths=docker_sockets,
)
PODMAN_ENGINE = ContainerEngine(
    name="podman",
    variable="CONTAINER_HOST",
    hint="systemctl --user start podman.socket (as root: without --user), or podman system service --time=0 &",
    gpu_hint="this needs Podman 4.1 or newer and a description of the machine's GPUs: "
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    libpod=True,
    socket_paths=podman_sockets,
)


class ContainerDaemon:
    """Runs the containers of a node. All sandboxes of the node share this object (see node_host.py).

    `limits` is true if the daemon can limit a container's resources. `sized` is true if requests should limit the size
    of a container's file system. `sized` is false for a rootless daemon, and becomes false when the daemon refuses a
    request with this limit."""

    def __init__(self, engine: ContainerEngine, host: Host) -> None:
        self.engine = engine
        self.node = host.name
        self._ours: set[str] = set()

    async def __aenter__(self) -> Self:
        """Connect to the daemon, and remove containers that dead nodes left (see `sweep`). A container that cannot be
        removed is logged. Raises RuntimeUnavailable and RuntimeFailure."""
        from outrider.sandbox.runtimes.containers.docker_api import DockerApi, DockerApiError  # needs aiodocker

        self._error = DockerApiError
        self.socket = await asyncio.to_thread(self.engine.find)
        try:
            self.limits = await asyncio.to_thread(limits_hold, self.socket)
            self.sized = not await asyncio.to_thread(rootless, self.socket)
        except OSError as error:
            raise RuntimeFailure(
                f"there is no {self.engine.name} daemon at {self.socket}: {error}", hint=self.engine.hint
            ) from error
        self._api = DockerApi(self.socket)
        try:
            left = await self._left()
            try:
                await remove_all(self.remove, left)
            except RuntimeFailure as failure:  # a container that cannot be removed must not keep new ones from starting
                log.warning("a container of a dead node is left: %s", failure)
        except BaseException:  # BaseException includes CancelledError
            await shielded(self._api.close)
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.sweep()
        except RuntimeFailure as failure:
            log.warning("containers may be left for the next node to remove: %s", failure)
        finally:
            await self._api.close()

    async def image(self, name: str) -> LocalImage:
        """Return an image of the daemon. Raises RuntimeUnavailable if the daemon does not have the image, because
        images are never pulled into a container engine for a task."""
        try:
            return await self._api.image(name)
        except self._error as error:
            if error.status == 404:
                raise RuntimeUnavailable(
                    f"{self.engine.name} has no image {name!r}",
                    hint=f"{self.engine.name} pull {name}, on this machine",
                ) from error
            raise self._failure("find the image", error) from error

    async def run(self, name: str, plan: ContainerRequest) -> None:
        """Create and start a container. The caller must then call `remove`, even if this method raises an error or is
        cancelled.

        Even a cancelled call waits for the response to a request that was sent, because only the response shows whether
        there is a container to remove. Raises RuntimeFailure. Raises RuntimeUnavailable if the daemon cannot give the
        container its GPUs."""
        self._ours.add(name)
        sized = self.sized
        try:
            try:
                await shielded(lambda: self._create(name, plan, sized))
            except self._error as error:
                if not (sized and any(word in str(error).lower() for word in SIZE_REFUSED)):
                    raise
                self.sized = False
                await shielded(lambda: self._create(name, plan, False))
            await shielded(lambda: self._api.start(name))
        except self._error as error:
            if plan.gpus and any(word in str(error) for word in NO_GPU):
                message = f"{self.engine.name} cannot give a container GPU {', '.join(plan.gpus)}: {error}"
                raise RuntimeUnavailable(message, hint=self.engine.gpu_hint) from error
            raise self._failure("start a container", error) from error

    async def _create(self, name: str, plan: ContainerRequest, sized: bool) -> None:
        body = plan.body(sized)
        if plan.gpus and self.engine.libpod:
            await self._api.create_by_libpod(name, libpod_body(body, plan.gpus))
        else:
            await self._api.create(name, body)

    async def runs(self, name: str) -> bool:
        """Return whether the container runs. Raises RuntimeFailure when the daemon does not respond."""
        try:
            return (await self._api.state(name)).runs
        except self._error as error:
            if error.status == 404:
                return False
            raise self._failure("inspect a container", error) from error

    async def out_of_memory(self, name: str) -> bool | None:
        """Return whether a process in the container was killed at the container's memory limit. Returns None if the
        daemon does not respond, or if the container no longer exists."""
        try:
            return (await self._api.state(name)).out_of_memory
        except self._error:
            return None

    async def remove(self, name: str) -> None:
        """Kill the container, and wait until the daemon has no container of this name. Raises RuntimeFailure if this
        fails. The next sweep then tries again."""
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                while await self._is_there(name):  # noqa: ASYNC110  # no event reports a removal by another client
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError as error:
            message = f"{self.engine.name} did not remove {name} within {REMOVE_SECONDS:.0f} s"
            raise RuntimeFailure(message) from error
        finally:
            self._ours.discard(name)

    async def _is_there(self, name: str) -> bool:
        """Send two requests to remove the container, and return whether it still exists.

        The first request usually just starts the removal. The response to the second request then has the status 404,
        which means that the container is gone."""
        for _ in range(2):
            try:
                await self._api.remove(name)
            except self._error as error:
                if error.status == 404:
                    return False
                if error.status == 0:
                    raise self._failure("remove a container", error) from error
                log.debug("%s does not yet remove %s: %s", self.engine.name, name, error)
        return True

    async def sweep(self) -> int:
        """Remove the containers of dead nodes, and those of this node that no sandbox uses any more. Returns the number
        of removed containers. Raises RuntimeFailure if the daemon does not respond, or does not remove a container."""
        left = await self._left()
        await remove_all(self.remove, left)
        return len(left)

    async def _left(self) -> list[str]:
        """Return the names of the containers that `sweep` removes."""
        try:
            listed = await self._api.labelled(NODE_LABEL)
        except self._error as error:
            raise self._failure("list its containers", error) from error
        nodes = {one.name: one.labels[NODE_LABEL] for one in listed if one.name not in self._ours}
        return [name for name, node in nodes.items() if node == self.node or not lives(node)]

    def _failure(self, what: str, error: Exception) -> RuntimeFailure:
        return RuntimeFailure(f"{self.engine.name} cannot {what}: {error}")


class Pong(msgspec.Struct, frozen=True):
    """A response of the daemon: its body, and the daemon's name and version from the header `Server`."""

    version: str
    body: bytes


class Info(msgspec.Struct, frozen=True):
    """The response to `GET /info`, with only the fields that this module uses."""

    runtimes: dict[str, msgspec.Raw] = msgspec.field(name="Runtimes", default_factory=dict)


def get(path: Path, what: str) -> Pong:
    """Send one GET request to the daemon whose socket is at `path`. The call blocks. Raises OSError and
    HTTPException."""
    connection = HTTPConnection("localhost", timeout=PROBE_SECONDS)
    with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as end:
        end.settimeout(PROBE_SECONDS)
        end.connect(str(path))
        connection.sock = end
        connection.request("GET", what)
        answer = connection.getresponse()
        if answer.status != 200:
            raise HTTPException(f"{what} answers {answer.status}")
        return Pong(answer.getheader("Server", "an unnamed daemon").partition(" ")[0], answer.read())


def rootless(path: Path) -> bool:
    """Return whether the daemon runs as an ordinary user, who then owns the socket at `path`."""
    return path.stat().st_uid != 0


def limits_hold(path: Path) -> bool:
    """Return whether the daemon can limit containers. A rootless daemon needs version 2 of control groups for this."""
    return not rootless(path) or Path("/sys/fs/cgroup/cgroup.controllers").exists()
