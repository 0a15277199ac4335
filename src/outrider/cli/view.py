"""`outrider view`: serves the web page of a finished run on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import webbrowser
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.event_loop import run_service
from outrider.cli.long_running import StopSignals, start_log
from outrider.cli.options import command
from outrider.cli.terminal import Terminal

if TYPE_CHECKING:
    from outrider.tokens.rendering.tokenizer import Tokenizer


@command
def view(
    terminal: Terminal,
    path: Annotated[Path, CliArgument(metavar="PATH", help="A data folder of a service, or a JSONL file of samples.")],
    tokenizer: Annotated[
        Path | None,
        CliOption(metavar="DIR", help="Folder of the policy's tokenizer.", show_default="none: tokens as ids"),
    ] = None,
    port: Annotated[int, CliOption(metavar="PORT", help="Port to listen on.", show_default="any free one")] = 0,
    open_: Annotated[bool, CliOption("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Look at a finished run in the browser, without a service.

    PATH is the data folder of a service that has ended, or a file written by
    `outrider export` or `outrider demo`. The command does not change this
    folder or file. Only this machine can reach the page. The command serves the
    page until Ctrl-C.

    Examples:

        outrider view .outrider --tokenizer models/Qwen3-8B

        outrider view outrider-demo/samples.jsonl --open
    """
    start_log(WARNING)
    run_service(_view(terminal, path, tokenizer, port, open_))


async def _view(terminal: Terminal, path: Path, tokenizer: Path | None, port: int, open_: bool) -> None:
    from outrider.api.finished_runs import serving_run
    from outrider.service.finished_runs import open_run

    known = None if tokenizer is None else await asyncio.to_thread(_tokenizer, tokenizer)
    async with open_run(path, known) as run:
        signals = StopSignals()
        try:
            async with serving_run(run, port) as url:
                terminal.out.print(f"look at {path} in a browser: {url}/  (Ctrl-C ends)", soft_wrap=True)
                if open_:
                    await show_in_browser(terminal, url)
                await signals.first()
        except asyncio.CancelledError:
            if not signals.came:
                raise
        finally:
            signals.restore()


async def show_in_browser(terminal: Terminal, url: str) -> None:
    """Open a URL in the user's browser. If no browser can be started, write a note with the URL."""
    if not await asyncio.to_thread(webbrowser.open, f"{url}/"):
        terminal.note(f"no browser can be started here: open {url}/ yourself")


def _tokenizer(folder: Path) -> Tokenizer:
    from outrider.tokens.rendering.tokenizer import Tokenizer

    return Tokenizer.load(folder)
