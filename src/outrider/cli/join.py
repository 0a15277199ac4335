"""`outrider nodes join`: runs sessions of a service on this machine, until a signal ends the command."""

from __future__ import annotations

import asyncio
import platform
from logging import DEBUG, INFO
from typing import Annotated
from urllib.parse import urlsplit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.event_loop import run_service
from outrider.cli.long_running import StopSignals, start_log
from outrider.cli.options import Ca, Token, command
from outrider.cli.setting_options import MachineConfig, Verbose
from outrider.cli.terminal import Terminal
from outrider.config import OWN
from outrider.environment import DEFAULT_URL, environment
from outrider.errors import InvalidField

RAY = "Ray"


@command
def join(
    terminal: Terminal,
    settings: MachineConfig,
    url: Annotated[
        str | None, CliArgument(metavar="URL", help="The service's address.", show_default="$OUTRIDER_URL")
    ] = None,
    name: Annotated[
        str | None,
        CliOption(metavar="NAME", help="What the service calls this machine.", show_default="its host name"),
    ] = None,
    token: Token = None,
    ca: Ca = None,
    ray: Annotated[
        str | None,
        CliOption(
            metavar="ADDRESS",
            help="Join with all machines of this Ray cluster: HOST:6379, or auto for the one here.",
            panel=RAY,
        ),
    ] = None,
    ray_resource: Annotated[
        str | None,
        CliOption(metavar="NAME", help="Only machines with this custom resource of Ray's.", panel=RAY),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run a service's sessions on this machine, until Ctrl-C or SIGTERM.

    The service provides the settings of models, tokenizers and engines. This
    machine provides the settings of lanes, sandboxes and folders. The token must
    have the role `node`:

        outrider token create --role node --name nodes

    After a signal, the machine gets no new sessions. Its running sessions have
    --stop-seconds to end. Sessions that have not ended by then start again on
    another machine.

    Examples:

        outrider nodes join https://rollouts.example:8700 --ca authority.pem

        OUTRIDER_TOKEN=... outrider nodes join http://10.0.0.7:8700 --processes 8 --run-lane 512

        outrider nodes join http://10.0.0.7:8700 --ray auto --ray-resource rollouts
    """
    address = url or environment("OUTRIDER_URL")
    if address is None:
        raise InvalidField(
            "no service to join", field="url", hint=f"give its address: outrider nodes join {DEFAULT_URL}"
        )
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidField(f"{address!r} is no address of a service", field="url", hint=f"such as {DEFAULT_URL}")
    # Imported here, because `nodes.messages` slowly loads the renderers, and `outrider nodes --help` also imports this
    # module.
    from outrider.nodes.messages import NAMING, NODE_NAME

    name = name or platform.node() or "node"
    if not NODE_NAME.fullmatch(name):
        raise InvalidField(f"{name!r}: {NAMING}", field="name", hint="give another one: --name NAME")
    if ray is None and ray_resource is not None:
        raise InvalidField("is of a Ray cluster", field="ray_resource", hint="give --ray, too")
    token, ca = (token or environment("OUTRIDER_TOKEN") or "").strip() or None, ca or environment("OUTRIDER_CA")
    start_log(DEBUG if verbose else INFO, token=token, as_json=settings.log_format == "json")

    async def stay_joined() -> None:
        signals = StopSignals()

        async def stop() -> None:
            await signals.first()
            seconds = f"{settings.stop_seconds:g} s"
            terminal.note(f"stopping: the sessions that run have {seconds} to end (Ctrl-C again interrupts them)")

        # Imported here, because these modules load slowly and `outrider nodes --help` imports this module, too.
        try:
            if ray is None:
                from outrider.nodes.joining import JoiningMachine
                from outrider.nodes.processes import with_processes
                from outrider.sessions.resources import capacity_of

                machine = JoiningMachine(
                    with_processes(settings),
                    capacity_of(settings.sandboxes),
                    url=address,
                    token=token,
                    ca=ca,
                    name=name,
                    joined=lambda node: terminal.out.print(f"node {node} has joined {address}"),
                )
                await machine.run(stop, seconds=settings.stop_seconds)
            else:
                from outrider.nodes.ray_machines import JoinTarget, RayFleet

                # Send only the settings that the user has set, because each machine must choose its own defaults, such
                # as the number of processes.
                own = settings.model_dump_json(include=set(OWN), exclude_unset=True).encode()
                file = "" if settings.read_from is None else str(settings.read_from.absolute())
                fleet = RayFleet(
                    JoinTarget(url=address, token=token, ca=ca, config=own, file=file),
                    address=ray,
                    resource=ray_resource,
                    stop_seconds=settings.stop_seconds,
                    note=terminal.out.print,
                )
                await fleet.run(stop)
        except asyncio.CancelledError:
            if not signals.came:
                raise
        terminal.note("stopped")

    run_service(stay_joined())
