"""Tables for the output of commands: sessions, groups, engines, lanes and more. Their rows come from types in
schemas.py, so the module needs no client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from outrider.cli.fitted_table import FittedTable
from outrider.cli.terminal import printable
from outrider.errors import FailingChore
from outrider.lifecycle import StopReason
from outrider.schemas import (
    CallbackView,
    ConsumerView,
    EngineStatus,
    GroupSummary,
    GroupView,
    LaneStats,
    NodeStats,
    PolicyStatus,
    ResourceStats,
    SessionView,
    TokenView,
)
from outrider.trajectory import SessionResult, StageSeconds

if TYPE_CHECKING:
    from outrider.client.rollout import RolledOut

MAX_ERROR = 72
"""Maximum length of an error message in a table, in characters."""

STAGES = ("wait s>", "init s>", "run s>", "eval s>")
"""The columns for the four numbers of `stage_seconds`."""

UNITS = (("d", 86400), ("h", 3600), ("min", 60))
"""Units of time for ages of at least a minute, with their lengths in seconds. The largest comes first."""

STYLES = {
    StopReason.COMPLETED.value: "green",
    StopReason.ERROR.value: "bold red",
    StopReason.CANCELLED.value: "yellow",
    StopReason.EXPIRED.value: "bold red",
    StopReason.EARLY_STOP.value: "yellow",
    StopReason.NONZERO_EXIT.value: "yellow",
    StopReason.AGENT_EXCESS.value: "yellow",
    "yes": "green",
    "suspect": "yellow",
    "no": "bold red",
    "holds": "green",
    "does not hold": "bold red",
    "not tried": "yellow",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> FittedTable:
    """Return a table without borders. If a column's name ends in ">", the column is aligned to the right.

    A cell may be of any type: None is shown as "-", a bool as "yes" or "no", and a float with two decimals. Control
    characters are escaped."""
    return FittedTable(columns, [tuple(map(_cell, row)) for row in rows], title)


def _cell(value: object) -> str | Text:
    if isinstance(value, Text):
        return value
    if isinstance(value, bool):
        return word("yes" if value else "no")
    return number(value) if isinstance(value, float | None) else printable(str(value))


def word(text: str) -> Text:
    """Return a text such as "yes", or the name of a state, in the colour that STYLES gives it."""
    return Text(text, style=STYLES.get(text, ""))


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def session_table(group: GroupView) -> RenderableType:
    """Return a table of a group's sessions: state or stop reason, reward, turns, sampled tokens, seconds of each stage,
    and error. A session without an error may have a remark in the last cell."""
    columns = ("session", "state", "reward>", "turns>", "tokens>", *STAGES, "error")
    rows: list[Sequence[object]] = []
    for session in group.sessions:
        result = session.result
        error = result.error if result else session.last_error
        shown = f"{error.code}: {error.message}" if error else ""
        if result is not None and result.harness_exit is not None:
            shown = f"exit code {result.harness_exit.code}"
        elif result is not None and result.stop_reason is StopReason.AGENT_EXCESS and result.verdict is not None:
            shown = result.verdict.reason or ""
        elif result is not None and error is None:
            shown = _failed_calls(result)
        if len(shown) > MAX_ERROR:
            shown = shown[: MAX_ERROR - 3] + "..."
        shown = shown.replace("\n", " ")
        if result is None:
            rows.append((session.id, word(session.state.value), *["-"] * 7, shown))
            continue
        reward = result.verdict.reward if result.verdict else None
        counts = (reward, result.turns, result.tokens.sampled, *stage_seconds(result.seconds))
        rows.append((session.id, word(result.stop_reason.value), *counts, shown))
    return table(columns, rows)


def sessions_table(sessions: Sequence[SessionView]) -> RenderableType:
    """Return a table of sessions of several groups: state or stop reason, reward, turns, sampled tokens, and error.
    Without an error, the last cell has the number of failed model calls, if there were any."""
    rows: list[Sequence[object]] = []
    for session in sessions:
        result = session.result
        if result is None:
            rows.append((session.id, word(session.state.value), "-", "-", "-", ""))
            continue
        reward = result.verdict.reward if result.verdict else None
        error = result.error.code if result.error else _failed_calls(result)
        rows.append((session.id, word(result.stop_reason.value), reward, result.turns, result.tokens.sampled, error))
    return table(("session", "state", "reward>", "turns>", "tokens>", "error"), rows)


def _failed_calls(result: SessionResult) -> str:
    """Return a text such as "2 failed model calls", or "" if no model call failed."""
    failed = sum(result.failed_calls.values())
    return counted(failed, "failed model call") if failed else ""


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def run_table(done: RolledOut) -> RenderableType:
    """Return a table with the totals of a data set's run. The column `mixed groups` counts the groups whose rewards
    are not all equal."""
    columns = ("tasks>", "sessions>", "graded>", "reward>", "mixed groups>", "turns>", "sampled>", "trained>")
    counts = (done.mixed, done.turns, done.sampled, done.trained)
    return table(columns, [(len(done.groups), done.sessions, done.graded, done.mean_reward, *counts)])


def group_table(groups: Iterable[GroupSummary]) -> RenderableType:
    columns = ("group", "state", "sessions>", "done>", "errors>", "reward>", "age>", "labels")
    rows = []
    for group in groups:
        state = word("cancelled" if group.cancelled else group.state.value)
        labels = " ".join(f"{name}={value}" for name, value in group.labels.items())
        counts = (group.n, group.done, group.errors, group.mean_reward)
        rows.append((group.id, state, *counts, age(group.created), labels))
    return table(columns, rows, title="groups")


def consumer_table(consumers: Iterable[ConsumerView]) -> RenderableType:
    """Return a table with a row for each consumer. The tenant `*` marks a consumer that reads the groups of all
    tenants."""
    rows = [(each.name, each.tenant or "*", each.cursor, each.lag, age(each.seen)) for each in consumers]
    return table(("consumer", "tenant", "acknowledged>", "left>", "last seen>"), rows)


def callback_table(callbacks: Iterable[CallbackView]) -> RenderableType:
    rows = [(each.group_id, each.tries, age(each.given_up), each.url, each.fault) for each in callbacks]
    return table(("group", "tries>", "given up>", "address", "last failure"), rows)


def age(since: float) -> str:
    """Return the time since the Unix time `since` as text in one unit, such as "3 h"."""
    seconds = max(0.0, time.time() - since)
    unit, size = next((each for each in UNITS if seconds >= each[1]), ("s", 1))
    return f"{seconds / size:.0f} {unit}"


def engine_table(engines: Iterable[EngineStatus]) -> RenderableType:
    columns = ("engine", "serves", "kind", "up", "mode", "in flight>", "sessions>", "generated>", "version>", "address")
    rows = [
        (
            engine.name,
            engine.serves or "the policy",
            engine.kind,
            word("draining" if engine.draining else "no" if not engine.ok else "suspect" if engine.suspect else "yes"),
            engine.mode,
            *(engine.in_flight, engine.sessions, engine.generated_tokens, engine.version),
            engine.url or "-",
            engine.detail or engine.suspect or engine.advice,
        )
        for engine in engines
    ]
    return table((*columns, "detail"), rows, title="engines")


def policy_line(policy: PolicyStatus) -> str:
    """Return a line with the policy's version. If the policy is paused, the line also has the kind of the pause."""
    paused = (
        "" if policy.paused is None else f", paused ({policy.paused}): generations wait, agents' clocks stand still"
    )
    return f"policy version {policy.version}{paused}"


def policy_table(policy: PolicyStatus) -> RenderableType:
    """Return a table with a row for each engine of the policy."""
    return table(("engine", "version>", "up"), [(each.name, each.version, each.ok) for each in policy.engines])


def token_table(tokens: Iterable[TokenView]) -> RenderableType:
    """Return a table with a row for each token and the time until it expires."""

    def until(token: TokenView) -> str:
        if token.revoked is not None:
            return "revoked"
        if token.expires is None:
            return "always"
        left = token.expires - time.time()
        return f"{left / 86400:.1f} d more" if left > 0 else "expired"

    rows = [(token.name, token.role, token.tenant, token.max_queued, until(token)) for token in tokens]
    return table(("token", "role", "tenant", "max queued>", "good"), rows)


def node_table(node: NodeStats) -> RenderableType:
    """Return a table about a node. It has a row for each lane, and one for the resources that tasks have reserved. In
    these rows, the column `waited` has the mean wait of the sessions served so far. If sandboxes were started ahead of
    time or the event loop has stalled, each of these two also has a row."""
    rows: list[Sequence[object]] = [(lane.name, f"{lane.in_use}/{lane.size}", *_passage(lane)) for lane in node.lanes]
    resources = node.resources
    memory = f"{resources.memory_mb_set_aside:,}/{resources.memory_mb:,} MiB"
    gpus = f", {resources.gpus_set_aside}/{resources.gpus} GPUs" if resources.gpus else ""
    set_aside = f"{resources.cpus_set_aside:g}/{resources.cpus:g} cpus, {memory}{gpus}"
    rows.append(("set aside", set_aside, *_passage(resources)))
    warm = node.warm
    if warm.ready or warm.taken or warm.misses:
        rows.append(("warm", f"{warm.ready} ready", "-", warm.taken, f"{warm.misses} missed"))
    stalls = node.stalls
    if stalls.count:
        starved = f", {stalls.starved} starved" if stalls.starved else ""
        longest = f"{stalls.longest:.2f} s at most{starved}"
        rows.append(("stalls", longest, "-", stalls.count, f"{stalls.total:.2f} s"))
    drained = ", drained: it takes no new sessions" if node.drained else ""
    title = f"node {node.name}: {node.sessions} sessions{drained}"
    return table(("lane", "in use>", "waiting>", "served>", "waited>"), rows, title=title)


def failing_table(failing: Sequence[FailingChore]) -> RenderableType:
    """Return a table with a row for each background task that is failing at present, in the service or on a node."""
    now = time.time()
    rows = []
    for each in failing:
        name = f"{each.node}: {each.name}" if each.node else each.name
        rows.append((name, f"{now - each.since:.0f} s", each.count, each.error))
    title = "background work that fails, and is tried again"
    return table(("failing", "for>", "times>", "last error"), rows, title=title)


def _passage(stats: LaneStats | ResourceStats) -> tuple[int, int, str]:
    """Return three cells: the number of waiting sessions, the number of sessions served so far, and their mean wait."""
    mean = stats.waited_seconds / stats.served if stats.served else 0.0
    return stats.waiting, stats.served, f"{mean:.2f} s"


def stage_seconds(seconds: StageSeconds) -> tuple[float, float, float, float]:
    """Return four times in seconds: of waiting (all waits together), preparing, running and grading."""
    waited = seconds.queued + seconds.ready + seconds.eval_wait
    return waited, seconds.init, seconds.run, seconds.eval
