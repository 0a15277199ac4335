"""Joins machines of a Ray cluster to a service: all of them, or those with a given Ray resource. A Ray actor on each
machine runs the processes of `outrider nodes join`.

Invariants: each joined machine has one actor. An actor that fails is started again or replaced. All actors end with
this program.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.config import Config
from outrider.environment import install_command
from outrider.errors import ErrorRecord, InvalidField, OutriderError, ServiceError, error_from
from outrider.nodes.joining import JoiningMachine
from outrider.nodes.processes import with_processes
from outrider.sessions.resources import capacity_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger("outrider.node")

LOOK_SECONDS = 2.0
"""Seconds between two checks for new and lost machines of the cluster."""


class JoinTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The service to join. `config` is the settings of a joining machine as JSON. `file` is the path of the settings
    file, or ""."""

    url: str
    token: str | None
    ca: str | None
    config: bytes
    file: str = ""


class RayMachine:
    """A Ray actor that joins its machine to the service, under the name `name`. `place` is a JoinTarget, converted to
    plain Python values."""

    def __init__(self, place: dict[str, Any], name: str, level: int) -> None:
        logging.getLogger().setLevel(level)  # the node processes get this log level, too
        found = msgspec.convert(place, JoinTarget)
        settings = Config.model_validate_json(found.config).as_read_from(Path(found.file) if found.file else None)
        config = with_processes(settings)
        self._seconds = config.stop_seconds
        self._stop = asyncio.Event()
        self._machine = JoiningMachine(
            config,
            capacity_of(config.sandboxes),
            url=found.url,
            token=found.token,
            ca=found.ca,
            name=name,
            joined=lambda _: self._joined.set(),
        )
        self._joined = asyncio.Event()

    async def run(self) -> dict[str, Any] | None:
        """Run sessions until the machine has left the service. If the service refuses the machine, returns its error;
        otherwise None."""
        try:
            await self._machine.run(self._stop.wait, seconds=self._seconds)
        except OutriderError as error:
            return dict(msgspec.to_builtins(error.record()))
        return None

    async def joined(self) -> None:
        """Return when the first process of the machine has joined."""
        await self._joined.wait()

    async def leave(self) -> None:
        """Take no new sessions. `run` returns when the running sessions have ended, or after `stop_seconds`, whichever
        is first."""
        self._stop.set()


class RayFleet:
    """Joins the machines of a Ray cluster to a service: `await fleet.run(stop)`.

    `address`: the address of the cluster, "auto" for a cluster on this machine, or "local" for a new cluster.
    `resource`: if given, only machines with this Ray resource join.
    `note`: called with a line of text when a machine has arrived or left.
    """

    def __init__(
        self, place: JoinTarget, *, address: str, resource: str | None, stop_seconds: float, note: Callable[[str], None]
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise InvalidField(
                "a Ray cluster needs Ray", field="ray", hint=f"{install_command('ray')}, on all machines of the cluster"
            ) from error
        self._ray: Any = ray
        self._place: dict[str, Any] = msgspec.to_builtins(place, builtin_types=(bytes,))
        self._address = address
        self._resource = resource
        self._stop_seconds = stop_seconds
        self._note = note
        self._machines: dict[str, tuple[str, ActorHandle, asyncio.Future[Any]]] = {}
        """Name, actor, and result of the actor's `run`, by Ray's id of the machine."""

    async def run(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Keep the machines joined until `stop()` returns, and then make them leave. If the service refuses a machine,
        raises the service's error. Raises ServiceError if there is no cluster."""
        ray = self._ray
        try:
            await asyncio.to_thread(
                ray.init,
                address=None if self._address == "local" else self._address,
                namespace="outrider",
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            hint = "start one with `ray start --head`, or give its address: --ray HOST:6379; or --ray local"
            raise ServiceError(f"no Ray cluster at {self._address!r}: {error}", hint=hint) from error
        try:
            async with asyncio.TaskGroup() as tasks:
                stopping = tasks.create_task(stop())
                refusal: ErrorRecord | None = None
                while not stopping.done() and refusal is None:
                    try:
                        await self._look()
                    except Exception as error:  # Ray may be busy: try again
                        log.warning("the Ray cluster cannot be checked: %r", error)
                    runs = [run for _, _, run in self._machines.values()]
                    await asyncio.wait([stopping, *runs], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if any(run.done() for run in runs):
                        refusal = self._refusal()
                        # Pause, so that an actor that always fails at once is not replaced in a tight loop.
                        await asyncio.wait([stopping], timeout=LOOK_SECONDS)
                if refusal is None:
                    await self._leave()
                stopping.cancel()
        finally:
            await asyncio.to_thread(ray.shutdown)
        if refusal is not None:
            raise error_from(refusal)

    async def _look(self) -> None:
        """Start an actor on each new machine of the cluster, and kill the actor of each machine that is gone."""
        machines = await asyncio.to_thread(self._ray.nodes)
        alive = {
            machine["NodeID"]: machine
            for machine in machines
            if machine["Alive"] and (self._resource is None or machine["Resources"].get(self._resource))
        }
        for id in self._machines.keys() - alive.keys():
            name, actor, _ = self._machines.pop(id)
            self._ray.kill(actor)
            self._note(f"machine {name} has left the cluster")
        for id in alive.keys() - self._machines.keys():
            name = f"{alive[id]['NodeManagerHostname']}-{id[:8]}"
            here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(id, soft=False)
            actor = (
                self._ray.remote(RayMachine)
                .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
                .remote(self._place, name, log.getEffectiveLevel())
            )
            self._machines[id] = name, actor, asyncio.wrap_future(actor.run.remote().future())
            self._note(f"machine {name} is to join")

            def note(done: asyncio.Future[None], name: str = name) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._note(f"machine {name} has joined")

            asyncio.wrap_future(actor.joined.remote().future()).add_done_callback(note)

    def _refusal(self) -> ErrorRecord | None:
        """Return the error of a machine that the service has refused, or None. If an actor has failed for another
        reason, the next `_look` replaces it."""
        for id, (name, _, run) in list(self._machines.items()):
            if not run.done():
                continue
            del self._machines[id]
            if run.exception() is not None:
                log.warning("machine %s failed: %s", name, run.exception())
            elif (record := run.result()) is not None:
                return msgspec.convert(record, ErrorRecord)
        return None

    async def _leave(self) -> None:
        for _, actor, _ in self._machines.values():
            actor.leave.remote()
        if runs := [run for _, _, run in self._machines.values()]:
            await asyncio.wait(runs, timeout=self._stop_seconds + LOOK_SECONDS)
