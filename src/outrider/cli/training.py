"""`outrider demo --train`: trains the policy once per seed, and draws the curves of the reward for all seeds.

If standard error is a terminal, it shows the current curve and a progress bar. Otherwise, a line is written for the
first step and then for every LINE_STEPS steps. Ctrl-C ends the training after the current step, and keeps the weights
and the curve.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
LINE_STEPS = 4


def train_policy(terminal: Terminal, policy: Path, runtime: str, out: Path, seeds: int) -> TrainSummary:
    """Train the policy `seeds` times, and write the trained policies, train.json and curve.png to `out`. Raises
    KeyboardInterrupt at the second Ctrl-C, or after the first one if no step was done."""
    # Imported here, because `outrider demo` must run without these libraries if --train is not given.
    from outrider.lab.demo.curve import draw
    from outrider.lab.demo.train import MAX_STEPS, check_installed, summary, train

    check_installed()
    out.mkdir(parents=True, exist_ok=True)
    runs: list[SeedRun] = []
    with _first_ctrl_c(terminal) as interrupted:
        for seed in range(seeds):
            if interrupted():
                break
            with _progress(terminal, seed, seeds, MAX_STEPS) as watch:
                run = train(seed, policy, runtime, out / f"policy-{seed}", watch, interrupted)
            if not run.steps:
                break
            runs.append(run)
            (out / "train.json").write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
            terminal.note(
                f"seed {seed}: reward {number(run.first_reward)} to {number(_reached(run))} in {run.seconds:.0f} s,"
                f" {len(run.steps)} steps, {run.sessions} sessions"
            )
        if not runs:
            raise KeyboardInterrupt
        ended_early = len(runs) < seeds or runs[-1].last_reward is None
        found = summary(runs, draw(runs, out / "curve.png"), interrupted=ended_early)
    if terminal.json:
        terminal.write_json(found)
    else:
        _print(terminal, runs, found)
    if found.curve is None:
        terminal.note("no picture, as matplotlib is not installed: pip install matplotlib")
    if ended_early:
        last = runs[-1]
        terminal.note(
            f"ended by Ctrl-C in seed {last.seed} of {seeds}, after step {len(last.steps)} of {MAX_STEPS};"
            f" the weights of this step are in {last.policy}, and the numbers in {out / 'train.json'}"
        )
    return found


@contextmanager
def _first_ctrl_c(terminal: Terminal) -> Iterator[Callable[[], bool]]:
    """While the block runs, the first Ctrl-C does not interrupt it, but makes the yielded function return True. The
    second Ctrl-C raises KeyboardInterrupt."""
    interrupted = False

    def note_it(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        terminal.note("the training ends after this step; Ctrl-C again ends it at once, without the step's weights")

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(terminal: Terminal, seed: int, seeds: int, most: int) -> Iterator[Callable[[TrainStep], None]]:
    """On a terminal, draw the curve, and show how many of at most `most` training steps are done. To any other output,
    write lines."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    bar = progress.add_task(f"seed {seed} of {seeds}", total=most, now="starting the service")
    rewards: list[float] = []
    with Live(console=terminal.err, transient=True, auto_refresh=False) as live:

        def watch(step: TrainStep) -> None:
            rewards.append(step.stats.reward)
            age, idle = number(step.stats.staleness_mean), number(step.idle)
            now = f"reward {number(step.stats.reward)}  age {age}  idle {idle}"
            progress.update(bar, advance=1, now=now)
            if terminal.err.is_terminal:
                live.update(Group(progress, plot(rewards)), refresh=True)
            elif len(rewards) % LINE_STEPS == 1:
                terminal.note(f"seed {seed} of {seeds}: step {len(rewards)} of at most {most}, {now}")

        if terminal.err.is_terminal:
            live.update(progress, refresh=True)
        yield watch


def plot(rewards: Sequence[float]) -> Text:
    """Draw the rewards of the newest WIDTH steps, one column per step. A row is a reward of 0.1."""
    shown = rewards[-WIDTH:]
    lines = []
    for row in reversed(range(HEIGHT)):
        # How much of this row each column's bar fills, in eighths.
        eighths = (round((min(max(reward * HEIGHT - row, 0.0), 1.0)) * 8) for reward in shown)
        lines.append(f"{(row + 1) / HEIGHT:4.1f} │" + "".join(BARS[each] for each in eighths))
    lines.append("     └" + "─" * WIDTH)
    return Text("\n".join(lines))


def _print(terminal: Terminal, runs: Sequence[SeedRun], found: TrainSummary) -> None:
    columns = ("seed>", "before>", "after>", "seconds>", "steps>", "sessions>", "errors>", "drift>", "log-prob gap>")
    rows = [
        (
            *(run.seed, run.first_reward, "-" if run.last_reward is None else run.last_reward, f"{run.seconds:.0f}"),
            *(len(run.steps), run.sessions, run.errors, run.drift_tokens, f"{run.max_logprob_gap:.1e}"),
        )
        for run in runs
    ]
    terminal.out.print(table(columns, rows))
    if found.curve:
        terminal.out.print(f"curve: {found.curve}", soft_wrap=True)
    best = max(runs, key=_reached)
    terminal.out.print(f"run it: outrider demo --model {best.policy}", soft_wrap=True)


def _reached(run: SeedRun) -> float:
    """Return the reward after the training, or the reward of the last step if the training ended early."""
    return run.steps[-1].stats.reward if run.last_reward is None else run.last_reward
