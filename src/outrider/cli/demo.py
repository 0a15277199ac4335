"""`outrider demo`: runs a service, its engine and its sandboxes on this machine, with a tiny real model."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from outrider.cli.command_line import CliOption
from outrider.cli.event_loop import run_service
from outrider.cli.exit_codes import FAILURE, INTERRUPTED, SUCCESS
from outrider.cli.long_running import StopSignals
from outrider.cli.options import command
from outrider.cli.progress import session_progress
from outrider.cli.show import print_session
from outrider.cli.tables import STAGES, table
from outrider.cli.terminal import Terminal
from outrider.cli.view import show_in_browser
from outrider.errors import InvalidField
from outrider.sandbox.runtimes.default_runtime import default_runtime

if TYPE_CHECKING:
    from outrider.lab.demo.summary import RolloutSummary, Summary


@command
def demo(
    terminal: Terminal,
    out: Annotated[Path, CliOption(metavar="DIR", help="Folder for the samples.")] = Path("outrider-demo"),
    keep: Annotated[
        Path | None, CliOption(metavar="DIR", help="Keep the service's database here.", show_default="deleted")
    ] = None,
    model: Annotated[
        Path | None,
        CliOption(metavar="DIR", help="A policy of the same kind, such as a trained one.", show_default="the demo's"),
    ] = None,
    open_: Annotated[bool, CliOption("--open", help="Show the sessions live in a browser, until Ctrl-C.")] = False,
    train: Annotated[
        bool, CliOption("--train", help="Train the policy with TRL, and draw the curve of its reward.")
    ] = False,
    seeds: Annotated[
        int, CliOption(metavar="N", min=1, help="With --train: how many times, from the start and a seed.")
    ] = 5,
) -> None:
    """Run 32 sandboxed sessions with a tiny model.

    The run takes some seconds and needs no engine, no network and no root.

    With --train, the library TRL trains the model. The training's sessions run
    in a service in another process. The training ends when the model is right
    nearly every time, or after 48 steps. Ctrl-C ends the training after the
    current step, and keeps the weights and the curve of the reward. A second
    Ctrl-C ends the training at once.

    With --open, the service's page opens in a browser before the first session,
    and the service runs until Ctrl-C.

    Exit code 1: a session failed, or a recorded token differs from the engine's
    token. With --train, also: the reward did not rise from below 0.3 to above 0.85.
    Exit code 130: Ctrl-C.

    Examples:

        outrider demo

        outrider demo --json | jq .mean_reward

        outrider demo --train --seeds 1

        outrider demo --model outrider-demo/policy-0
    """
    # Imported here, because these libraries load slowly and `outrider demo --help` imports this module, too.
    from outrider.lab.demo.dialogue import POLICY
    from outrider.lab.demo.run import run_demo
    from outrider.lab.demo.summary import sample_faults, write_files
    from outrider.tokens.rendering.tokenizer import Tokenizer

    runtime, can = default_runtime()
    if not can.ok:
        terminal.note(f"sessions run as plain processes, because namespaces do not work here: {can.detail}")
        if can.hint:
            terminal.note(can.hint)
    policy = model or POLICY
    if train:
        from outrider.cli.training import train_policy

        trained = train_policy(terminal, policy, runtime, out, seeds)
        raise Exit(INTERRUPTED if trained.interrupted else SUCCESS if trained.good else FAILURE)
    _make(out)

    def show(rollouts: RolloutSummary) -> Summary:
        found = sample_faults(rollouts, Tokenizer.load(policy))
        summary = write_files(rollouts, out, runtime=runtime, faults=found)
        if terminal.json:
            terminal.write_json(summary)
        else:
            _print(terminal, rollouts, summary, policy, keep)
        for fault in found:
            terminal.note(f"fault: {fault}")
        return summary

    if open_:
        summary = run_service(_open_demo(terminal, runtime, keep, policy, show))
    else:
        with session_progress(terminal, "starting a service, and loading the model") as watch:
            rollouts = run_service(run_demo(runtime, watch, data=keep, policy=policy))
        summary = show(rollouts)
    raise Exit(SUCCESS if summary.good else FAILURE)


async def _open_demo(
    terminal: Terminal, runtime: str, keep: Path | None, policy: Path, show: Callable[[RolloutSummary], Summary]
) -> Summary:
    """Run the demo, with the service's page in a browser. The service runs until Ctrl-C."""
    from outrider.lab.demo.run import run_demo

    signals = StopSignals()
    shown: list[Summary] = []
    address = ""

    async def begin(url: str) -> None:
        nonlocal address
        address = url
        terminal.note(f"the sessions are shown at {url}/")
        await show_in_browser(terminal, url)

    async def end(rollouts: RolloutSummary) -> None:
        shown.append(await asyncio.to_thread(show, rollouts))
        terminal.note(f"the page stays at {address}/ until Ctrl-C")
        await signals.first()
        signals.restore()

    await run_demo(runtime, lambda groups: None, data=keep, policy=policy, begin=begin, end=end)
    return shown[0]


def _print(terminal: Terminal, rollouts: RolloutSummary, summary: Summary, policy: Path, keep: Path | None) -> None:
    from outrider.lab.demo.summary import best_session, tallies

    session = best_session(rollouts)
    print_session(terminal.out, session, rollouts.turns[session.id])
    columns = ("group", "sessions>", "reward>", "turns>", "sampled>", "trained>", *STAGES)
    rows = [
        (
            *(row.name, row.sessions, row.mean_reward),
            *(row.turns, row.sampled_tokens, row.trained_tokens),
            *(row.wait_seconds, row.init_seconds, row.run_seconds, row.eval_seconds),
        )
        for row in tallies(rollouts.groups)
    ]
    terminal.out.print("", table(columns, rows), sep="\n")
    written = [path for path in (summary.samples, summary.parquet) if path]
    terminal.out.print(f"samples: {', '.join(written)}", soft_wrap=True)
    if summary.parquet is None:
        terminal.note("no Parquet file, as pyarrow is not installed: pip install pyarrow")
    terminal.out.print(
        f"{summary.sessions} sessions in {summary.seconds:.1f} s ({summary.runtime} sandboxes), "
        f"{summary.errors} errors, {summary.drift_tokens} tokens of drift",
        soft_wrap=True,
    )
    for line in _meaning(policy, summary, keep):
        terminal.out.print(line, soft_wrap=True)


def _meaning(policy: Path, summary: Summary, keep: Path | None) -> Iterator[str]:
    """Yield lines that explain the reward and name the next steps."""
    from outrider.lab.demo.dialogue import RENDERER

    yield ""
    yield "A session's reward is 1 if the model read the item's file and named its zone,"
    yield "else 0. This model is right about once in four times; that is low on purpose, so"
    yield "that training has something to improve."
    yield ""
    yield "Look at these sessions in a browser (or live: outrider demo --open):"
    yield ""
    yield f"  outrider view {shlex.quote(str(keep or summary.samples))} --tokenizer {shlex.quote(str(_near(policy)))}"
    yield ""
    yield "Next, serve this model in one terminal, and run a task of your own in another:"
    yield ""
    if shutil.which("outrider") is None:
        yield f"  source {shlex.quote(str(_near(Path(sys.prefix) / 'bin' / 'activate')))}"
    yield f"  outrider serve --engine embedded={shlex.quote(str(_near(policy)))} --renderer {RENDERER}"
    yield f"  outrider run {shlex.quote(summary.task)} -n 8"
    yield "  outrider export -o rows.jsonl"


def _make(folder: Path) -> None:
    """Make the folder for the sample files before the first session starts. Raises InvalidField if files cannot be
    written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InvalidField(
            f"cannot write to the folder {folder}: {error.strerror}", field="out", hint="name another one: --out DIR"
        ) from error


def _near(path: Path) -> Path:
    """Return `path` relative to the current folder if it is inside that folder. Otherwise, return it unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
