"""The apptainer runtime: rootless containers of HPC machines, without a daemon, from a SIF file or a root folder.

A sandbox is one `apptainer exec` that is held open, with our tool server as its program. It does not know who uses it.
Invariant: the tool server is the first process of the container's pid namespace, so that its death is the death of all
inside; and what Apptainer runs outside for it is dead when `stop` returns.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outrider.errors import InvalidField, RequestError, RuntimeUnavailable
from outrider.pythons.portable import PORTABLE_AT, portable_command
from outrider.rootfs.store import ImageStore, known_image
from outrider.runtimes.apptainer import start as apptainer_start
from outrider.runtimes.apptainer.start import Bind
from outrider.runtimes.base import Availability
from outrider.runtimes.containers.server import interpreter
from outrider.runtimes.kernel import cgroups
from outrider.runtimes.kernel.cgroups import Cgroups
from outrider.runtimes.kernel.child import Child
from outrider.runtimes.kernel.descendants import Family
from outrider.runtimes.kernel.process_marks import kill_marked, mark_of
from outrider.runtimes.namespace import plan as plans
from outrider.runtimes.namespace.runtime import limits_by
from outrider.runtimes.namespace.submounts import inner_mounts
from outrider.runtimes.sandbox_life import RootedRuntime
from outrider.runtimes.tool_server.bundle import behind, delivery
from outrider.runtimes.tool_server.client import Part, ToolClient
from outrider.runtimes.tool_server.launch import BRIDGE_PORT, STOP_SECONDS, Setup, clean_environment, configure
from outrider.spec import Resources, RuntimeSpec

GATEWAY_AT = "/run/outrider-gateway.sock"
HOME = "/root"
OWN_PIDS = 48
OWN_MEMORY_MB = 64
PREFIXES = ("APPTAINER_", "SINGULARITY_", "LD_", "OUTRIDER_")
NAMES = frozenset(("HOME", "PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "_"))
"""What Apptainer sets by itself, whatever the image."""


class ApptainerRuntime(RootedRuntime):
    """Paths are the sandbox's own. What is written anywhere lives in memory and is gone with `stop`."""

    endpoint = f"http://127.0.0.1:{BRIDGE_PORT}"

    @classmethod
    def available(cls) -> Availability:
        try:
            found = apptainer_start.FINDER.find()
        except RuntimeUnavailable as error:
            return Availability(ok=False, detail=error.message, hint=error.hint)
        limits = limits_by(cgroups.find())
        return Availability(ok=True, detail=f"apptainer {found.version} at {found.path}; limits by {limits}")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        named = spec.image or spec.rootfs
        if named is None:
            raise InvalidField(
                "an apptainer sandbox needs an image",
                field="task.runtime.image",
                hint="the path of a SIF file or of a root folder, or a name from `outrider image list`",
            )
        if not named.startswith("/"):
            known_image(named)
        if spec.users > 1:
            raise InvalidField(
                "apptainer sandboxes have one user", field="task.runtime.users", hint="use runtime kind 'namespace'"
            )

    async def _start(self) -> ToolClient:
        image, env = self._image()
        found = await asyncio.to_thread(apptainer_start.FINDER.find)
        python, server = await asyncio.to_thread(interpreter)
        groups = await self._context.host.part(Cgroups)
        resources = with_apptainer(self._spec.resources)
        group = groups.make(self._context.directory.name, resources)
        self._held.push_async_callback(group.remove)
        self._group = group
        memory = plans.counted_memory(self._spec.resources, groups.hierarchies.folders)
        setup = msgspec.structs.replace(self._setup(env), memory=memory)
        command = [
            *apptainer_start.exec_command(found, image, self._binds(python), setup.marking()),
            *apptainer_start.server_command(
                *plans.room(self._spec.resources),
                setup.memory,
                plans.rlimits(resources, groups.hierarchies.folders, own_users=True),
            ),
        ]
        tools, family = self._spawn(apptainer_start.in_groups(group.entrances, command), setup)
        await tools.open()
        tools.send_raw(delivery(behind(apptainer_start.FENCE, server)))
        await configure(tools, setup)
        family.hold()
        inherited = of_image(await environment_of(tools))
        await configure(tools, msgspec.structs.replace(self._setup({**inherited, **env}), bridge_port=0))
        return tools

    async def _died_inside(self) -> bool:
        """Apptainer writes to the same log as the tool server: what is in that says nothing."""
        return self._group is not None and self._group.kills() > 0

    def _image(self) -> tuple[str, dict[str, str]]:
        """What Apptainer is to start, and the variables that our own store knows of it."""
        named = self._spec.image or self._spec.rootfs
        if named is None:
            raise RuntimeUnavailable(
                "the apptainer runtime needs an image",
                hint="give task.runtime.image: the path of a SIF file or of a root folder, or a name from "
                "`outrider image list`",
            )
        if named.startswith("/"):
            if not Path(named).exists():
                raise RuntimeUnavailable(f"there is no SIF file or root folder {named} on this node")
            return named, {}
        store = ImageStore()
        try:
            image = store.image(named)
        except RequestError as error:
            raise RuntimeUnavailable(error.message, hint=error.hint) from error
        return str(store.root(image)), image.env

    def _binds(self, python: Path) -> list[Bind]:
        context = self._context
        hosts = context.directory / "hosts"
        hosts.write_bytes(plans.ETC_MADE["hosts"])
        shown = [
            (python, PORTABLE_AT),
            (context.gateway_socket, GATEWAY_AT),
            (hosts, "/etc/hosts"),
            *((path, str(path)) for path in context.mounts),
            *((Path(mount.source), mount.target or mount.source) for mount in self._spec.mounts),
        ]
        # Each with what is mounted in it, before the next is shown, perhaps in the same place.
        return [Bind(str(path), target) for one in shown for path, target in (one, *inner_mounts([one]))]

    def _setup(self, env: Mapping[str, str]) -> Setup:
        return Setup(
            env=clean_environment({**env, **self._spec.env}, HOME),
            workdir=self._spec.workdir,
            folders=[HOME, "/tmp", "/var/tmp", self._spec.workdir],
            bridge_port=BRIDGE_PORT,
            bridge_socket=GATEWAY_AT,
            python=portable_command(),
            lifetime=self._spec.lifetime_seconds,
            mark=mark_of(self._context.directory),
        )

    def _spawn(self, command: list[str], setup: Setup) -> tuple[ToolClient, Family]:
        environment = {**apptainer_start.program_environment(self._context.directory), **setup.marking()}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = Child.spawn(command, environment, theirs)
            except BaseException:  # also a cancel: what was begun is undone
                ours.close()
                raise
        family = Family(child)
        self._held.push_async_callback(end, child, family, setup.mark)
        tools = ToolClient(ours, child.log_tail)
        self._held.push_async_callback(tools.close)
        return tools, family


def with_apptainer(resources: Resources) -> Resources:
    """The limits, and on top of them what Apptainer's own processes take, which share the sandbox's control group and
    its user."""
    memory = resources.most_memory_mb + OWN_MEMORY_MB
    return resources.model_copy(update={"pids": resources.pids + OWN_PIDS, "memory_mb": memory})


async def end(child: Child, family: Family, mark: str) -> None:
    """Kill what is inside and wait for the end of all that was started for it. The connection is closed already: a
    server that is not held yet, because it is just being started, ends by that."""
    family.hold()
    family.kill_first_inside()
    if not await child.end(STOP_SECONDS):
        await asyncio.to_thread(kill_marked, f"{mark}:")
    await family.end()


async def environment_of(tools: ToolClient) -> dict[str, str]:
    """What the tool server was started with."""
    told = await tools.call("environ", {}, Part)
    entries = told.data.decode("utf-8", "surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def of_image(env: Mapping[str, str]) -> dict[str, str]:
    """Of a container's environment that which its image has set. Apptainer's own LANG is C."""
    own = {name: value for name, value in env.items() if name not in NAMES and not name.startswith(PREFIXES)}
    return {name: value for name, value in own.items() if (name, value) != ("LANG", "C")}
