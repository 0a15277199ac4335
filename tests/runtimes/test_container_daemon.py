"""A node's reactions to the replies of a container daemon. The daemon is a fake, so that no real one is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.base import Availability
from outrider.sandbox.runtimes.containers import daemon as containers
from outrider.sandbox.runtimes.containers import docker_api
from outrider.sandbox.runtimes.containers.create_request import ContainerRequest, HostMount
from outrider.sandbox.runtimes.containers.daemon import DOCKER_ENGINE, NODE_LABEL, PODMAN_ENGINE, ContainerDaemon
from outrider.sandbox.runtimes.containers.runtime import DOCKER, GVISOR
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import Resources

from .world import World

IMAGE = "sha256:feed"


class FakeDaemon:
    """A daemon with containers by name.

    `loses` names the calls whose replies are lost. If `refuses` is true, the daemon refuses containers with a limit on
    their disk. `slow` names the calls that wait for `go`, `starved` the containers whose memory has run out, and
    `stuck` the containers that it never removes.
    """

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.busy = 0
        self.stuck: set[str] = set()
        self.loses: set[str] = set()
        self.refuses = False
        self.slow: set[str] = set()
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.starved: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/_ping", self.ping),
                web.get("/v1.41/info", self.info),
                web.get("/info", self.info),
                web.get("/v1.41/images/{name:.+}/json", self.image),
                web.get("/v1.41/containers/json", self.listed),
                web.get("/v1.41/containers/{name}/json", self.inspect),
                web.post("/v1.41/containers/create", self.create),
                web.post("/v1.41/containers/{name}/start", self.start),
                web.delete("/v1.41/containers/{name}", self.remove),
            ]
        )
        return app

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response(text="OK", headers={"Server": "Fake/1.0 (linux)", "Api-Version": "1.41"})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"Runtimes": {"runc": {}}})

    async def image(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "good":
            return refusal(404, "no such image")
        return web.json_response({"Id": IMAGE, "Config": {"Env": ["A=b=c", "EMPTY="]}})

    async def listed(self, request: web.Request) -> web.Response:
        found = [
            {"Id": name, "Names": body.get("Names", [f"/{name}"]), "Labels": body["Labels"]}
            for name, body in self.containers.items()
        ]
        return web.json_response(found)

    async def inspect(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.containers:
            return refusal(404, "no such container")
        return web.json_response({"Id": name, "State": {"Running": False, "OOMKilled": name in self.starved}})

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses and "StorageOpt" in body["HostConfig"]:
            return refusal(500, "--storage-opt is supported only for overlay over xfs with 'pquota' mount option")
        await self._meet("create", request)
        self.containers[request.query["name"]] = body
        self._lose("create", request)
        return web.json_response({"Id": "1"}, status=201)

    async def start(self, request: web.Request) -> web.Response:
        await self._meet("start", request)
        self._lose("start", request)
        return web.Response(status=204)

    async def remove(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.busy or name in self.stuck:
            self.busy = max(0, self.busy - 1)
            return refusal(409, "removal is already in progress")
        if self.containers.pop(name, None) is None:
            return refusal(404, "no such container")
        return web.Response(status=204)

    async def _meet(self, what: str, request: web.Request) -> None:
        if what in self.slow:
            self.arrived.set()
            await self.go.wait()

    def _lose(self, what: str, request: web.Request) -> None:
        if what in self.loses:
            assert request.transport is not None
            request.transport.abort()


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


@pytest.fixture
async def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeDaemon]:
    made = FakeDaemon()
    runner = web.AppRunner(made.app())
    await runner.setup()
    await web.UnixSite(runner, str(folder / "daemon.sock")).start()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/daemon.sock")
    yield made
    await runner.cleanup()


def plan(daemon: ContainerDaemon, **fields: Any) -> ContainerRequest:
    return ContainerRequest(
        image=IMAGE,
        command=["/p", "-c", "x"],
        env={"A": "1"},
        labels={NODE_LABEL: daemon.node},
        shown=[HostMount(Path("/a:b"), "/c")],
        resources=Resources(memory_mb=64, cpus=0.5, pids=32, disk_mb=16),
        limits=True,
        **fields,
    )


async def test_what_a_container_is_asked_to_be(world: World, fake: FakeDaemon) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    await daemon.run("name", plan(daemon))
    (asked,) = fake.bodies
    host = asked["HostConfig"]
    assert (asked["Image"], asked["Entrypoint"], asked["Cmd"]) == (IMAGE, ["/p"], ["-c", "x"])
    assert (host["NetworkMode"], host["CapDrop"], host["AutoRemove"]) == ("none", ["ALL"], True)
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["Mounts"] == [{"Type": "bind", "Source": "/a:b", "Target": "/c", "ReadOnly": True}]
    assert host["Memory"] == host["MemorySwap"] == 64 << 20
    assert (host["NanoCpus"], host["PidsLimit"], host["StorageOpt"]) == (500_000_000, 32, {"size": "16m"})
    assert {limit["Name"] for limit in host["Ulimits"]} == {"nofile", "nproc"}


async def test_a_daemon_that_cannot_bound_disks_is_asked_once(world: World, fake: FakeDaemon) -> None:
    fake.refuses = True
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(daemon.run(f"n{number}", plan(daemon)))
    assert len(fake.containers) == 4
    tries = len(fake.bodies)
    await daemon.run("one more", plan(daemon))
    assert len(fake.bodies) == tries + 1
    assert "StorageOpt" not in fake.bodies[-1]["HostConfig"]


async def test_removal_by_somebody_else_is_waited_for(world: World, fake: FakeDaemon) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    await daemon.run("name", plan(daemon))
    fake.busy = 3
    await daemon.remove("name")
    assert fake.containers == {}
    await daemon.remove("name")


@pytest.mark.parametrize("lost", ["create", "start"])
async def test_a_lost_reply_leaves_no_container(world: World, fake: FakeDaemon, lost: str) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    fake.loses = {lost}
    with pytest.raises(RuntimeFailure):
        await daemon.run("name", plan(daemon))
    assert "name" in fake.containers
    await daemon.remove("name")
    assert fake.containers == {}


@pytest.mark.parametrize("slow", ["create", "start"])
async def test_a_cancellation_waits_for_what_was_asked(world: World, fake: FakeDaemon, slow: str) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    fake.slow = {slow}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(daemon.run("name", plan(daemon)))
        await fake.arrived.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        fake.go.set()
    assert task.cancelled()
    assert "name" in fake.containers  # the call has waited for the daemon


async def test_what_was_lost_sight_of_is_swept(fake: FakeDaemon, folder: Path) -> None:
    async with Host(folder) as host, Host(folder) as living:
        dead = living.name.split("-")
        dead[3] = "1"
        for node in ("-".join(dead), living.name, host.name, "not-a-node"):
            fake.containers[f"x-{node}"] = {"Labels": {NODE_LABEL: node}}
        daemon = await host.part(DOCKER_ENGINE.daemon)
        assert set(fake.containers) == {f"x-{living.name}", "x-not-a-node"}
        await daemon.run("ours", plan(daemon))
        fake.containers["lost"] = {"Labels": {NODE_LABEL: host.name}}
        assert await daemon.sweep() == 1
        assert "ours" in fake.containers
        fake.containers["late"] = {"Labels": {NODE_LABEL: host.name}}
        await daemon.remove("ours")
    assert set(fake.containers) == {f"x-{living.name}", "x-not-a-node"}


async def test_a_container_without_a_name_is_swept(fake: FakeDaemon, folder: Path) -> None:
    """Docker lists a container whose removal has failed halfway ("dead") without a name."""
    async with Host(folder) as host:
        dead = host.name.split("-")
        dead[3] = "1"
        fake.containers["1a2b"] = {"Labels": {NODE_LABEL: "-".join(dead)}, "Names": None}
        await host.part(DOCKER_ENGINE.daemon)
        assert fake.containers == {}


async def test_a_container_that_cannot_be_removed_keeps_no_other_from_starting(
    fake: FakeDaemon, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead node has left it, and the daemon says for ever that it removes it."""
    monkeypatch.setattr(containers, "REMOVE_SECONDS", 0.2)
    async with Host(folder) as host:
        dead = host.name.split("-")
        dead[3] = "1"
        for name in ("a", "b"):
            fake.containers[name] = {"Labels": {NODE_LABEL: "-".join(dead)}}
        fake.stuck = {"a"}
        daemon = await host.part(DOCKER_ENGINE.daemon)
        assert "did not remove a" in caplog.text
        assert set(fake.containers) == {"a"}
        await daemon.run("ours", plan(daemon))
        with pytest.raises(RuntimeFailure, match="did not remove a"):
            await daemon.sweep()
        fake.stuck = set()


async def test_what_became_of_a_container(world: World, fake: FakeDaemon) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    fake.starved.add("b")
    for name in ("a", "b"):
        await daemon.run(name, plan(daemon))
    assert [await daemon.out_of_memory(name) for name in ("a", "b", "c")] == [False, True, None]


async def test_a_daemon_that_goes_away(world: World, fake: FakeDaemon) -> None:
    sandbox = world.create_with(DOCKER, image="good")
    await world.host.part(DOCKER_ENGINE.daemon)
    (world.folder / "daemon.sock").unlink()
    with pytest.raises(RuntimeFailure, match="docker cannot"):
        await sandbox.start()
    await sandbox.stop()


@pytest.mark.parametrize("drips", [False, True])
async def test_a_daemon_that_never_answers_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    """A daemon that a signal has stopped, or that waits for a disk, accepts connections all the same."""
    monkeypatch.setattr(docker_api, "CALL_SECONDS", 0.3)

    async def never(request: web.Request) -> web.StreamResponse:
        if request.path == "/_ping":
            return web.Response(headers={"Api-Version": "1.41"})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        if drips:
            await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(0.05)
                if drips:
                    await answer.write(b" ")
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", never)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "silent.sock")).start()
    api = docker_api.DockerApi(folder / "silent.sock")
    calls = [api.image("i"), api.state("n"), api.labelled("x")]
    if not drips:  # the rest of these replies is not read
        calls += [api.create("n", {}), api.start("n"), api.remove("n")]
    for call in calls:
        async with asyncio.timeout(20):
            with pytest.raises(docker_api.DockerApiError, match="no answer within") as failed:
                await call
        assert failed.value.status == 0
    await api.close()
    await runner.cleanup()


@pytest.mark.parametrize("reply", ["<html>", "null", "[]", "{}", '{"State": null}', '[{"Id": "1", "Labels": {}}]'])
async def test_replies_of_something_else_are_failures_of_the_daemon(folder: Path, reply: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/_ping":
            return web.Response(headers={"Api-Version": "1.41"})
        return web.Response(text=reply, content_type="text/html" if reply == "<html>" else "application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "odd.sock")).start()
    api = docker_api.DockerApi(folder / "odd.sock")
    for call in (api.image("i"), api.create("n", {}), api.state("n")):
        with pytest.raises(docker_api.DockerApiError) as failed:
            await call
        assert failed.value.status == 0
    if reply not in ("[]", "{}"):
        with pytest.raises(docker_api.DockerApiError):
            await api.labelled("label")
    await api.close()
    await runner.cleanup()


async def test_a_daemon_that_is_not_there(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket was named, and went away after the task had been checked. This is a failure of the sandbox, and worth
    another attempt."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/gone.sock")
    sandbox = world.create_with(DOCKER, image="good")
    with pytest.raises(RuntimeFailure, match="no docker daemon at") as raised:
        await sandbox.start()
    assert (raised.value.retryable, raised.value.hint) == (True, DOCKER_ENGINE.hint)
    await sandbox.stop()


class Closed(PosixPath):
    """A path in a folder that this user may not search."""

    def is_socket(self) -> bool:
        raise PermissionError(13, "Permission denied", str(self))


def test_places_that_may_not_be_looked_into() -> None:
    closed = [Closed("/run/user/4242/docker.sock")]
    elsewhere = replace(DOCKER_ENGINE, variable="NO_SUCH_VARIABLE", socket_paths=lambda: closed)
    with pytest.raises(RuntimeUnavailable, match="/run/user/4242") as raised:
        elsewhere.find()
    assert elsewhere.available() == Availability(ok=False, detail=raised.value.message, hint=DOCKER_ENGINE.hint)
    assert elsewhere.oci_runtimes() == frozenset()


async def test_image_and_its_variables(world: World, fake: FakeDaemon) -> None:
    daemon = await world.host.part(DOCKER_ENGINE.daemon)
    image = await daemon.image("good")
    assert (image.id, image.env) == (IMAGE, {"A": "b=c", "EMPTY": ""})
    with pytest.raises(RuntimeUnavailable) as raised:
        await daemon.image("else:1")
    assert raised.value.hint == "docker pull else:1, on this machine"


async def test_available(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    can = await asyncio.to_thread(DOCKER.available)
    assert can.ok
    assert can.detail.startswith("Fake/1.0 at ")
    can = await asyncio.to_thread(GVISOR.available)
    assert "no runtime runsc" in can.detail
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/other.sock")
    assert not DOCKER.available().ok
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    assert "this machine" in DOCKER.available().detail
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert (folder / "podman/podman.sock") in PODMAN_ENGINE.socket_paths()
    assert os.getuid() or PODMAN_ENGINE.socket_paths()[0] == Path("/run/podman/podman.sock")
