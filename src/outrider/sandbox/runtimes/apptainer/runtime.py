"""The runtime `apptainer`: rootless containers for HPC machines. It needs no daemon. A container starts from a SIF file
or a root folder.

For each sandbox, one `apptainer exec` runs our tool server as long as the sandbox lives. Invariant: the tool server is
the first process of the container's pid namespace, so its exit kills all processes inside. When `stop` returns,
Apptainer's processes outside the container have also ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.pythons.portable import PORTABLE_AT, portable_command
from outrider.sandbox.rootfs.owners import ONE_OWNER
from outrider.sandbox.rootfs.store import ImageStore, RootImage, known_image
from outrider.sandbox.runtimes.apptainer.command_line import (
    APPTAINER,
    CONFINEMENT,
    Bind,
    exec_command,
    in_groups,
    program_environment,
    server_command,
)
from outrider.sandbox.runtimes.base import Availability, SandboxContext
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups
from outrider.sandbox.runtimes.kernel.child import Child, Descendants
from outrider.sandbox.runtimes.kernel.mounts import inner_mounts
from outrider.sandbox.runtimes.kernel.process_marks import kill_marked
from outrider.sandbox.runtimes.limits import counted_memory, limits_in_words, rlimits, writable_bounds
from outrider.sandbox.runtimes.namespace.plan import ETC_MADE
from outrider.sandbox.runtimes.nvidia import NVIDIA, GpuFiles, NvidiaDriver
from outrider.sandbox.runtimes.tool_server.bundle import confined, delivery, portable_server
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import (
    GATEWAY,
    STOP_SECONDS,
    RunningServer,
    configure,
    connection,
    environment_of,
    rooted_setup,
    share_gateway,
    undone,
)
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import Resources, RuntimeSpec

SHARED_AT = "/run/outrider-shared"
OWN_PROCESSES = 48
OWN_MEMORY_MB = 64
PREFIXES = ("APPTAINER_", "SINGULARITY_", "LD_", "OUTRIDER_")
NAMES = frozenset(("HOME", "PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "_"))
"""PREFIXES and NAMES describe the variables that Apptainer itself sets in every container."""


class ApptainerRuntime:
    """The kind `apptainer`. Paths passed to the methods of a sandbox are paths inside the sandbox. Written files are in
    memory, and `stop` discards them."""

    gives_gpus = True
    filters_network = True
    uses_image_store = True

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        return ToolServerSandbox(launch, spec, context)

    @classmethod
    def available(cls) -> Availability:
        return Availability.found(_found)

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        named = named_image(spec)
        if not named.startswith("/"):
            check_owners(spec, known_image(named))
        if spec.several_users:
            raise InvalidField(
                "apptainer sandboxes have one user", field="task.runtime.users", hint="use runtime kind 'namespace'"
            )


def _found() -> str:
    """Return a description of Apptainer, and of how this machine limits sandboxes. Raises RuntimeUnavailable."""
    found = APPTAINER.get()
    return f"apptainer {found.version} at {found.path}; limits by {limits_in_words(cgroups.find())}"


def named_image(spec: RuntimeSpec) -> str:
    """Return the image that the spec names. It is the path of a SIF file or a root folder, or a name in the image
    store. Raises InvalidField if the spec names no image."""
    if (named := spec.image or spec.rootfs) is None:
        raise InvalidField(
            "an apptainer sandbox needs an image",
            field="task.runtime.image",
            hint="the path of a SIF file or of a root folder, or a name from `outrider image list`",
        )
    return named


@asynccontextmanager
async def launch(
    spec: RuntimeSpec, context: SandboxContext, *, driver: NvidiaDriver = NVIDIA
) -> AsyncIterator[RunningServer]:
    """Run `apptainer exec`. See tool_server/launch.py.

    The option `--nv` is not used, because it would show the container all GPUs of the machine."""
    name = context.directory.name
    image, stored_env = await asyncio.to_thread(_image, spec)
    found = await asyncio.to_thread(APPTAINER.get)
    gpus = await asyncio.to_thread(driver.shown, context.gpus)
    python, server_code = await asyncio.to_thread(portable_server)
    groups = await context.host.part(Cgroups)
    controllers = groups.hierarchies.folders
    resources = with_apptainer(spec.resources)
    memory = counted_memory(spec.resources, controllers)
    setup = partial(
        rooted_setup,
        *(spec, context),
        memory=memory,
        python=portable_command(),
        bridge_socket=f"{SHARED_AT}/{GATEWAY}",
        libraries=gpus.libraries_at,
    )
    first = setup(stored_env)
    hosts = context.directory / "hosts"
    hosts.write_bytes(ETC_MADE["hosts"])
    share_gateway(context.gateway_socket, context.directory / "tools")
    binds = await asyncio.to_thread(_binds, spec, context, python, hosts, gpus)
    command = [
        *exec_command(found, image, binds, first.marking()),
        *server_command(*writable_bounds(spec.resources), memory, rlimits(resources, controllers, own_users=True)),
    ]
    async with AsyncExitStack() as undo:
        group = groups.make(name, resources)
        undo.push_async_callback(undone, name, group.remove)
        environment = {**program_environment(context.directory), **first.marking()}
        with connection() as (ours, theirs):
            child = Child.spawn(in_groups(group.entrances, command), environment, theirs)
        descendants = Descendants(child)
        undo.push_async_callback(undone, name, partial(_end, child, descendants, first.mark))
        tools = ToolClient(ours, child.log_tail)
        undo.push_async_callback(undone, name, tools.close)
        await tools.open()
        tools.send_raw(delivery(confined(CONFINEMENT, server_code)))
        # With a `memory` limit, `configure` starts a memory watch in the tool server. Only the second `configure` below
        # sets the limit, so that only one watch starts.
        await configure(tools, msgspec.structs.replace(first, memory=0))
        descendants.hold()
        # Only the running server can tell which variables the image sets.
        image_env = of_image(await environment_of(tools))
        await configure(tools, msgspec.structs.replace(setup({**image_env, **stored_env}), bridge_port=0))

        async def ended_inside() -> bool:
            """Return whether programs inside the sandbox ended the tool server. This is so if the sandbox's control
            group reached its memory limit. The server's log is no evidence, because Apptainer also writes to it."""
            return group.ran_out()

        yield RunningServer(tools=tools, group=group, ended_inside=ended_inside)


def check_owners(spec: RuntimeSpec, image: RootImage) -> None:
    """Raise InvalidField if the image's files belong to several users and the task does not set `users`."""
    if image.owners.foreign and spec.users is None:
        raise InvalidField(
            f"the image {spec.image!r} has {image.owners.foreign}, and apptainer sandboxes have one user",
            field="task.runtime.users",
            hint=f"use runtime kind 'namespace'; {ONE_OWNER}",
        )


def _image(spec: RuntimeSpec) -> tuple[str, dict[str, str]]:
    """Return the image's path and its environment variables. For an image in our store, the store lists the variables.
    For a path, no variables are returned. The call blocks. Raises InvalidField and RuntimeUnavailable."""
    named = named_image(spec)
    if not named.startswith("/"):
        image = known_image(named)
        check_owners(spec, image)
        return str(ImageStore().root(image)), image.env
    if not Path(named).exists():
        raise RuntimeUnavailable(f"there is no SIF file or root folder {named} on this node")
    return named, {}


def _binds(spec: RuntimeSpec, context: SandboxContext, python: Path, hosts: Path, gpus: GpuFiles) -> list[Bind]:
    """Return the files and folders to mount in the sandbox. The call blocks, because it reads this machine's list of
    mounts."""
    shown = [
        (python, PORTABLE_AT),
        (context.directory / "tools", SHARED_AT),
        (hosts, "/etc/hosts"),
        *((path, str(path)) for path in context.mounts),
        *((Path(mount.source), mount.target or mount.source) for mount in spec.mounts),
        *((Path(source), target) for source, target in gpus.libraries),
    ]
    # List the mounts inside a folder directly after the folder, so that a later folder with the same target covers the
    # earlier one together with its mounts.
    binds = [Bind(str(path), target) for one in shown for path, target in (one, *inner_mounts([one]))]
    return [*binds, *(Bind(source, target, device=True) for source, target in gpus.devices)]


def with_apptainer(resources: Resources) -> Resources:
    """Return the task's limits plus what Apptainer's own processes need. These processes share the sandbox's control
    group and user."""
    memory = resources.most_memory_mb + OWN_MEMORY_MB
    return resources.model_copy(update={"pids": resources.pids + OWN_PROCESSES, "memory_mb": memory})


async def _end(child: Child, descendants: Descendants, mark: str) -> None:
    """Kill the processes inside the sandbox, and wait until every process that was started for the sandbox has exited.
    `hold` may miss a tool server that is still starting. This server exits by itself, because its connection is already
    closed."""
    descendants.hold()
    descendants.kill_first_inside()
    if not await child.end(STOP_SECONDS):
        await asyncio.to_thread(kill_marked, f"{mark}:")
    await descendants.end()


def of_image(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the image has set. `env` is the environment of a container. LANG=C is left out, because
    Apptainer itself sets it."""
    own = {name: value for name, value in env.items() if name not in NAMES and not name.startswith(PREFIXES)}
    return {name: value for name, value in own.items() if (name, value) != ("LANG", "C")}
