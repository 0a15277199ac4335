"""The machine of a fake cluster. It runs containers as root, as processes in Linux namespaces.

An image is a folder. A container's only network is its own loopback device. Resources are not limited, and capabilities
are not dropped. Invariant: after the `async with` block of `FakeMachine`, its processes and its folder are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from aiohttp import WSMsgType, web

EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
PIECE = 1 << 15
CLOSE_CHANNEL = 255
"""Messages on this channel close other channels, in version 5 of the exec protocol."""
ENTER = """
set -e
ip link set lo up
mount -t tmpfs tmpfs {base}
mkdir {base}/upper {base}/work {base}/root
mount -t overlay overlay -o lowerdir={image},upperdir={base}/upper,workdir={base}/work {base}/root
mkdir -p {base}/root/proc {base}/root/dev {base}/root/tmp
chmod 1777 {base}/root/tmp
mount -t proc proc {base}/root/proc
mount --rbind /dev {base}/root/dev
mount -t tmpfs tmpfs {base}/root/dev/shm
{volumes}
cd {base}/root
exec chroot {as_user} {base}/root {command}
"""


@dataclass(frozen=True)
class FakeImage:
    """An image: its root folder, its environment variables, and host folders that are visible in it at the same
    paths."""

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()


@dataclass
class Container:
    """A running container. `pid` is the host's id of the container's first process."""

    process: asyncio.subprocess.Process
    pid: int
    env: dict[str, str]
    user: int
    group: int


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeMachine:
    """Runs the containers of pods. `images` maps names to images. Use it as `async with FakeMachine(images) as
    machine`."""

    def __init__(self, images: Mapping[str, FakeImage]) -> None:
        self.images = dict(images)
        self.execs = 0
        self.tasks = asyncio.TaskGroup()
        """Runs the pods, and other work of the cluster."""
        self.sockets: dict[web.WebSocketResponse, web.Request] = {}
        """The connections to running commands."""
        self._running: dict[str, Container] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self.tasks.__aenter__()
        self.folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="outrider-fake-machine-"))
        return self

    async def __aexit__(self, *error: object) -> None:
        for uid in list(self._tasks):
            await self.kill(uid)
        await self.tasks.__aexit__(None, None, None)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    def start(self, pod: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        """Run a pod in the background. `report` is called with each new status of the pod."""
        uid = pod["metadata"]["uid"]
        self._tasks[uid] = self.tasks.create_task(self._run(uid, pod, report), name=f"pod {uid}")

    async def kill(self, uid: str) -> None:
        """Kill all processes of a pod, and wait until they have ended. A second call does nothing."""
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await asyncio.to_thread(shutil.rmtree, self.folder / uid, True)

    async def _run(self, uid: str, pod: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        spec, begun = pod["spec"], now()

        def status(phase: str, inits: list[Any], own: list[Any], **more: str) -> None:
            ready = "True" if phase == "Running" else "False"
            conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
            report(
                {
                    "phase": phase,
                    "startTime": begun,
                    "conditions": conditions,
                    "initContainerStatuses": inits,
                    "containerStatuses": own,
                    **more,
                }
            )

        done: list[Any] = []
        for one in [*spec.get("initContainers", ()), *spec["containers"]]:
            if one["image"] not in self.images:
                for reason in ("ErrImagePull", "ImagePullBackOff"):
                    text = f'Back-off pulling image "{one["image"]}": not found'
                    waiting = [status_of(one, {"waiting": {"reason": reason, "message": text}})]
                    own = one in spec["containers"]
                    status("Pending", done if own else [*done, *waiting], waiting if own else [])
                    await asyncio.sleep(0.05)
                await asyncio.Event().wait()
        for one in spec.get("initContainers", ()):
            async with self._container(uid, pod, one) as container:
                code, log = await asyncio.gather(container.process.wait(), tail(container.process))
            ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "finishedAt": now()}
            done.append(status_of(one, {"terminated": {**ended, "message": log}}))
            if code != 0:
                status("Failed", done, [])
                return
        [main] = spec["containers"]
        try:
            async with self._container(uid, pod, main) as container:
                self._running[uid] = container
                status("Running", done, [status_of(main, {"running": {"startedAt": now()}})])
                code, log = await asyncio.gather(container.process.wait(), tail(container.process))
        finally:
            self._running.pop(uid, None)
        reason = {0: "Completed", 126: "StartError", 127: "StartError", 137: "Error"}.get(code, "Error")
        ended = {"exitCode": code, "reason": reason, "finishedAt": now(), "message": log}
        status("Failed" if code else "Succeeded", done, [status_of(main, {"terminated": ended})])

    @asynccontextmanager
    async def _container(self, uid: str, pod: Mapping[str, Any], one: Mapping[str, Any]) -> AsyncIterator[Container]:
        image, base = self.images[one["image"]], self.folder / uid / one["name"]
        base.mkdir(parents=True)
        volumes = [
            f"mkdir -p {base}/root{folder}; mount --rbind {folder} {base}/root{folder}" for folder in image.folders
        ]
        for mount in one.get("volumeMounts", ()):
            source = self.folder / uid / "volumes" / mount["name"] / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            source.chmod(0o777)
            target = f"{base}/root{mount['mountPath']}"
            volumes.append(f"mkdir -p {target}; mount --bind {source} {target}")
        security = {**pod["spec"].get("securityContext", {}), **one.get("securityContext", {})}
        user, group = security.get("runAsUser", 0), security.get("runAsGroup", 0)
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]),
            **image.env,
            **{each["name"]: each.get("value", "") for each in one.get("env", ())},
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        }
        own = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
        text = ENTER.format(
            base=base,
            image=image.root,
            volumes="\n".join(volumes),
            as_user=f"--userspec={user}:{group}",
            command=shlex.join([*one["command"], *one.get("args", ())]),
        ).replace("exec chroot", f"{own}exec /usr/sbin/chroot")
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "sh", "-c", text),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Container(process, await first_inside(process), env, user, group)
        finally:
            # The container's first process loses its parent-death signal if it switches to a user other than root. So
            # the container's first process is killed by its id.
            with contextlib.suppress(OSError, IndexError):
                os.kill(child_of(process.pid), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    async def exec(self, uid: str, request: web.Request) -> web.WebSocketResponse:
        """Run a command in a pod's container, as a real node does. A WebSocket carries its standard streams."""
        container = self._running.get(uid)
        if container is None:
            raise web.HTTPInternalServerError(text="container not found")
        self.execs += 1
        answer = web.WebSocketResponse(protocols=EXEC_PROTOCOLS)
        await answer.prepare(request)
        env = [f"{name}={value}" for name, value in container.env.items()]
        process = await asyncio.create_subprocess_exec(
            *(
                "nsenter",
                "--target",
                str(container.pid),
                "--mount",
                "--pid",
                "--uts",
                "--ipc",
                "--net",
                "--root",
                "--wd",
            ),
            *("--setuid", str(container.user), "--setgid", str(container.group)),
            *("/usr/bin/env", "-i", *env, *request.query.getall("command")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.sockets[answer] = request
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(feed(answer, process.stdin))
                outputs = [
                    group.create_task(forward(process.stdout, answer, 1)),
                    group.create_task(forward(process.stderr, answer, 2)),
                ]
                await asyncio.wait(outputs)
                code = await process.wait()
                with contextlib.suppress(ConnectionError):
                    await answer.send_bytes(b"\x03" + json.dumps(end_status(code)).encode())
                feeding.cancel()
        finally:
            self.sockets.pop(answer, None)
        await answer.close()
        return answer

    async def cut(self, status: Mapping[str, Any] | None = None) -> None:
        """Close the connections of all commands, as a dying server does. If `status` is given, first send it to each
        client as the end of the command."""
        for answer, request in list(self.sockets.items()):
            if status is not None:
                with contextlib.suppress(ConnectionError):
                    await answer.send_bytes(b"\x03" + json.dumps(status).encode())
            if request.transport is not None:
                request.transport.close() if status is not None else request.transport.abort()


async def forward(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await stream.read(PIECE):
            await socket.send_bytes(bytes([channel]) + data)


async def feed(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter) -> None:
    """Write the messages of channel 0 (standard input) to a command, until the connection or this channel is closed."""
    try:
        async for message in socket:
            # The official Python client sends strings as text messages, not as binary messages.
            content = message.data.encode() if message.type is WSMsgType.TEXT else message.data
            if not content:
                continue
            channel, data = content[0], content[1:]
            if channel == CLOSE_CHANNEL and data == b"\0":
                return
            if channel == 0:
                stdin.write(data)
                await stdin.drain()
    except ConnectionError:
        return
    finally:
        stdin.close()


def end_status(code: int) -> dict[str, Any]:
    """Return the `Status` that a real node sends when a command ends."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit code {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def status_of(container: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": f"fake://{container['image']}",
        "state": state,
        "lastState": {},
        "ready": "running" in state,
        "restartCount": 0,
    }


async def tail(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while data := await process.stdout.read(PIECE):
        kept = (kept + data)[-2048:]
    return kept.decode(errors="replace")


async def first_inside(process: asyncio.subprocess.Process) -> int:
    """Wait until the first process of the new pid namespace has the container's root folder. Returns this process's id
    on the host, or 0 if `process` ends first."""
    while process.returncode is None:
        with contextlib.suppress(OSError, IndexError):
            if (pid := child_with_own_root(process.pid)) is not None:
                return pid
        await asyncio.sleep(0.01)
    return 0


def child_with_own_root(pid: int) -> int | None:
    """Return the id of a process's first child, or None while the child has the host's root folder. Raises OSError or
    IndexError if there is no child."""
    child = child_of(pid)
    return child if os.readlink(f"/proc/{child}/root") != "/" else None


def child_of(pid: int) -> int:
    """Return the id of a process's first child. Raises OSError or IndexError if there is no child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
