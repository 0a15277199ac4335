"""`outrider serve`: runs the service until a signal ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.engines import KIND, KIND_HELP, parse_engine
from outrider.cli.event_loop import run_service, short_pauses
from outrider.cli.long_running import StopSignals, start_log
from outrider.cli.machine_options import (
    LANES,
    SANDBOXES,
    ConfigFile,
    EvalLane,
    Files,
    InitLane,
    Processes,
    ReadyLane,
    RunLane,
    SandboxCpus,
    SandboxGpu,
    SandboxMemory,
    StopSeconds,
    Verbose,
    Warm,
    WarmMemory,
)
from outrider.cli.terminal import Terminal, terminal_of
from outrider.client.client import DEFAULT_URL
from outrider.config import Config, load_config

NETWORK = "Network"
MODEL = "Model"


def serve(
    ctx: typer.Context,
    config: ConfigFile = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on; 0 takes any free one.", show_default="8700")
    ] = None,
    stop_seconds: StopSeconds = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for groups and results.", show_default=".outrider")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Database: postgresql://USER@HOST/NAME. A password is safer in OUTRIDER_STORE.",
            show_default="SQLite in --data",
        ),
    ] = None,
    files: Files = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token that clients must send. Safer: OUTRIDER_TOKEN.")
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate (PEM) to serve with TLS.", rich_help_panel=NETWORK),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its private key (PEM).",
            show_default="in the certificate's file",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            help="Let other machines connect without TLS: a proxy in front has it, or the network is your own.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    processes: Processes = None,
    engine: Annotated[list[str] | None, typer.Option(metavar=KIND, help=f"{KIND_HELP} May be repeated.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The model's folder, which has its tokenizer.json.",
            show_default="the first embedded engine's",
            rich_help_panel=MODEL,
        ),
    ] = None,
    renderer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Renderer of its chat format.",
            show_default="by the model's name",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The name that harnesses use for it.", show_default="policy", rich_help_panel=MODEL
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Its context length.", show_default="the engines'", rich_help_panel=MODEL),
    ] = None,
    init_lane: InitLane = None,
    ready_lane: ReadyLane = None,
    run_lane: RunLane = None,
    eval_lane: EvalLane = None,
    evaluation_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Part of the run slots, 0 to 1, that evaluations get before all others.",
            show_default="0",
            rich_help_panel=LANES,
        ),
    ] = None,
    allow_path: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A file or folder of this machine that tasks may mount or use as a root. May be repeated.",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Python that tasks may name, and that runs inside the service. May be repeated.",
            show_default="outrider.lab.demo.task",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    sandbox_cpus: SandboxCpus = None,
    sandbox_memory_mb: SandboxMemory = None,
    sandbox_gpu: SandboxGpu = None,
    warm: Warm = None,
    warm_memory_mb: WarmMemory = None,
    verbose: Verbose = False,
) -> None:
    """Serve rollouts until Ctrl-C or SIGTERM.

    Sessions that run at that time get a while to end (--stop-seconds). A
    second Ctrl-C interrupts them. The next service on the same data folder
    restarts interrupted sessions, and runs queued ones.

    Examples:

        outrider serve --engine vllm=http://127.0.0.1:8000 --tokenizer models/Qwen3-8B --renderer qwen3

        outrider serve --engine embedded=models/tiny --renderer template:qwen3 --port 0

        outrider serve --config outrider.toml
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "stop_seconds": stop_seconds,
        "processes": processes,
        "data": data,
        "store": store,
        "files": files,
        "token": token,
        "tls": {"certificate": tls_certificate, "key": tls_key, "insecure": insecure},
        "engines": [parse_engine(text) for text in engine] if engine else None,
        "model": {"tokenizer": tokenizer, "renderer": renderer, "name": model_name, "context_tokens": context},
        "lanes": {
            "init": init_lane,
            "ready": ready_lane,
            "run": run_lane,
            "eval": eval_lane,
            "evaluation_share": evaluation_share,
        },
        "plugins": {"allow": allow_plugin or None},
        "sandboxes": {
            "allow": allow_path or None,
            "cpus": sandbox_cpus,
            "memory_mb": sandbox_memory_mb,
            "gpus": sandbox_gpu or None,
            "warm": warm,
            "warm_memory_mb": warm_memory_mb,
        },
    }
    settings = load_config(flags, file=config)
    if settings.model.tokenizer is None:  # the default is the tokenizer of the first embedded engine
        folder = next(
            (each.model for each in settings.engines if each.kind == "embedded" and each.serves is None), None
        )
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"tokenizer": folder})})
    # The import is here, because most commands do not need this module.
    from outrider.sessions.resources import with_processes

    settings = with_processes(settings)
    start_log(settings.token, verbose=verbose)
    run_service(_serve(terminal_of(ctx), settings))


async def _serve(terminal: Terminal, config: Config) -> None:
    # The imports are here, because most commands do not need the server's libraries.
    from outrider.api.server import serving
    from outrider.service.assembly import open_service

    signals = StopSignals()
    try:
        async with (
            open_service(config) as (service, node),
            serving(service, node) as url,
            short_pauses(lambda: not service.under_way, service.failures),
        ):
            terminal.out.print(f"outrider is ready at {url}")
            flags = "" if url == DEFAULT_URL else f" --url {url}"
            token = " --token TOKEN" if config.token else ""
            terminal.out.print(f"submit a task: outrider run TASK.toml -n 8{flags}{token}")
            await signals.first()
            if number := service.under_way:
                terminal.note(
                    f"stopping: {number} sessions are under way, and have {config.stop_seconds:g} s to end "
                    "(Ctrl-C again interrupts them)"
                )
            await service.run_dry(config.stop_seconds)
            signals.restore()  # another Ctrl-C can then end a stop that hangs
    except asyncio.CancelledError:
        if not signals.came:
            raise
    terminal.note("stopped")
