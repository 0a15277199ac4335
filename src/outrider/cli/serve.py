"""`outrider serve`: runs the service until a signal ends it."""

from __future__ import annotations

import asyncio
from logging import DEBUG, getLevelNamesMapping

from outrider.cli.event_loop import run_service, short_pauses
from outrider.cli.long_running import StopSignals, start_log
from outrider.cli.options import command
from outrider.cli.setting_options import Verbose
from outrider.cli.terminal import Terminal
from outrider.config import Config
from outrider.environment import DEFAULT_URL


@command
def serve(terminal: Terminal, settings: Config, verbose: Verbose = False) -> None:
    """Serve rollouts until Ctrl-C or SIGTERM.

    After the signal, running sessions have --stop-seconds to end. A second Ctrl-C
    interrupts them. The next service with the same data folder runs interrupted
    sessions again from the start, and also runs queued ones.

    Examples:

        outrider serve --engine vllm=http://127.0.0.1:8000 --tokenizer models/Qwen3-8B --renderer qwen3

        outrider serve --engine embedded=models/tiny --renderer template:qwen3 --port 0

        outrider serve --config outrider.toml
    """
    if settings.model.tokenizer is None:  # by default, use the tokenizer of the first embedded engine
        folder = next(
            (each.model for each in settings.engines if each.kind == "embedded" and each.serves is None), None
        )
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"tokenizer": folder})})
    # A program that starts this command expects the first line of standard error to be an error, so this note is only
    # for terminals.
    if terminal.err.is_terminal:
        terminal.note(f"starting a service on the data folder {settings.data}")
    # Imported here, because these modules load slowly, and `outrider slurm` and `outrider serve --help` also import
    # this module. `rendering` is imported before the event loop starts threads, because threads make the import slower.
    import outrider.tokens.rendering  # noqa: F401
    from outrider.nodes.processes import with_processes

    settings = with_processes(settings)
    level = DEBUG if verbose else getLevelNamesMapping()[settings.log_level.upper()]
    start_log(level, token=settings.token, as_json=settings.log_format == "json")
    run_service(_serve(terminal, settings))


async def _serve(terminal: Terminal, config: Config) -> None:
    # Imported here, because these modules load slowly, as in `serve`.
    from outrider.api.server import serving
    from outrider.service.assembly import open_service

    signals = StopSignals()
    try:
        async with (
            open_service(config) as (service, node),
            serving(service, node) as url,
            short_pauses(lambda: not service.scheduler.under_way, service.failures),
        ):
            terminal.out.print(f"outrider is ready at {url}")
            flags = "" if url == DEFAULT_URL else f" --url {url}"
            token = " --token TOKEN" if config.token else ""
            terminal.out.print(f"submit a task: outrider run TASK.toml -n 8{flags}{token}")
            await signals.first()
            if number := service.scheduler.under_way:
                terminal.note(
                    f"stopping: {number} sessions are under way, and have {config.stop_seconds:g} s to end "
                    "(Ctrl-C again interrupts them)"
                )
            await service.run_dry(config.stop_seconds)
            signals.restore()  # if the shutdown hangs, the next Ctrl-C ends the process
    except asyncio.CancelledError:
        if not signals.came:
            raise
    terminal.note("stopped")
