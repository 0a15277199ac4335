"""Creates, prepares and stops the sandboxes of a node. Each sandbox has a private folder.

Invariant: every started sandbox is stopped exactly once, and its folder is removed, even after an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Chores
from outrider.concurrency.retries import RetryPolicy
from outrider.counts import SandboxStarts
from outrider.destinations import Phase
from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable, renamed_field
from outrider.plugins import BUILTINS, resolve
from outrider.sandbox.gpu_locks import lock_gpus
from outrider.sandbox.host_paths import HostPaths, names_paths
from outrider.sandbox.network.dialer import Dialer
from outrider.sandbox.network.door import Door, limits_of
from outrider.sandbox.network.proxy import ConnectionPool
from outrider.sandbox.network.record import NetworkRecord
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.network.shared import SharedNetwork
from outrider.sandbox.network.variables import APT_CONFIG, APT_SETTINGS, proxy_variables
from outrider.sandbox.node_folder import remove_tree
from outrider.sandbox.rootfs.wanted import ImagePulls
from outrider.sandbox.runtimes.base import Runtime, RuntimeKind, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.tool_server.launch import BRIDGE_URL
from outrider.spec import RUNTIME, Collect, PrepareCommand, PrepareStep, RuntimeSpec, TaskSpec, Upload, Write

PREPARE_PAUSES = RetryPolicy(first=1.0, longest=30.0)
"""Seconds that a prepare step waits between two attempts if it sets no pause itself."""


class CommandFailed(RuntimeFailure):
    """The command of a prepare step has failed with an exit status other than 0."""


class Sandbox:
    """One sandbox, with its folder and the locks of its GPUs. The owner must call `stop`, unless `ready` has raised an
    exception."""

    def __init__(
        self,
        runtime: Runtime,
        spec: RuntimeSpec,
        context: SandboxContext,
        paths: HostPaths,
        *,
        field: str,
        starts: SandboxStarts,
        door: Door | None = None,
    ) -> None:
        """Create a sandbox that is not started. Starts are counted in `starts`.

        `field`: the task's field with this spec, for error messages.
        `door`: the proxy of the sandbox's network, which listens at the context's `gateway_socket`. None for a sandbox
            without a network.
        """
        self.runtime = runtime
        self.door = door
        self._door_at = context.gateway_socket
        self.directory = context.directory
        self.kind = spec.kind
        self.gpus = context.gpus
        """Names of the GPUs reserved for this sandbox."""
        self._spec = spec
        self._field = field
        self._starts = starts
        self._paths = paths
        self._from_layer = context.layer is not None
        """True if the sandbox starts from the layer of a prepared sandbox: its prepare steps are skipped."""
        self._ready = False
        self._stopped = False
        self._locks = ExitStack()

    @property
    def started(self) -> bool:
        """True once the sandbox has been started and prepared."""
        return self._ready

    @property
    def records(self) -> list[NetworkRecord]:
        """The network record of the sandbox. The list is empty unless the task asks for a record."""
        return [] if self.door is None or self.door.record is None else [self.door.record]

    async def ready(self) -> None:
        """Start and prepare the sandbox, unless this has been done. Raises RuntimeFailure. After an exception or a
        cancellation, the sandbox is stopped."""
        if self._ready:
            return
        began = time.monotonic()
        try:
            self._locks = await lock_gpus(self.gpus)
            if self.door is not None:
                await self.door.open(self._door_at)
            with renamed_field(RUNTIME, self._field):
                await self.runtime.start()
            if not self._from_layer:
                async with self.network(Phase.PREPARE):
                    await self._point_apt()
                    await prepare(self.runtime, self._spec.prepare, paths=self._paths, field=f"{self._field}.prepare")
        except BaseException as error:  # CancelledError is a BaseException
            if isinstance(error, Exception):
                self._starts.note(self._spec.sandbox_kind, None)
            try:
                await self.stop()
            finally:
                self._locks.close()  # `stop` may have run before the GPUs were locked
            raise
        self._starts.note(self._spec.sandbox_kind, time.monotonic() - began)
        self._ready = True

    async def _point_apt(self) -> None:
        """Write the settings of apt, if the sandbox has a network and its user may write the file."""
        if self.door is not None:
            with suppress(RuntimeFailure, OSError):
                await self.runtime.write(APT_CONFIG, APT_SETTINGS)

    @asynccontextmanager
    async def network(self, phase: Phase) -> AsyncIterator[None]:
        """Give the sandbox the network of a phase during the `with` block. Does nothing for a sandbox without a
        network."""
        if self.door is None:
            yield
            return
        await self.door.enter(phase)
        try:
            yield
        finally:
            await self.door.enter(None)

    async def stop(self) -> None:
        """Stop the sandbox and remove its folder, even if the caller is cancelled. May be called more than once."""
        if self._stopped:
            return
        self._stopped = True
        await shielded(self._stop)

    async def _stop(self) -> None:
        try:
            await self.runtime.stop()
        finally:
            try:
                if self.door is not None:
                    await self.door.close()
            finally:
                self._locks.close()
                await asyncio.to_thread(remove_tree, self.directory)


class Sandboxes:
    """Creates the sandboxes of a node. Sandboxes reach the model gateway at `gateway_socket` or at the URL of
    `gateway_at`.

    `paths`: the files of this machine that tasks may name.
    `background`: runs image pulls and the starts of sandboxes for grading, and records failures of the warm pool.
    `pull`: the prefixes of image references that may be pulled for a session.
    `network`: the operator's network rules. By default, no sandbox has a network.
    `connections`: a limit on the network connections of all sandboxes together. By default, each sandbox has its own
        limit.
    """

    def __init__(
        self,
        *,
        host: Host,
        background: Chores,
        paths: HostPaths,
        gateway_socket: Path,
        pull: Sequence[str] = (),
        network: NetworkRules | None = None,
        connections: ConnectionPool | None = None,
    ) -> None:
        self.host = host
        self.starts = SandboxStarts(BUILTINS["runtime"])
        self.pulls = ImagePulls(pull, background, host.folder)
        self.background = background
        self.paths = paths
        self.gateway_socket = gateway_socket
        self._network = network or NetworkRules()
        self._connections = connections
        self._gateway_url = ""

    @contextmanager
    def gateway_at(self, url: str) -> Iterator[None]:
        """Set the model gateway's URL, such as http://127.0.0.1:8700, for sandboxes created in the `with` block.
        Sandboxes that use the gateway's socket ignore the URL. The blocks may be nested."""
        before, self._gateway_url = self._gateway_url, url
        try:
            yield
        finally:
            self._gateway_url = before

    async def make(
        self,
        spec: RuntimeSpec,
        name: str,
        attempt: int,
        *,
        mounts: tuple[Path, ...] = (),
        layer: Path | None = None,
        gpus: tuple[str, ...] = (),
        field: str = RUNTIME,
        ahead: bool = False,
    ) -> Sandbox:
        """Create a sandbox without starting it. No other sandbox of this node may have the same `name` and `attempt`.
        `field` is the task's field with this spec, for error messages. `ahead` is True if no session waits for the
        sandbox.

        Raises InvalidField if the runtime is no longer installed or a path in the spec is not allowed. The path was
        allowed when the task was submitted, but links in the path may have changed since, or may differ on this
        machine. Raises RuntimeUnavailable if this kind of sandbox cannot fulfil the spec on this machine.
        """
        kind: RuntimeKind = resolve("runtime", spec.sandbox_kind)
        with renamed_field(RUNTIME, field), unavailable_here():
            await asyncio.to_thread(_check, spec, kind)
        if names_paths(spec):
            with renamed_field(RUNTIME, field):
                spec = await asyncio.to_thread(self.paths.resolved, spec)
        with renamed_field(RUNTIME, field):
            spec, door = await self._with_door(spec)
        directory = self.host.folder / f"{name}-{attempt}"
        directory.mkdir(mode=0o700)
        context = SandboxContext(
            session_id=name,
            attempt=attempt,
            directory=directory,
            host=self.host,
            gateway_url=self._gateway_url,
            gateway_socket=self.gateway_socket if door is None else directory.with_name(f"{directory.name}.door"),
            mounts=mounts,
            layer=layer,
            gpus=gpus,
            ahead=ahead,
        )
        try:
            with renamed_field(RUNTIME, field):
                runtime = kind.create(spec, context)
            return Sandbox(runtime, spec, context, self.paths, field=field, starts=self.starts, door=door)
        except BaseException:
            directory.rmdir()
            raise

    async def check(self, spec: RuntimeSpec, *, field: str, agent: RuntimeSpec) -> None:
        """Check whether this machine can make a grader's sandbox, as far as this can be checked without starting the
        sandbox. The check comes early: the sandbox is made only after the agent's run, and a failure at that time would
        lose the run. `field` is the task's field with this spec.

        In two cases, it is not checked whether this machine can run this kind of sandbox at all: if the sandboxes of
        the kind run elsewhere, and if the agent's sandbox is of the same kind (`agent` is the spec of the agent's
        sandbox). Such a kind may be unavailable only for a moment, and the start of the sandbox raises the right error.

        Raises RuntimeUnavailable. Raises RuntimeFailure if this machine cannot run the kind now, or if a file of a
        prepare step is missing. After RuntimeFailure, the session is tried again.
        """
        with renamed_field(RUNTIME, field), unavailable_here():
            kind: RuntimeKind = resolve("runtime", spec.sandbox_kind, field=f"{RUNTIME}.kind")
            await asyncio.to_thread(_check, spec, kind)
            await asyncio.to_thread(self.paths.check, spec)
            await self._with_door(spec)  # the door is not opened, so nothing must be closed
        runs_here = getattr(kind, "part", None) is None
        if runs_here and spec.sandbox_kind != agent.sandbox_kind:
            can = await asyncio.to_thread(kind.available)
            if not can.ok:
                raise RuntimeFailure(
                    f"this machine cannot run {spec.sandbox_kind!r} sandboxes: {can.detail}",
                    field=f"{field}.kind",
                    hint=can.hint,
                )
        await self.check_uploads(spec.prepare, field=f"{field}.prepare")

    async def check_uploads(self, steps: Sequence[PrepareStep], *, field: str) -> None:
        """Raise RuntimeFailure if a file of prepare steps is not on this machine. `field` is the task's field with the
        steps."""
        for number, step in enumerate(steps):
            if isinstance(step, Upload):
                await asyncio.to_thread(self.paths.upload_now, step.upload, field=f"{field}.{number}.upload")

    async def _with_door(self, spec: RuntimeSpec) -> tuple[RuntimeSpec, Door | None]:
        """Return the spec with the environment variables for its network, and the network's proxy. Raises InvalidField
        if the network is not allowed."""
        network = spec.network
        if network is None:
            return spec, None
        allowed = self._network.allowed(network)
        shared = await self.host.part(SharedNetwork.open)
        replay = None
        if network.replay is not None:
            find = partial(self.paths.upload_now, network.replay, field=f"{RUNTIME}.network.replay")
            replay = await asyncio.to_thread(find)
        make = partial(
            Door,
            allowed,
            Dialer(shared.lookups().resolve, own=self._network.own),
            gateway=self.gateway_socket,
            endpoint=BRIDGE_URL,
            limits=limits_of(self._network),
            pace=shared.pace,
            connections=self._connections,
            record=network.record,
            replay=replay,
        )
        door = await asyncio.to_thread(make) if replay else make()
        env = {**proxy_variables(BRIDGE_URL), **self._network.variables(network), **spec.env}
        return spec.model_copy(update={"env": env}), door


def check_kind(spec: RuntimeSpec, kind: RuntimeKind) -> None:
    """Raise InvalidField if the spec has a network or GPUs but this kind of sandbox cannot have them."""
    if spec.network is not None and not getattr(kind, "filters_network", False):
        raise InvalidField(
            f"{spec.sandbox_kind!r} sandboxes cannot have a network of their own",
            field=f"{RUNTIME}.network",
            hint="use runtime kind 'namespace', 'docker', 'podman', 'gvisor' or 'apptainer'",
        )
    if spec.resources.gpus and not getattr(kind, "gives_gpus", False):
        raise InvalidField(
            f"{spec.sandbox_kind!r} sandboxes cannot have GPUs of their own",
            field=f"{RUNTIME}.resources.gpus",
            hint="use runtime kind 'docker', 'podman', 'gvisor', 'apptainer' or 'namespace'",
        )


def check_carry(step: TaskSpec, kind: RuntimeKind) -> None:
    """Raise InvalidField if a step carries all written files to the grading, but this kind of sandbox cannot save
    them."""
    if step.evaluator.carry == "all" and not getattr(kind, "saves_layers", False):
        raise InvalidField(
            f"{step.runtime.kind!r} sandboxes cannot carry all that was written",
            field="task.evaluator.carry",
            hint="name the paths that are graded, or use runtime kind 'namespace'",
        )


def _check(spec: RuntimeSpec, kind: RuntimeKind) -> None:
    """Raise InvalidField if this kind of sandbox cannot fulfil the spec on this machine. Blocks briefly."""
    check_kind(spec, kind)
    kind.check_spec(spec)


@contextmanager
def unavailable_here() -> Iterator[None]:
    """Within the block, an InvalidField is raised as RuntimeUnavailable, because the task itself has already been
    accepted. The service may have checked the task on another machine, or with another default kind than this machine
    has."""
    try:
        yield
    except InvalidField as error:
        message = f"this machine cannot make the sandbox: {error.message}"
        raise RuntimeUnavailable(message, field=error.field, hint=error.hint) from error


async def prepare(
    runtime: Runtime,
    steps: Sequence[PrepareStep],
    *,
    paths: HostPaths,
    field: str = f"{RUNTIME}.prepare",
) -> None:
    """Run a task's prepare steps in order, in a started sandbox. `field` is the task's field with the steps, for error
    messages.

    Raises RuntimeFailure. If a command fails, the error names the step and contains the end of the output.
    """
    for number, step in enumerate(steps):
        match step:
            case PrepareCommand():
                await run_step(runtime, step, name=f"prepare step {number}", field=f"{field}.{number}")
            case Upload():
                source = partial(paths.upload_now, step.upload, field=f"{field}.{number}.upload")
                try:
                    await runtime.upload(await asyncio.to_thread(source), step.to)
                except RuntimeFailure as error:
                    raise error.replace(message=paths.as_named(error.message)) from error.__cause__
            case Write():
                await runtime.write(step.to, await asyncio.to_thread(step.data), executable=step.executable)


async def collect(runtime: Runtime, hooks: Sequence[Collect]) -> None:
    """Run a task's commands that collect the results of the agent's work. A failed command raises no error, because the
    grader notices a missing result."""
    for hook in hooks:
        with suppress(RuntimeFailure):
            await runtime.exec(hook.run, seconds=hook.seconds)


async def run_step(runtime: Runtime, step: PrepareCommand, *, name: str, field: str | None = None) -> None:
    """Run the command of a step until it succeeds or has failed `attempts` times. Runs that start within the first
    `grace_seconds` do not count as failed attempts.

    Raises CommandFailed if the last run fails, or RuntimeFailure if the last run exceeds its time limit. Both errors
    contain the end of the output. An error of the sandbox itself is raised at once.
    """
    clock = asyncio.get_running_loop().time
    began, failures = clock(), 0
    while True:
        counts = clock() - began >= step.grace_seconds
        result = await runtime.exec(step.run, env=step.env, seconds=step.seconds)
        if result.exit_code == 0:
            return
        failures += counts
        if failures >= step.attempts:
            break
        pause = step.pause_seconds
        if not counts and step.grace_pause_seconds is not None:
            pause = step.grace_pause_seconds
        await asyncio.sleep(PREPARE_PAUSES.wait(max(failures - 1, 0)) if pause is None else pause)
    ended = f"took longer than {step.seconds:g} s" if result.timed_out else f"exited with {result.exit_code}"
    tried = f", the last of {step.attempts} times" if step.attempts > 1 else ""
    kind = RuntimeFailure if result.timed_out else CommandFailed
    # The command is in the hint and not in the message: a command may contain secrets, and messages leave the service
    # in traces.
    hint = f"it ran: {step.run[:200]}"
    raise kind(f"{name} {ended}{tried}", field=field, hint=hint, log_tail=result.log_tail())
