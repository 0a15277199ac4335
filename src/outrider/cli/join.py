"""`outrider nodes join`: has this machine run sessions of a service on another one, until a signal ends it."""

from __future__ import annotations

import asyncio
import platform
from typing import Annotated, Any

import typer

from outrider.cli.event_loop import run_service
from outrider.cli.long_running import StopSignals, start_log, with_processes
from outrider.cli.machine_options import (
    ConfigFile,
    EvalLane,
    Files,
    InitLane,
    Processes,
    ReadyLane,
    RunLane,
    SandboxCpus,
    SandboxMemory,
    StopSeconds,
    Verbose,
    Warm,
    WarmMemory,
)
from outrider.cli.options import Ca, Token
from outrider.cli.terminal import Terminal, terminal_of
from outrider.client import DEFAULT_URL
from outrider.config import Config, load_config
from outrider.environment import environment
from outrider.errors import InvalidField


def join(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The service's address.", show_default="$OUTRIDER_URL")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the service calls this machine.", show_default="its host name"),
    ] = None,
    token: Token = None,
    ca: Ca = None,
    config: ConfigFile = None,
    processes: Processes = None,
    stop_seconds: StopSeconds = None,
    files: Files = None,
    init_lane: InitLane = None,
    ready_lane: ReadyLane = None,
    run_lane: RunLane = None,
    eval_lane: EvalLane = None,
    sandbox_cpus: SandboxCpus = None,
    sandbox_memory_mb: SandboxMemory = None,
    warm: Warm = None,
    warm_memory_mb: WarmMemory = None,
    verbose: Verbose = False,
) -> None:
    """Run sessions of a service on another machine, until Ctrl-C or SIGTERM.

    The models, tokenizers included, and the engines are the service's. Lanes,
    sandboxes and folders are this machine's. The token must be a node's:

        outrider token create --role node --name nodes

    After a signal no new sessions come, and those that run get a while to end
    (--stop-seconds); what is left then is run elsewhere.

    Examples:

        outrider nodes join https://rollouts.example:8700 --ca authority.pem

        OUTRIDER_TOKEN=... outrider nodes join http://10.0.0.7:8700 --processes 8 --run-lane 512
    """
    address = url or environment("OUTRIDER_URL")
    if address is None:
        raise InvalidField(
            "no service to join", field="url", hint=f"give its address: outrider nodes join {DEFAULT_URL}"
        )
    flags: dict[str, Any] = {
        "processes": processes,
        "stop_seconds": stop_seconds,
        "files": files,
        "lanes": {"init": init_lane, "ready": ready_lane, "run": run_lane, "eval": eval_lane},
        "sandboxes": {
            "cpus": sandbox_cpus,
            "memory_mb": sandbox_memory_mb,
            "warm": warm,
            "warm_memory_mb": warm_memory_mb,
        },
    }
    settings = with_processes(load_config(flags, file=config))
    token = token or environment("OUTRIDER_TOKEN")
    start_log(token, verbose=verbose)
    name = name or platform.node() or "node"
    run_service(_join(terminal_of(ctx), settings, address, name, token, ca or environment("OUTRIDER_CA")))


async def _join(terminal: Terminal, config: Config, url: str, name: str, token: str | None, ca: str | None) -> None:
    # Imported here because most commands do not need what nodes do.
    from outrider.nodes.joining import JoiningMachine
    from outrider.sessions.resources import ResourceAmount, machine_capacity

    has, sandboxes = machine_capacity(), config.sandboxes
    capacity = ResourceAmount(
        cpus=has.cpus if sandboxes.cpus is None else sandboxes.cpus,
        memory_mb=has.memory_mb if sandboxes.memory_mb is None else sandboxes.memory_mb,
    )
    machine = JoiningMachine(
        config,
        capacity,
        url=url,
        token=token,
        ca=ca,
        name=name,
        joined=lambda node: terminal.out.print(f"node {node} has joined {url}"),
    )
    signals = StopSignals()

    async def stop() -> None:
        await signals.first()
        terminal.note(
            f"stopping: the sessions that run have {config.stop_seconds:g} s to end (Ctrl-C again interrupts them)"
        )

    try:
        await machine.run(stop, seconds=config.stop_seconds)
    except asyncio.CancelledError:
        if not signals.came:
            raise
    terminal.note("stopped")
