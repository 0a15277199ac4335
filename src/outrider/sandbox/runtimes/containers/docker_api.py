"""The calls of the Docker Engine API that sandboxes need. They go over the daemon's Unix socket, with aiodocker.

This module repeats no call and undoes none. Invariant: every failure is a `DockerApiError` with the daemon's own text
and status. The status is 0 if it is unknown whether the daemon carried out the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec

URL = "http://localhost"
CALL_SECONDS = 120.0
CONNECT_SECONDS = 5.0
LIBPOD = "v4.0.0"
"""The version of Podman's own API that we use. Newer versions of Podman still support it."""
ODD = (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""The errors of a broken connection, and of a reply that does not have the form of a daemon's."""
NO_CONNECTION = 900
"""The status that aiodocker gives to a call that did not reach the daemon."""


class DockerApiError(Exception):
    """A failed call. `status` is the daemon's HTTP status, or 0 if there was no response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LocalImage(msgspec.Struct, frozen=True):
    """An image of the daemon. `id` identifies its content. `env` has its environment variables."""

    id: str
    env: dict[str, str]


class ListedContainer(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]


class ContainerState(msgspec.Struct, frozen=True):
    runs: bool
    out_of_memory: bool


class DockerApi:
    """A client of one daemon. Close it after use. Calls may run concurrently, and a failed call raises
    DockerApiError."""

    def __init__(self, socket: Path) -> None:
        # Each call gets its own connection. A reused connection could fail, because the daemon may just be closing it.
        self._connector = aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=self._connector, timeout=timeout)
        self._docker: aiodocker.Docker | None = None

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()
        await self._session.close()

    async def _api(self) -> aiodocker.Docker:
        """Return aiodocker's client for the newest API version that the daemon supports. A ping returns this version at
        once, while aiodocker's own request for it takes half a second with podman."""
        if self._docker is None:
            async with self._session.get(f"{URL}/_ping") as answer:
                version = f"v{answer.headers['Api-Version']}"
            self._docker = aiodocker.Docker(
                url=URL, connector=self._connector, session=self._session, api_version=version
            )
        return self._docker

    async def image(self, name: str) -> LocalImage:
        async with translated():
            found = await (await self._api()).images.inspect(name)
            entries = (found.get("Config") or {}).get("Env") or []
            pairs = (entry.partition("=") for entry in entries)
            return LocalImage(found["Id"], {name: value for name, _, value in pairs})

    async def create(self, name: str, body: Mapping[str, Any]) -> None:
        async with translated():
            await (await self._api()).containers.create(dict(body), name=name)

    async def create_by_libpod(self, name: str, body: Mapping[str, Any]) -> None:
        """Create a container through Podman's own API."""
        async with (
            translated(),
            self._session.post(f"{URL}/{LIBPOD}/libpod/containers/create", json={**body, "name": name}) as answer,
        ):
            if answer.status != 201:
                reply = await answer.json(content_type=None)
                raise DockerApiError(answer.status, str(reply.get("message", reply)))

    async def start(self, name: str) -> None:
        async with translated():
            await (await self._api()).containers.container(name).start()

    async def state(self, name: str) -> ContainerState:
        async with translated():
            found = (await (await self._api()).containers.get(name))["State"]
            return ContainerState(bool(found["Running"]), bool(found.get("OOMKilled")))

    async def remove(self, name: str) -> None:
        """Kill and remove a container. Raises DockerApiError with status 404 if there is no such container, and with
        status 409 while another client removes it."""
        async with translated():
            await (await self._api()).containers.container(name).delete(force=True, v=True)

    async def labelled(self, label: str) -> list[ListedContainer]:
        """Return all containers with the label, running or not. If a container has no name, because its removal has
        failed halfway, its id takes the place of the name. The other calls accept the id, too."""
        filters = msgspec.json.encode({"label": [label]}).decode()
        async with translated():
            found = await (await self._api()).containers.list(all=True, filters=filters)
            return [ListedContainer((one["Names"] or [one.id])[0].lstrip("/"), one["Labels"]) for one in found]


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Limit the time of a call, and raise each of its failures as a DockerApiError."""
    try:
        # aiodocker ignores the time limit of its session.
        async with asyncio.timeout(CALL_SECONDS):
            yield
    except aiodocker.DockerError as error:
        status = 0 if error.status == NO_CONNECTION else error.status
        raise DockerApiError(status, str(error.message).strip()) from error
    except TimeoutError as error:
        raise DockerApiError(0, f"no answer within {CALL_SECONDS:.0f} s") from error
    except ODD as error:
        raise DockerApiError(0, f"{type(error).__name__}: {error}") from error
