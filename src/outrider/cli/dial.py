"""`outrider engines dial`: answers model calls of a session proxy of verl's recipe, until a signal ends the command."""

from __future__ import annotations

import asyncio
from logging import DEBUG, INFO
from typing import Annotated
from urllib.parse import urlsplit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.engine_option import KIND, KIND_HELP, parse_engine
from outrider.cli.event_loop import run_service
from outrider.cli.long_running import StopSignals, start_log
from outrider.cli.options import Ca, Token, command
from outrider.cli.setting_options import Verbose
from outrider.cli.terminal import Terminal
from outrider.environment import environment
from outrider.errors import InvalidField


@command
def dial(
    terminal: Terminal,
    url: Annotated[str, CliArgument(metavar="URL", help="The proxy's address.")],
    engine: Annotated[str, CliArgument(metavar=KIND, help=KIND_HELP)],
    tokenizer: Annotated[str, CliOption(metavar="FOLDER", help="Folder of the model's tokenizer.")],
    renderer: Annotated[
        str | None,
        CliOption(metavar="FAMILY", help="Model family of the chat format.", show_default="by the folder's name"),
    ] = None,
    model: Annotated[str | None, CliOption(metavar="MODEL", help="The model's name on its server.")] = None,
    worker_id: Annotated[
        str | None,
        CliOption(
            metavar="NAME", help="What the proxy calls this worker.", show_default="the host's name and a number"
        ),
    ] = None,
    token: Token = None,
    ca: Ca = None,
    verbose: Verbose = False,
) -> None:
    """Answer the calls of a session proxy of verl's recipe, until Ctrl-C.

    The command sends the model calls of the proxy to an engine. The proxy is the
    recipe's own proxy in its relay mode, or an Outrider service with --compat
    verl. The engine must accept token ids.

    Example:

        outrider engines dial http://proxy:8080 vllm=http://127.0.0.1:8000 --tokenizer models/Qwen/Qwen3-8B
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidField(f"{url!r} is no address of a proxy", field="url", hint="such as http://proxy:8080")
    token, ca = (token or environment("OUTRIDER_TOKEN") or "").strip() or None, ca or environment("OUTRIDER_CA")
    start_log(DEBUG if verbose else INFO, token=token)

    def announce(worker: str) -> None:
        terminal.out.print(f"{worker} serves {url}")

    async def serve_calls() -> None:
        # Imported here, because these modules load slowly and `outrider engines --help` imports this module, too.
        from outrider.engines.base import EngineOptions
        from outrider.plugins import resolve
        from outrider.relay.verl import ProxyWorker
        from outrider.spec import EngineSpec
        from outrider.tokens.rendering.renderer import make_renderer
        from outrider.tokens.rendering.tokenizer import Tokenizer
        from outrider.trajectory import TokenMode

        signals = StopSignals()
        spec = EngineSpec(**parse_engine(engine) | ({} if model is None else {"model": model}))
        options = EngineOptions(
            name=spec.name or spec.kind, url=spec.url, model=spec.model, tokenizer=tokenizer, options=spec.options
        )
        served = resolve("engine", spec.kind, field="kind")(options)
        if getattr(served, "mode", None) is not TokenMode.TOKENS or getattr(served, "awaits_workers", False):
            raise InvalidField(
                f"an engine of the kind {spec.kind!r} takes no token ids",
                field="engine",
                hint="give one of the kinds vllm, sglang or embedded",
            )
        worker = ProxyWorker(
            url,
            served,
            make_renderer(Tokenizer.load(tokenizer), renderer),
            worker_id=worker_id,
            token=token,
            ca=ca,
        )
        await served.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(worker.run(), name="verl proxy worker")
                attached = tasks.create_task(worker.attached.wait(), name="verl proxy worker attached")
                attached.add_done_callback(lambda done: None if done.cancelled() else announce(worker.worker_id))
                await signals.first()
                terminal.note("stopping: the calls that run go to the proxy's other workers")
                running.cancel()
                attached.cancel()
        except ExceptionGroup as group:  # the group contains the one error that ended the worker
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            if not signals.came:
                raise
        finally:
            await served.close()
        terminal.note("stopped")

    run_service(serve_calls())
