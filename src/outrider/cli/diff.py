"""`outrider diff`: compare two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from rich.console import RenderableType

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import counted, table
from outrider.cli.terminal import Terminal, printable
from outrider.client.client import Client
from outrider.schemas import Estimate, Flip, RunDiff, RunSide

FLIPS_SHOWN = 10
MAX_CAUSE = 24
MEANS = ("turns", "tokens_sampled", "tokens_trained", "seconds", "model_seconds")


@command
def diff(
    terminal: Terminal,
    service: Client,
    a: Annotated[str, CliArgument(metavar="RUN", help="Labels (run=a) or ids of groups, with commas between.")],
    b: Annotated[str, CliArgument(metavar="RUN", help="The other run.")],
    passed: Annotated[float, CliOption("--passed", metavar="NUMBER", help="Least reward of a solved session.")] = 1.0,
) -> None:
    """Compare two runs: rewards, pass@k, turns, tokens, failures, flips.

    A flip is a pair of sessions of one task, one session from each run, of which
    only one is solved. The differences of reward and pass@k have 95 % confidence
    intervals over tasks. Groups belong to the same task if they have the same
    label `task` or, without this label, the same instruction.

    Examples:

        outrider diff run=before run=after

        outrider diff g-0019a4e2b6c1f3d2 g-0019a4e2c7d2a4e3 --json
    """
    found = service.diff(a, b, passed=passed)
    terminal.show(found, *_shown(found))


def _shown(found: RunDiff) -> Iterator[RenderableType]:
    a, b = found.a, found.b
    yield f"A: {_about(a)}\nB: {_about(b)}"
    yield ""
    rows: list[Sequence[object]] = [("reward", _range(a.reward), _range(b.reward), _range(found.reward, sign=True))]
    for k in sorted({*a.pass_at, *b.pass_at}):
        first, second, gain = a.pass_at.get(k), b.pass_at.get(k), found.pass_at.get(k)
        rows.append((f"pass@{k}", _range(first), _range(second), _range(gain, sign=True)))
    for name in MEANS:
        one, other = getattr(a, name), getattr(b, name)
        gain_text = "-" if one is None or other is None else f"{other - one:+.1f}"
        rows.append((name.replace("_", " "), _mean(one), _mean(other), gain_text))
    yield table(("", "A>", "B>", "B - A>"), rows)
    how = f"differences over {counted(found.paired, 'task')} of both runs" if found.paired else "the runs share no task"
    yield f"[95 % intervals over tasks]; {how}"
    if a.failures or b.failures:
        yield ""
        causes = sorted(
            {*a.failures, *b.failures}, key=lambda cause: -a.failures.get(cause, 0) - b.failures.get(cause, 0)
        )
        counts = [(cause, a.failures.get(cause, 0), b.failures.get(cause, 0)) for cause in causes]
        yield table(
            ("ungraded", "A>", "B>", "B - A>"),
            [(printable(cause)[:MAX_CAUSE], one, other, f"{other - one:+d}") for cause, one, other in counts],
        )
    if found.flips:
        yield ""
        yield f"{found.gained} solved in B only, {found.lost} in A only (a reward of {found.passed:g} or more):"
        shown = _some(found)
        yield table(("A", "B", "A>", "B>"), [(flip.a, flip.b, flip.a_reward, flip.b_reward) for flip in shown])
        if len(shown) < len(found.flips):
            yield "more with --json"


def _some(found: RunDiff) -> list[Flip]:
    """Return at most FLIPS_SHOWN flips. First come flips to a failure (only run `a` has solved the task), up to half of
    FLIPS_SHOWN. Flips to a success (only run `b` has solved it) follow."""
    lost = [flip for flip in found.flips if flip.a_reward >= found.passed]
    gained = [flip for flip in found.flips if flip.a_reward < found.passed]
    return [*lost[: FLIPS_SHOWN // 2], *gained[: FLIPS_SHOWN - min(len(lost), FLIPS_SHOWN // 2)]]


def _about(side: RunSide) -> str:
    name = printable(side.selector)
    shown = name if len(name) <= 24 else name[:21] + "..."
    return (
        f"{shown}: {counted(side.tasks, 'task')}, {side.done} of {counted(side.sessions, 'session')} done,"
        f" {side.graded} graded"
    )


def _range(estimate: Estimate | None, *, sign: bool = False) -> str:
    if estimate is None:
        return "-"
    plus = "+" if sign else ""
    middle = f"{estimate.value:{plus}.3f}"
    if estimate.low is None or estimate.high is None:
        return middle
    return f"{middle} [{estimate.low:{plus}.2f} {estimate.high:{plus}.2f}]"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
