"""A storm: many groups with every kind of fate, some cancelled at random, and the checks after the groups' end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.errors import EngineUnavailable
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import GroupView
from outrider.spec import GroupSpec
from outrider.trajectory import SessionResult, unpack_ids

from .world import SAY, World, result_of

Fate = Callable[[random.Random], GroupSpec]

RULES = (
    {"when": "reject this", "fail": "rejected"},
    {"when": "break off", "reply": SAY, "fail": "unavailable", "after": 1},
    {"when": "never end", "reply": SAY, "stall": 1},
    SAY,
)
GRADED = frozenset(
    {
        StopReason.COMPLETED,
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.CONTEXT_OVERFLOW,
        StopReason.AGENT_TIMEOUT,
        StopReason.NONZERO_EXIT,
        StopReason.AGENT_EXCESS,
    }
)


class FlakyEngine(ScriptedEngine):
    """An engine that fails in `percent` percent of its generations: half of these fail before the first token, the
    other half after it."""

    def __init__(self, name: str, tokenizer: Path, *, seed: int, percent: float) -> None:
        super().__init__(EngineOptions(name=name, tokenizer=str(tokenizer), options={"replies": list(RULES)}))
        self._random = random.Random(seed)
        self._percent = percent

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        drawn = self._random.uniform(0, 100)
        if drawn < self._percent / 2:
            raise EngineUnavailable(f"engine {self.name!r} was gone before the first token")
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if drawn < self._percent and chunk.finish is None:
                    raise EngineUnavailable(f"engine {self.name!r} went away after a token")


async def add_engines(world: World, tokenizer: Path, count: int, *, percent: float) -> None:
    """Replace the world's engine with `count` flaky engines."""
    for number in range(count):
        engine = FlakyEngine(f"flaky-{number}", tokenizer, seed=number, percent=percent)
        await world.service.pool.add_engine(engine)
    await world.service.pool.remove(world.engine.name)


def draw(rng: random.Random, fates: Sequence[Fate], sessions: int) -> list[GroupSpec]:
    """Return groups with `sessions` sessions in total: one group of every fate, then groups of random fates."""
    groups: list[GroupSpec] = []
    sizes = tuple(size for size in (1, 2, 4, 8, 16) if size <= sessions / len(fates) / 1.5)
    while (left := sessions - sum(spec.n for spec in groups)) > 0:
        fate = fates[len(groups)] if len(groups) < len(fates) else rng.choice(fates)
        size = min(left, rng.choice(sizes))
        groups.append(fate(rng).model_copy(update={"n": size, "priority": rng.randint(-3, 3)}))
    return groups


async def unleash(
    world: World, rng: random.Random, groups: Sequence[GroupSpec], *, spared: int, cancelled: float, within: float
) -> list[GroupView]:
    """Run all groups and return their views in result order. Each group after the first `spared` is cancelled with
    probability `cancelled`, at a random moment of the first `within` seconds."""
    drawn = [rng.uniform(0, within) if rng.random() < cancelled else None for _ in groups]
    moments = [None] * spared + drawn[spared:]

    async def submit(spec: GroupSpec, moment: float | None) -> None:
        view = await world.service.submit(spec)
        if moment is not None:
            await asyncio.sleep(moment)
            await world.service.cancel(view.id)

    async with asyncio.TaskGroup() as tasks:
        for spec, moment in zip(groups, moments, strict=True):
            tasks.create_task(submit(spec, moment))
        seen: list[GroupView] = []
        while len(seen) < len(groups):
            page = await world.service.results(after=len(seen), wait=30, limit=50, samples=True)
            seen += page.groups
    return seen


async def assert_over(world: World, groups: Sequence[GroupSpec], views: Sequence[GroupView]) -> Counter[str]:
    """Check that nothing is held and nothing is lost. Returns the number of sessions for each ending; errors are
    counted by their code."""
    sessions = sum(spec.n for spec in groups)
    world.assert_quiet()
    assert list(world.node.gateway_socket.parent.glob("s-*")) == []
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("session ")] == []
    assert [view.cursor for view in views] == list(range(1, len(groups) + 1))
    assert {view.state for view in views} == {GroupState.DONE}
    counts = await world.service.store.counts()
    assert {state: count for state, count in counts.items() if count} == {SessionState.DONE: sessions}
    await assert_told_once(world, views)
    endings: Counter[str] = Counter()
    for view in views:
        samples = {session.id: 0 for session in view.sessions}
        trained = dict(samples)
        for sample in view.samples or ():
            samples[sample.session_id] += 1
            trained[sample.session_id] += sum(sample.loss_mask)
            verdict = result_of(view.sessions[sample.sample_index]).verdict
            assert sample.reward == (verdict.reward if verdict else None)
        for session in view.sessions:
            result = result_of(session)
            assert_ended_well(result)
            assert (result.samples, result.tokens.trained) == (samples[session.id], trained[session.id])
            turns = await world.service.store.turns(session.id, result.attempt) if result.turns else []
            assert sum(len(unpack_ids(turn.output_ids)) for turn in turns) == result.tokens.sampled
            endings[result.error.code if result.error else result.stop_reason.value] += 1
    assert endings.total() == sessions
    return endings


async def assert_told_once(world: World, views: Sequence[GroupView]) -> None:
    """Check that the event log has one end for every session and every group."""
    told: Counter[tuple[str, str | None]] = Counter()
    after = 0
    while events := await world.service.store.events(after=after, limit=5000):
        after = events[-1].cursor
        told.update((event.kind, event.session_id or event.group_id) for event in events if event.kind.endswith("done"))
    expected = [("session.done", session.id) for view in views for session in view.sessions]
    expected += [("group.done", view.id) for view in views]
    assert told == Counter(expected)


def assert_ended_well(result: SessionResult) -> None:
    tokens = result.tokens
    assert tokens.sampled == tokens.trained + tokens.masked + tokens.dropped
    assert tokens.drift == 0
    assert (result.verdict is not None) == (result.stop_reason in GRADED)
    assert (result.error is not None) == (result.stop_reason is StopReason.ERROR)
