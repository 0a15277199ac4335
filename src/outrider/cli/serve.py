"""`outrider serve`: the service, until a signal ends it. The only place that configures logging."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.engines import KIND, KIND_HELP, parse_engine
from outrider.cli.event_loop import calm_interpreter, run_service
from outrider.cli.terminal import Terminal, terminal_of
from outrider.config import Config, load_config

LANES = "Settings of the lanes"
SANDBOXES = "What sandboxes may have"
MODEL = "The policy"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings as TOML; flags and OUTRIDER_* win over it.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="0 for any free one.", show_default="8700")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where groups and results are kept.", show_default=".outrider")
    ] = None,
    files: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where `upload` steps find their files.", show_default=".")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="What clients must show. Better: OUTRIDER_TOKEN.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(metavar=KIND, help=f"{KIND_HELP} May be repeated.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The model's folder, with tokenizer.json.",
            show_default="the first embedded engine's",
            rich_help_panel=MODEL,
        ),
    ] = None,
    renderer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its renderer.", show_default="by the model's name", rich_help_panel=MODEL),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What harnesses call it.", show_default="policy", rich_help_panel=MODEL),
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Its context length.", rich_help_panel=MODEL)
    ] = None,
    init_lane: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sandboxes prepared at once.", show_default="16", rich_help_panel=LANES),
    ] = None,
    run_lane: Annotated[
        int | None, typer.Option(metavar="N", help="Agents running at once.", show_default="64", rich_help_panel=LANES)
    ] = None,
    eval_lane: Annotated[
        int | None, typer.Option(metavar="N", help="Outcomes graded at once.", show_default="16", rich_help_panel=LANES)
    ] = None,
    allow_path: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A file or folder of this machine that tasks may mount or use as a root. May be repeated.",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    sandbox_cpus: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Processors they may set aside in all.",
            show_default="the machine's",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    sandbox_memory_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            help="Memory they may set aside in all.",
            show_default="the machine's",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How many of each kind wanted lately to make ahead.",
            show_default="0",
            rich_help_panel=SANDBOXES,
        ),
    ] = None,
    warm_memory_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB", help="Memory that all of these may take.", show_default="4096", rich_help_panel=SANDBOXES
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve rollouts until Ctrl-C or SIGTERM.

    What is running then is taken up again by the next service on the same data.

    Examples:

        outrider serve --engine vllm=http://127.0.0.1:8000 --tokenizer models/Qwen3-8B --renderer qwen3

        outrider serve --engine embedded=models/tiny --renderer template:qwen3 --port 0

        outrider serve --config outrider.toml
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "data": data,
        "files": files,
        "token": token,
        "engines": [parse_engine(text) for text in engine] if engine else None,
        "model": {"tokenizer": tokenizer, "renderer": renderer, "name": model_name, "context_tokens": context},
        "lanes": {"init": init_lane, "run": run_lane, "eval": eval_lane},
        "sandboxes": {
            "allow": allow_path or None,
            "cpus": sandbox_cpus,
            "memory_mb": sandbox_memory_mb,
            "warm": warm,
            "warm_memory_mb": warm_memory_mb,
        },
    }
    settings = _with_tokenizer(load_config(flags, file=config))
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    run_service(_serve(terminal_of(ctx), settings))


async def _serve(terminal: Terminal, config: Config) -> None:
    # Late, because only this command needs the server's libraries.
    from outrider.api.server import check_address, serving
    from outrider.service.service import Service

    check_address(config.host, config.token)
    stopped = _cancel_on_signal()
    try:
        async with Service(config) as service, serving(service) as url:
            calm_interpreter()
            terminal.out.print(f"outrider is ready at {url}")
            terminal.out.print(_how_to_submit(url, config))
            await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        if not stopped():
            raise
        terminal.note("stopped")


def _how_to_submit(url: str, config: Config) -> str:
    flags = "" if url == "http://127.0.0.1:8700" else f" --url {url}"
    return f"submit a task: outrider run TASK.toml -n 8{flags}{' --token TOKEN' if config.token else ''}"


def _cancel_on_signal() -> Callable[[], bool]:
    """The first SIGINT or SIGTERM cancels the calling task, a second one kills as usual; whether one has come."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    came: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        came.append(number)
        for each in SIGNALS:
            loop.remove_signal_handler(each)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    return lambda: bool(came)


def _with_tokenizer(config: Config) -> Config:
    """Without a tokenizer of its own, the policy has that of the first embedded engine."""
    if config.model.tokenizer is not None:
        return config
    folder = next((engine.model for engine in config.engines if engine.kind == "embedded"), None)
    return config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": folder})})
