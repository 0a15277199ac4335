"""A container daemon of this machine, docker's or podman's, as the sandboxes of one node share it.

It knows what a container is named and labelled, not what runs in it. Invariant: a container of this node is in
`_ours` from before the daemon is asked to make it until the daemon has said that there is none; every other one that
carries the label of this node, or of a dead one, is removed by the next `sweep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.config import environment
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.runtimes.base import Availability
from outrider.runtimes.node_host import Host, lives

if TYPE_CHECKING:
    from outrider.runtimes.containers.client import DaemonClient, LocalImage

NODE_LABEL = "outrider.node"
SESSION_LABEL = "outrider.session"
REMOVE_SECONDS = 60.0
PAUSE_SECONDS = 0.02
PROBE_SECONDS = 3.0

T = TypeVar("T")
log = logging.getLogger("outrider.runtime")


class ContainerDaemon(ABC):
    """Enter it before use: `await host.part(DockerDaemon)`. `limits` says whether the daemon can bound what a container
    uses, `sized` whether it can bound what one writes."""

    name: ClassVar[str]
    variable: ClassVar[str]
    hint: ClassVar[str]

    def __init__(self, host: Host) -> None:
        self.node = host.name
        self._ours: set[str] = set()

    @classmethod
    @abstractmethod
    def places(cls) -> Sequence[Path]:
        """Where its socket usually is, the likeliest first."""

    async def __aenter__(self) -> Self:
        from outrider.runtimes.containers.client import DaemonClient, DaemonError

        self._error = DaemonError
        self.socket = self.find()
        try:
            self.limits = limits_hold(self.socket)
            self.sized = not rootless(self.socket)  # until it says otherwise
        except OSError as error:
            raise RuntimeFailure(f"there is no {self.name} daemon at {self.socket}: {error}", hint=self.hint) from error
        self._client: DaemonClient = DaemonClient(self.socket)
        try:
            await self.sweep()
        except BaseException:  # also a cancel: what was begun is undone
            await shielded(self._client.close)
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.sweep()
        except RuntimeFailure as failure:
            log.warning("what sandboxes may have left is for the next node to remove: %s", failure)
        finally:
            await self._client.close()

    @classmethod
    def find(cls) -> Path:
        """The daemon's socket. Raises RuntimeUnavailable."""
        if find_spec("aiodocker") is None:
            raise RuntimeUnavailable("aiodocker is not installed", hint="pip install 'outrider[docker]'")
        if named := environment(cls.variable):
            scheme, _, place = named.rpartition("://")
            if scheme not in ("", "unix") or not place.startswith("/"):
                raise RuntimeUnavailable(
                    f"{cls.variable}={named} does not name a daemon of this machine",
                    hint="sandboxes share folders with the service: name a Unix socket, unix:///path",
                )
            return Path(place)
        for path in cls.places():
            with contextlib.suppress(OSError):  # the run folder of another user, whose environment we have
                if path.is_socket():
                    return path
        looked = ", ".join(map(str, cls.places()))
        raise RuntimeUnavailable(f"no {cls.name} daemon at {looked}", hint=cls.hint)

    @classmethod
    def available(cls) -> Availability:
        try:
            path = cls.find()
        except RuntimeUnavailable as error:
            return Availability(ok=False, detail=error.message, hint=error.hint)
        try:
            version = ask(path, "/_ping").version
            limits = "" if limits_hold(path) else ", no limits (rootless with cgroup version 1)"
        except PermissionError:
            return Availability(ok=False, detail=f"{path} may not be used by this user", hint=cls.hint)
        except (OSError, HTTPException) as error:
            return Availability(ok=False, detail=f"the {cls.name} daemon at {path}: {error}", hint=cls.hint)
        return Availability(ok=True, detail=f"{version} at {path}{limits}")

    @classmethod
    def oci_runtimes(cls) -> frozenset[str]:
        """The names of what it can start containers with; empty when it does not answer. Blocks."""
        try:
            return frozenset(msgspec.json.decode(ask(cls.find(), "/info").body, type=Info).runtimes)
        except (RuntimeUnavailable, OSError, HTTPException, msgspec.MsgspecError):
            return frozenset()

    async def image(self, name: str) -> LocalImage:
        """Raises RuntimeUnavailable when the daemon does not have it: nothing is fetched for a task."""
        try:
            return await self._client.image(name)
        except self._error as error:
            if error.status == 404:
                raise RuntimeUnavailable(
                    f"{self.name} has no image {name!r}", hint=f"{self.name} pull {name}, on this machine"
                ) from error
            raise self._failure("look for the image", error) from error

    async def run(self, name: str, body: Callable[[bool], Mapping[str, Any]]) -> None:
        """Create and start a container; `body` is given `sized`. When this raises, or is cancelled, `remove` must
        follow. A call once sent is waited for: only so is it known what there is to remove."""
        self._ours.add(name)
        try:
            await self._create(name, body)
            await shielded(lambda: self._client.start(name))
        except self._error as error:
            raise self._failure("start a container", error) from error

    async def _create(self, name: str, body: Callable[[bool], Mapping[str, Any]]) -> None:
        sized = self.sized
        try:
            await shielded(lambda: self._client.create(name, body(sized)))
        except self._error as error:
            if not (sized and refuses_size(str(error))):
                raise
            self.sized = False
            await shielded(lambda: self._client.create(name, body(False)))

    async def runs(self, name: str) -> bool:
        try:
            return await self._client.runs(name)
        except self._error as error:
            if error.status == 404:
                return False
            raise self._failure("look at a container", error) from error

    async def out_of_memory(self, name: str) -> bool | None:
        """Whether something in the container was killed because it had used the memory that it may. None when the
        daemon does not answer, or does not know the container, which somebody has removed."""
        try:
            return await self._client.out_of_memory(name)
        except self._error:
            return None

    async def remove(self, name: str) -> None:
        """Kill the container and wait until the daemon has none of this name. Raises RuntimeFailure when it does not
        come to that; the next sweep tries again."""
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                while await self._is_there(name):  # noqa: ASYNC110  # nothing tells when another remover is done
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError as error:
            raise RuntimeFailure(f"{self.name} did not remove {name} within {REMOVE_SECONDS:.0f} s") from error
        finally:
            self._ours.discard(name)

    async def _is_there(self, name: str) -> bool:
        """Ask twice for its removal: the second answer says that it is done. False when there is no such container."""
        for _ in range(2):
            try:
                await self._client.remove(name)
            except self._error as error:
                if error.status == 404:
                    return False
                if error.status == 0:
                    raise self._failure("remove a container", error) from error
                log.debug("%s does not yet remove %s: %s", self.name, name, error)
        return True

    async def sweep(self) -> int:
        """Remove what dead nodes left, and what this one lost sight of; how many. To be called every minute or so.

        Raises RuntimeFailure when the daemon does not answer."""
        try:
            listed = await self._client.labelled(NODE_LABEL)
        except self._error as error:
            raise self._failure("list its containers", error) from error
        left = [one.name for one in listed if self._is_left(one.name, one.labels[NODE_LABEL])]
        for name in left:
            await self.remove(name)
        return len(left)

    def _is_left(self, name: str, node: str) -> bool:
        return name not in self._ours if node == self.node else not lives(node)

    def _failure(self, what: str, error: Exception) -> RuntimeFailure:
        return RuntimeFailure(f"{self.name} cannot {what}: {error}")


class DockerDaemon(ContainerDaemon):
    name = "docker"
    variable = "DOCKER_HOST"
    hint = "start dockerd and join the group docker, or set DOCKER_HOST=unix:///path/to/docker.sock"

    @classmethod
    def places(cls) -> Sequence[Path]:
        return (Path("/var/run/docker.sock"), run_folder() / "docker.sock")


class PodmanDaemon(ContainerDaemon):
    name = "podman"
    variable = "CONTAINER_HOST"
    hint = "systemctl --user start podman.socket (as root: without --user), or podman system service --time=0 &"

    @classmethod
    def places(cls) -> Sequence[Path]:
        places = (run_folder() / "podman/podman.sock", Path("/run/podman/podman.sock"))
        return places if os.getuid() else places[::-1]


class Pong(msgspec.Struct, frozen=True):
    version: str
    body: bytes


class Info(msgspec.Struct, frozen=True):
    runtimes: dict[str, msgspec.Raw] = msgspec.field(name="Runtimes", default_factory=dict)


def ask(path: Path, what: str) -> Pong:
    """One request to the daemon. Blocks; raises OSError, HTTPException."""
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


def run_folder() -> Path:
    return Path(environment("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")


def rootless(path: Path) -> bool:
    """The socket of an ordinary user's daemon is that user's."""
    return path.stat().st_uid != 0


def limits_hold(path: Path) -> bool:
    """An ordinary user's daemon may only make control groups of version 2."""
    return not rootless(path) or Path("/sys/fs/cgroup/cgroup.controllers").exists()


def refuses_size(message: str) -> bool:
    """Whether it was for the size of its file system that a container was not created."""
    return any(word in message.lower() for word in ("storage-opt", "storage opt", "overlay.size", "pquota", "quota"))
