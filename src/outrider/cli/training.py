"""`outrider demo --train`: trains the policy once per seed, shows the curve of the reward meanwhile, and writes a
picture of the curves.

The curve and its progress bar are drawn on standard error if it is a terminal. Otherwise one line is written per seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from outrider.cli.tables import number, table
from outrider.cli.terminal import Terminal

if TYPE_CHECKING:
    from outrider.lab.demo.train import SeedRun, TrainStep, TrainSummary

HEIGHT, WIDTH = 10, 60
BARS = " ▁▂▃▄▅▆▇█"


def train_policy(terminal: Terminal, policy: Path, runtime: str, out: Path, seeds: int) -> TrainSummary:
    """Train `seeds` times. Write the trained policies, train.json and curve.png to `out`."""
    # The imports are here, because `outrider demo` also runs without the libraries for training.
    from outrider.lab.demo.curve import draw
    from outrider.lab.demo.train import MAX_STEPS, check_installed, summary, train

    check_installed()
    out.mkdir(parents=True, exist_ok=True)
    runs: list[SeedRun] = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    for seed in range(seeds):
        bar = progress.add_task(f"seed {seed} of {seeds}", total=MAX_STEPS, now="starting the service")
        rewards: list[float] = []
        with Live(console=terminal.err, transient=True, auto_refresh=False) as live:

            def watch(step: TrainStep, bar: int = bar, rewards: list[float] = rewards, live: Live = live) -> None:
                rewards.append(step.stats.reward)
                age, idle = number(step.stats.staleness_mean), number(step.idle)
                now = f"reward {number(step.stats.reward)}  age {age}  idle {idle}"
                progress.update(bar, advance=1, now=now)  # type: ignore[arg-type]  # rich's own id type
                if terminal.err.is_terminal:
                    live.update(Group(progress, plot(rewards)), refresh=True)

            if terminal.err.is_terminal:
                live.update(progress, refresh=True)
            run = train(seed, policy, runtime, out / f"policy-{seed}", watch)
        progress.update(bar, total=len(rewards), now="done")
        runs.append(run)
        terminal.note(
            f"seed {seed}: reward {number(run.first_reward)} to {number(run.last_reward)} in {run.seconds:.0f} s,"
            f" {len(run.steps)} steps, {run.sessions} sessions"
        )
    (out / "train.json").write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    found = summary(runs, draw(runs, out / "curve.png"))
    if terminal.json:
        terminal.write_json(found)
    else:
        _print(terminal, runs, found)
    if found.curve is None:
        terminal.note("no picture, as matplotlib is not installed: pip install matplotlib")
    return found


def plot(rewards: Sequence[float]) -> Text:
    """Draw the rewards of the newest WIDTH steps, one column per step. A row is a reward of 0.1."""
    shown = rewards[-WIDTH:]
    lines = []
    for row in reversed(range(HEIGHT)):
        # The part of this row that each column fills, in eighths.
        eighths = (round((min(max(reward * HEIGHT - row, 0.0), 1.0)) * 8) for reward in shown)
        lines.append(f"{(row + 1) / HEIGHT:4.1f} │" + "".join(BARS[each] for each in eighths))
    lines.append("     └" + "─" * WIDTH)
    return Text("\n".join(lines))


def _print(terminal: Terminal, runs: Sequence[SeedRun], found: TrainSummary) -> None:
    columns = ("seed>", "before>", "after>", "seconds>", "steps>", "sessions>", "errors>", "drift>", "log-prob gap>")
    rows = [
        (
            *(run.seed, run.first_reward, run.last_reward, f"{run.seconds:.0f}"),
            *(len(run.steps), run.sessions, run.errors, run.drift_tokens, f"{run.max_logprob_gap:.1e}"),
        )
        for run in runs
    ]
    terminal.out.print(table(columns, rows))
    if found.curve:
        terminal.out.print(f"curve: {found.curve}", soft_wrap=True)
    best = max(runs, key=lambda run: run.last_reward)
    terminal.out.print(f"run it: outrider demo --model {best.policy}", soft_wrap=True)
