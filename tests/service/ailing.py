"""Runs with a fault of known size, for tests of the doctor of runs. A plan makes the result and the turns of each
session. A run is returned as evidence or put into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import exp
from random import Random
from typing import Any, NamedTuple

import msgspec

from outrider.errors import Boundary, ErrorRecord
from outrider.lifecycle import GroupState, StopReason
from outrider.messages import Message, Role, ToolCall
from outrider.service.diagnosis.evidence import RunEvidence
from outrider.service.diagnosis.session_facts import FactsReader
from outrider.spec import OPERATOR_TENANT
from outrider.store.rows import GroupRow
from outrider.store.store import Store
from outrider.timeline import Entry, EntryKind, TimelinePart
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    LogprobKind,
    SessionResult,
    StageSeconds,
    TokenCounts,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
)

SYSTEM = "\n".join(["You are a careful engineer.", *(f"Rule {number}: be careful." for number in range(8))])
LABELS = {"run": "tuesday"}
START = 1_000_000.0


class Planned(NamedTuple):
    """A planned session: fields of its result, its turns, and entries of its timeline."""

    result: dict[str, Any]
    turns: list[Turn]
    entries: Sequence[Entry] = ()


class Made(NamedTuple):
    """A session of a run."""

    result: SessionResult
    turns: list[Turn]
    entries: Sequence[Entry]


class Place(msgspec.Struct, frozen=True):
    """A session's place in a run of `groups` groups with `n` sessions each, and the session's own random source."""

    group: int
    index: int
    groups: int
    n: int
    chance: Random

    @property
    def number(self) -> int:
        return self.group * self.n + self.index

    @property
    def late(self) -> float:
        """0 for the first group, 1 for the last."""
        return self.group / max(1, self.groups - 1)

    def among(self, share: float, number: int | None = None, of: int | None = None) -> bool:
        """True for exactly this share of the sessions, spread over the run."""
        total = of or self.groups * self.n
        at = self.number if number is None else number
        return (at * 271 + 13) % total < round(share * total)


Plan = Callable[[Place], Planned]


def a_turn(index: int, **changes: Any) -> Turn:
    """Return a turn of ten sampled tokens. Turn 0 begins a conversation, and each later turn continues it."""
    fields: dict[str, Any] = {
        "index": index,
        "parent": index - 1 if index else None,
        "join": JoinKind.APPEND if index else JoinKind.ROOT,
        "prompt_length": 400 + 100 * index,
        "prompt_delta": pack_ids([1, 2, 3]),
        "output_ids": pack_ids(range(10)),
        "logprobs": b"",
        "logprob_kind": LogprobKind.NONE,
        "versions": (VersionSpan(10, 0, 10),),
        "finish": FinishReason.STOP,
        "dialect": "chat",
        "engine": "one",
        "sampling": {},
        "timings": TurnTimings(received=START, first_token=START + 1, finished=START + 2),
    }
    return Turn(**fields | changes)


def conversation(
    *, system: str = SYSTEM, tool: str = "bash", result: str = "main.py  README.md", turns: int = 2, **changes: Any
) -> list[Turn]:
    """Return turns that call a tool, except the last turn. `changes` are fields of all turns."""
    asked = (Message(role=Role.SYSTEM, content=system), Message(role=Role.USER, content="Fix the bug."))
    found = []
    for at in range(turns):
        answer = (Message(role=Role.TOOL, content=result, tool_call_id=f"c{at - 1}"),)
        calls = (ToolCall(id=f"c{at}", name=tool, arguments='{"command": "ls"}'),) if at < turns - 1 else ()
        reply = Message(role=Role.ASSISTANT, content="" if calls else "done", tool_calls=calls)
        found.append(a_turn(at, messages=answer if at else asked, reply=reply, **changes))
    return found


def planned(place: Place, *, turns: list[Turn] | None = None, **changes: Any) -> Planned:
    """Return a session without a fault: rewards of 0 and 1 alternate in a group, and an attempt takes half a minute,
    half of it in model calls."""
    jitter = place.chance.uniform(0.8, 1.2)
    reward = changes.pop("reward", float(place.index % 2))
    calls = changes.pop("turns_made", 2)
    metrics = changes.pop("metrics", {})
    sampled = round(500 * jitter)
    fields: dict[str, Any] = {
        "stop_reason": StopReason.COMPLETED,
        "verdict": None if reward is None else Verdict(reward=reward, metrics=metrics),
        "turns": calls,
        "tokens": TokenCounts(sampled=sampled, trained=sampled),
        "seconds": StageSeconds(queued=10, init=2 * jitter, ready=1, run=20 * jitter, eval_wait=1, eval=4, stop=1),
        "model_seconds": 14 * jitter,
    }
    return Planned(fields | changes, conversation() if turns is None else turns)


def results_of(
    plan: Plan,
    *,
    groups: int,
    n: int,
    seed: int = 0,
    first: int = 0,
    tenant: str = OPERATOR_TENANT,
    labels: dict[str, str] = LABELS,
) -> list[tuple[GroupRow, list[Made]]]:
    """Return the groups of a run, oldest first, with the sessions' results and turns. `first` is the number of the
    first group."""
    found = []
    for group in range(groups):
        row = GroupRow(
            id=f"g-{first + group:05}",
            n=n,
            priority=0,
            created=START + 10 * group,
            labels=labels,
            state=GroupState.DONE,
            done=n,
            tenant=tenant,
        )
        sessions = []
        for index in range(n):
            place = Place(group, index, groups, n, Random(f"{seed} {group} {index}"))
            fields, turns, entries = plan(place)
            id = f"s-{first + group:05}-{index}"
            result = SessionResult(
                session_id=id, group_id=row.id, sample_index=index, attempt=1, labels=labels, **fields
            )
            sessions.append(Made(result, turns, entries))
        found.append((row, sessions))
    return found


def evidence_of(plan: Plan, *, groups: int = 100, n: int = 4, seed: int = 0) -> RunEvidence:
    """Return the evidence of a run, gathered as the doctor does, newest group first."""
    evidence = RunEvidence()
    sessions_by_id: dict[str, Made] = {}
    for row, sessions in reversed(results_of(plan, groups=groups, n=n, seed=seed)):
        evidence.begin_group(row)
        for made in sessions:
            evidence.add_result(made.result)
            sessions_by_id[made.result.session_id] = made
        evidence.end_group()
    for group_id, chosen in evidence.to_read():
        for session_id, _ in chosen:
            reader = FactsReader(session_id)
            for turn in sessions_by_id[session_id].turns:
                reader.add(turn)
            reader.add_commands(sessions_by_id[session_id].entries)
            evidence.add_facts(group_id, reader.facts)
    return evidence


async def put_run(store: Store, plan: Plan, **shape: Any) -> None:
    """Store a finished run; `shape` as in `results_of`."""

    async def put_session(made: Made) -> None:
        id = made.result.session_id
        attempt = await store.start_attempt(id, node="node", lease_until=1e12)
        for turn in made.turns:
            await store.add_turn(id, attempt, turn)
        if made.entries:
            entries = msgspec.msgpack.encode(made.entries)
            await store.add_timeline([TimelinePart(session_id=id, attempt=attempt, part=0, entries=entries)])
        await store.finish(id, attempt, msgspec.structs.replace(made.result, attempt=attempt))

    for row, sessions in results_of(plan, **shape):
        await store.create_group(row, b"{}", [made.result.session_id for made in sessions])
        await asyncio.gather(*map(put_session, sessions))


FAILURE = ErrorRecord(boundary=Boundary.RUNTIME, code="runtime_failure", message="the image is gone", hint="pull it")


def ending(reason: StopReason, **changes: Any) -> Callable[[float], Plan]:
    """A share of the sessions ends for this reason."""
    fields = {"stop_reason": reason} | changes
    return lambda share: lambda place: planned(place, **(fields if place.among(share) else {}))


def tokens(kind: str) -> Callable[[float], Plan]:
    """A share of the tokens of each session is of this kind, more in some sessions than in others."""

    def plan(share: float) -> Plan:
        def of(place: Place) -> Planned:
            count = round(1000 * min(1.0, share * place.chance.uniform(0.9, 1.1)))
            trained = 1000 - count if kind in ("masked", "dropped") else 1000
            return planned(place, tokens=TokenCounts(sampled=1000, trained=trained, **{kind: count}))

        return of

    return plan


def ungraded(share: float) -> Plan:
    counts = TokenCounts(sampled=1000, trained=1000)
    fields: dict[str, Any] = {"reward": None, "stop_reason": StopReason.CANCELLED}
    return lambda place: planned(place, tokens=counts, **(fields if place.among(share) else {}))


def equal_rewards(share: float) -> Plan:
    def of(place: Place) -> Planned:
        equal = place.among(share, place.group, place.groups)
        return planned(place, reward=1.0 if equal else float(place.index % 2))

    return of


def trend(kind: str, *, rise: float = 0.5, noise: float = 0.02) -> Callable[[float], Plan]:
    """The reward rises by `rise`, and the tests or tokens fall by a share, both from the first to the last third."""

    def plan(fall: float) -> Plan:
        def of(place: Place) -> Planned:
            third = 1.5 * place.late - 0.25
            done = min(1.0, max(0.0, third))
            spread = place.chance.gauss(0, 0.1)
            left = (1 - fall) ** done * exp(place.chance.gauss(0, noise))
            sampled = round(100_000 * left) if kind == "tokens" else 1000
            return planned(
                place,
                reward=0.3 + rise * done + spread,
                tokens=TokenCounts(sampled=sampled, trained=sampled),
                metrics={"tests": 1000 * left} if kind == "tests" else {},
            )

        return of

    return plan


def tool(share: float, result: str = "bash: rg: command not found\n[exit code 127]") -> Plan:
    """A share of the results of the tool `search` are failures."""

    def of(place: Place) -> Planned:
        turns = conversation(tool="search", turns=9)
        for at in range(1, 9):
            if place.among(share, 8 * place.number + at, 8 * place.groups * place.n):
                message = Message(role=Role.TOOL, content=result, tool_call_id=f"c{at - 1}")
                turns[at] = msgspec.structs.replace(turns[at], messages=(message,))
        return planned(place, turns=turns)

    return of


def commands(*ran: tuple[str, int, float], sandbox: str = "agent") -> list[Entry]:
    """Return the timeline entries of commands, given as (command line, exit code, seconds)."""
    return [
        Entry(number, EntryKind.COMMAND, line, START, START + seconds, {"sandbox": sandbox, "exit_code": code})
        for number, (line, code, seconds) in enumerate(ran)
    ]


def missing(share: float) -> Plan:
    def of(place: Place) -> Planned:
        code = 127 if place.among(share) else 0
        return planned(place)._replace(entries=commands(("/usr/bin/rg -n main", code, 0.1), ("ls -l", 1, 0.1)))

    return of


def malformed(share: float) -> Plan:
    def of(place: Place) -> Planned:
        turns = conversation(turns=10)
        if place.among(share * 10):
            reply = Message(role=Role.ASSISTANT, content="<tool_call>{")
            turns[-1] = msgspec.structs.replace(turns[-1], malformed_calls=1, reply=reply)
        return planned(place, turns=turns)

    return of


def cut_replies(share: float) -> Plan:
    return lambda place: planned(
        place, turns=conversation(finish=FinishReason.LENGTH if place.among(share) else FinishReason.STOP)
    )


def rewritten(share: float) -> Plan:
    def of(place: Place) -> Planned:
        forks = round(20 * share * place.chance.uniform(0.9, 1.1))
        return planned(place, forks={ForkCause.HISTORY_REWRITTEN.value: forks}, turns_made=20)

    return of


def stale(share: float, lag: int = 5) -> Plan:
    def of(place: Place) -> Planned:
        version = 10 + place.group // 10
        sampled = version - lag if place.among(share) else version
        at = START + 1000 * (1 + place.group) + place.index
        times = TurnTimings(received=at, first_token=at + 1, finished=at + 2)
        return planned(place, turns=conversation(versions=(VersionSpan(sampled, 0, 10),), timings=times))

    return of


def uneven(share: float) -> Plan:
    """One of three engines gets this share of the sessions. The first and the last sessions are on the other
    engines."""

    def of(place: Place) -> Planned:
        inner = 1 < place.number < place.groups * place.n - 2
        engine = "one" if inner and place.among(share) else f"other-{place.number % 2}"
        at = START + 10 * place.number
        times = TurnTimings(received=at, first_token=at + 1, finished=at + 2)
        return planned(place, turns=conversation(engine=engine, timings=times))

    return of


def slow(times: float) -> Plan:
    """One of two engines takes `times` times as long as the other."""

    def of(place: Place) -> Planned:
        engine, factor = ("one", times) if place.number % 2 else ("two", 1.0)
        seconds = 0.5 * factor * place.chance.uniform(0.8, 1.25)
        at = START + 10 * place.number
        timings = TurnTimings(received=at, first_token=at + 0.1, finished=at + seconds)
        return planned(place, turns=conversation(engine=engine, timings=timings))

    return of


def stalled(share: float, seconds: float = 60.0, usual: float = 1.0) -> Plan:
    def of(place: Place) -> Planned:
        turns = conversation(turns=4)
        waits = [usual] * 3 + [seconds if place.among(share) else usual]
        for at, wait in enumerate(waits):
            times = TurnTimings(received=START, first_token=START + wait, finished=START + wait + 1)
            turns[at] = msgspec.structs.replace(turns[at], timings=times)
        return planned(place, turns=turns)

    return of


def cache_misses(share: float) -> Plan:
    def of(place: Place) -> Planned:
        missed = share * place.chance.uniform(0.9, 1.1)
        turns = conversation(turns=3)
        for at, turn in enumerate(turns):
            kept = round((turn.prompt_length - 90) * max(0.0, 1 - missed)) if at else 0
            turns[at] = msgspec.structs.replace(turn, cached_tokens=kept)
        return planned(place, turns=turns)

    return of


def differing(share: float, line: str = "Today is 2026-11-{:02}.") -> Plan:
    """This share of the siblings have a prompt that differs from the prompt of the sibling before."""

    def of(place: Place) -> Planned:
        first = place.group * (place.n - 1)
        changes = sum(place.among(share, first + at, place.groups * (place.n - 1)) for at in range(place.index))
        system = f"{SYSTEM}\n{line.format(1 + changes)}\nBe brief."
        return planned(place, turns=conversation(system=system))

    return of


def changing(share: float) -> Plan:
    """The system prompt changes in the second turn of this share of the sessions."""

    def of(place: Place) -> Planned:
        before, after = (f"{SYSTEM}\nWorking directory: /work/{name}" for name in ("a", "b"))
        turns = conversation(system=before)
        if place.among(share):
            messages = (Message(role=Role.SYSTEM, content=after), *turns[0].messages[1:])
            turns[1] = msgspec.structs.replace(
                turns[1],
                parent=None,
                join=JoinKind.FORK,
                cause=ForkCause.SYSTEM_CHANGED,
                forked_from=0,
                messages=messages,
            )
        return planned(place, turns=turns)

    return of


def time_in(stage: str) -> Callable[[float], Plan]:
    """A share of the time of each session goes into one stage."""

    def plan(share: float) -> Plan:
        def of(place: Place) -> Planned:
            own = 100 * min(1.0, share * place.chance.uniform(0.95, 1.05))
            run = 100 - own
            if stage == "tools":
                return planned(place, seconds=StageSeconds(run=100.0), model_seconds=run)
            return planned(place, seconds=StageSeconds(**{"run": run, stage: own}), model_seconds=run)

        return of

    return plan


class Pair(NamedTuple):
    """The test runs of a rule. `plan` returns a plan for a size of the fault. The rule must find a fault of size
    `fault` and must not report one of size `sound`. The runs have `groups` groups with `n` sessions each. `most` is the
    size of the fault in a run with too few units."""

    plan: Callable[[float], Plan]
    fault: float
    sound: float
    groups: int = 100
    n: int = 4
    most: float = 1.0


PAIRS: Mapping[str, Pair] = {
    "errors": Pair(ending(StopReason.ERROR, error=FAILURE, reward=None), 0.12, 0.07),
    "timeouts": Pair(ending(StopReason.AGENT_TIMEOUT), 0.2, 0.12),
    "sessions cut short": Pair(ending(StopReason.MAX_TURNS), 0.3, 0.22),
    "programs that fail": Pair(ending(StopReason.NONZERO_EXIT), 0.3, 0.22),
    "equal rewards": Pair(equal_rewards, 0.85, 0.72, groups=300, n=2),
    "fewer tests, more reward": Pair(trend("tests"), 0.16, 0.08, groups=60, most=0.9),
    "shorter answers, more reward": Pair(trend("tokens", noise=0.1), 0.6, 0.45, groups=60, most=0.95),
    "tools that never work": Pair(tool, 1.0, 0.93, groups=5, n=3),
    "missing programs": Pair(missing, 0.3, 0.22),
    "malformed calls": Pair(malformed, 0.08, 0.04, most=0.1),
    "replies cut off": Pair(cut_replies, 0.2, 0.12),
    "drift": Pair(ending(StopReason.COMPLETED, tokens=TokenCounts(sampled=10, trained=10, drift=3)), 0.06, 0.03),
    "rewritten histories": Pair(rewritten, 0.3, 0.16),
    "unsure branches": Pair(tokens("unsure"), 0.15, 0.08),
    "untrained tokens": Pair(tokens("dropped"), 0.5, 0.3),
    "tokens without a reward": Pair(ungraded, 0.3, 0.22),
    "stale sessions": Pair(stale, 0.3, 0.22, most=0.9),
    "uneven engines": Pair(uneven, 0.75, 0.62, most=0.95),
    "slow engine": Pair(slow, 3.0, 1.8, most=9.0),
    "stalled calls": Pair(stalled, 0.12, 0.07),
    "cache misses": Pair(cache_misses, 0.6, 0.4),
    "prompts that differ": Pair(differing, 0.65, 0.5),
    "prompts that change": Pair(changing, 0.3, 0.22),
    "time spent waiting": Pair(time_in("eval_wait"), 0.6, 0.4),
    "time spent preparing": Pair(time_in("init"), 0.5, 0.35),
    "time spent grading": Pair(time_in("eval"), 0.6, 0.45),
    "time spent in tools": Pair(time_in("tools"), 0.85, 0.7),
}
