"""Every machine of a Ray cluster joins a service: an actor on each has the processes that `outrider nodes join` has.

It knows nothing of what nodes do. Invariant: a machine of the cluster has one actor, which Ray starts again when it
dies; when this program ends, so do they.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.config import Config
from outrider.errors import ErrorRecord, InvalidField, OutriderError, ServiceError, error_from
from outrider.nodes.joining import JoiningMachine
from outrider.sessions.resources import capacity_of, with_processes

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger("outrider.node")

LOOK_SECONDS = 2.0
"""How often the cluster is looked at for machines that came or went."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The service that is joined, the JSON of the settings that a machine has for it, and their file, "" for none."""

    url: str
    token: str | None
    ca: str | None
    config: bytes
    file: str = ""


class RayMachine:
    """An actor: one machine, which joins under `name`."""

    def __init__(self, place: dict[str, Any], name: str, level: int) -> None:
        logging.getLogger().setLevel(level)  # which its processes are told
        found = msgspec.convert(place, Place)
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
        """Returns when the machine has left; the record of what the service refuses it for, if it does."""
        try:
            await self._machine.run(self._stop.wait, seconds=self._seconds)
        except OutriderError as error:
            return dict(msgspec.to_builtins(error.record()))
        return None

    async def joined(self) -> None:
        """Returns when the first of its processes has joined."""
        await self._joined.wait()

    async def leave(self) -> None:
        """Take no new sessions; `run` returns when the present ones have ended, or after a while."""
        self._stop.set()


class RayFleet:
    """`await fleet.run(stop)`. `address` is that of the cluster, "auto" one that runs on this machine, "local" one that
    is started for this. `resource` names what a machine must have. `note` is told of machines that come and go."""

    def __init__(
        self, place: Place, *, address: str, resource: str | None, stop_seconds: float, note: Callable[[str], None]
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise InvalidField(
                "a Ray cluster needs Ray", field="ray", hint="pip install 'outrider[ray]', on all machines of it"
            ) from error
        self._ray: Any = ray
        self._place: dict[str, Any] = msgspec.to_builtins(place, builtin_types=(bytes,))
        self._address = address
        self._resource = resource
        self._stop_seconds = stop_seconds
        self._note = note
        self._machines: dict[str, tuple[str, ActorHandle, asyncio.Future[Any]]] = {}
        """By Ray's id of the machine: its name, its actor, and how that ends."""

    async def run(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work until `stop()` returns: then the machines leave. Raises what the service refuses them for, and
        ServiceError without a cluster."""
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
                    except Exception as error:  # Ray may be busy with itself, and it is looked at again
                        log.warning("the Ray cluster cannot be looked at: %r", error)
                    runs = [run for _, _, run in self._machines.values()]
                    await asyncio.wait([stopping, *runs], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if any(run.done() for run in runs):
                        refusal = self._refusal()
                        await asyncio.wait([stopping], timeout=LOOK_SECONDS)  # it might fail again at once
                if refusal is None:
                    await self._leave()
                stopping.cancel()
        finally:
            await asyncio.to_thread(ray.shutdown)
        if refusal is not None:
            raise error_from(refusal)

    async def _look(self) -> None:
        """Have an actor on each machine of the cluster, and none elsewhere."""
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
        """What the service refuses a machine for. An actor that failed for another reason is made anew."""
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
