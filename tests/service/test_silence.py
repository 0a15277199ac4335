"""A silence of the engine or the store never becomes a grade, however the agent reacts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from outrider.engines.pool.waits import KNOWN_CALLS
from outrider.errors import EngineError, HarnessError, RequestError, ServiceError
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from support.clock import pass_time

from .conftest import MakeWorld
from .world import SAY, World, result_of

CALLS = 3
CLIENTS = {
    "waits": {},
    "gives up and leaves": {"patience": 4.0, "then": "leave"},
    "gives up soon and leaves": {"patience": 1.5, "then": "leave"},
    "gives up and fails": {"patience": 4.0, "then": "fail"},
    "asks thrice": {"patience": 1.5, "tries": 3, "then": "leave"},
    "leaves the call behind": {"patience": 4.0, "then": "walk away"},
}
QUICK = ("waits", "asks thrice")
SILENCES = ("engine hangs", "engine hangs in a reply", "engine is away", "store is silent", "store fails")


class Honest:
    """An agent that finishes its work after CALLS model calls. Options: `patience`, the seconds in which a call must be
    answered; `tries`, the number of calls for one reply; `then`, the agent's reaction if there is no reply; `rests`,
    the seconds between calls."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._patience: float | None = options.get("patience")
        self._tries: int = options.get("tries", 1)
        self._then: str = options.get("then", "leave")
        self._rests: float = options.get("rests", 0.0)

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        messages = [Message(role=Role.USER, content=context.task.instruction)]
        for _ in range(CALLS):
            reply = await self._reply(context, messages)
            if reply is None:
                if self._then == "fail":
                    raise HarnessError("the model did not answer")
                return HarnessOutcome(log_tail="gave up")
            messages += [reply, Message(role=Role.USER, content="go on")]
            await asyncio.sleep(self._rests)
        return HarnessOutcome(answer="done")

    async def _reply(self, context: HarnessContext, messages: list[Message]) -> Message | None:
        for _ in range(self._tries):
            call = asyncio.ensure_future(context.model.chat(messages))
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([call], timeout=self._patience)
            if call.done():
                try:
                    return call.result()
                except (EngineError, RequestError, ServiceError):
                    continue
            if self._then == "walk away":
                return None
            call.cancel()
            await asyncio.wait([call])
        return None


async def did_it(outcome: Outcome) -> float:
    """Return 1 if the work was done. An honest agent does its work unless something prevents it."""
    return 1.0 if outcome.harness.answer == "done" else 0.0


def honest(client: Mapping[str, Any], attempts: int = 1) -> dict[str, Any]:
    """Return the task of an honest agent."""
    return {
        "harness": {"agent": "service.test_silence:Honest", "options": dict(client)},
        "evaluator": {"kind": "callable", "path": "service.test_silence:did_it"},
        "limits": {"agent_seconds": 10.0 + 3 * client.get("rests", 0.0), "session_seconds": 60.0},
        "max_attempts": attempts,
    }


async def settled(world: World, group_id: str, seconds: float, *, times: float = 20.0) -> None:
    """Advance the test's clock until the group is done, by at most `seconds`. The clock is `times` times as fast as the
    machine's."""
    done = asyncio.ensure_future(world.done(group_id))
    while not done.done():
        assert seconds > 0
        seconds -= 0.5
        await some_time(0.5, times=times)
    await done


async def all_earned(world: World, group_id: str) -> None:
    """Check that every session of the group completes with the reward that its agent has earned."""
    await settled(world, group_id, 400)
    for session in (await world.done(group_id)).sessions:
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
        assert result.verdict is not None
        assert result.verdict.reward == 1.0


async def some_time(seconds: float, *, times: float = 20.0) -> None:
    """Advance the test's clock, `times` times as fast as the machine's, so that the store has time for its work."""
    await pass_time(seconds, step=0.04, real_step=0.04 / times)


async def warm(world: World) -> None:
    """Run sessions until the engine's pace is known."""
    for _ in range(-(-KNOWN_CALLS // CALLS)):
        await world.run(**honest({}))


class Silence:
    """An engine or a store that is silent or away until `heal` is called."""

    def __init__(self, world: World, kind: str) -> None:
        self._engine = world.engine
        self._heard = asyncio.Event()
        store: Any = world.service.store
        keep = store.add_turn
        match kind:
            case "engine hangs" | "engine hangs in a reply":
                self._engine.hang()
            case "engine is away":
                self._engine.kill()
            case _:

                async def add_turn(*args: Any, **more: Any) -> None:
                    if not self._heard.is_set():
                        if kind == "store fails":
                            raise ServiceError("the store is away")
                        await self._heard.wait()
                    await keep(*args, **more)

                store.add_turn = add_turn

    def heal(self) -> None:
        self._heard.set()
        self._engine.revive()


@pytest.mark.parametrize(
    ("client", "kind", "seconds"),
    [
        pytest.param(client, kind, seconds, marks=pytest.mark.deep if client in QUICK else pytest.mark.nightly)
        for seconds in (5, 45)
        for kind in SILENCES
        for client in CLIENTS
    ],
)
async def test_an_honest_agent_is_never_graded_for_it(world: MakeWorld, client: str, kind: str, seconds: float) -> None:
    in_reply = kind == "engine hangs in a reply"
    async with world([SAY, {"reply": SAY, "when": "stall here", "stall": 1}]) as w:
        await warm(w)
        silence = None if in_reply else Silence(w, kind)
        submitted = await w.submit(n=3, instruction="stall here" if in_reply else "go", **honest(CLIENTS[client], 60))
        if silence is None:
            await w.engine.stalled.wait()
            silence = Silence(w, kind)
            w.engine.release()
        await some_time(seconds)
        silence.heal()
        await settled(w, submitted.id, 400)
        for session in (await w.done(submitted.id)).sessions:
            result = result_of(session)
            if kind == "store fails" and result.error is not None:  # each attempt failed at once, so all were used up
                assert result.verdict is None
                continue
            assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
            assert result.verdict is not None
            assert result.verdict.reward == 1.0
        w.assert_quiet()


@pytest.mark.deep
@pytest.mark.parametrize("client", CLIENTS)
async def test_what_stays_silent_ends_in_an_error_and_never_in_a_grade(world: MakeWorld, client: str) -> None:
    async with world([SAY]) as w:
        await warm(w)
        w.engine.hang()
        submitted = await w.submit(n=2, **honest(CLIENTS[client], 2))
        await settled(w, submitted.id, 900)
        for session in (await w.done(submitted.id)).sessions:
            result = result_of(session)
            assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
            assert result.error is not None
            assert result.error.boundary == "engine"
        w.engine.revive()
        w.assert_quiet()


async def test_an_agent_that_leaves_a_call_which_would_be_answered_is_graded(world: MakeWorld) -> None:
    """The agent's patience is so short that no reply was overdue: it gave up the call for its own reasons."""
    async with world([SAY, {"reply": SAY, "when": "stall here", "stall": 1}]) as w:
        await warm(w)
        submitted = await w.submit(instruction="stall here", **honest({"patience": 0.9}))
        await settled(w, submitted.id, 60)
        [session] = (await w.done(submitted.id)).sessions
        verdict = result_of(session).verdict
        assert verdict is not None
        assert verdict.reward == 0.0


def drip(engine: Any, seconds: float) -> None:
    """From now on, the engine sends a chunk every `seconds` seconds. With 0 it is as fast as usual."""
    usual = type(engine).generate

    async def generate(request: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(usual(engine, request)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(seconds)
                yield chunk

    engine.generate = generate if seconds else partial(usual, engine)


@pytest.mark.deep
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_silence_before_the_pace_is_known(world: MakeWorld, client: str) -> None:
    """The first silence does not become the engine's usual pace, although many calls end with it. So the next silence
    counts as a silence, too."""
    async with world([SAY]) as w:
        silence = Silence(w, "engine hangs")
        groups = [await w.submit(n=8, **honest({}, 60))]
        await some_time(30)
        silence.heal()
        await settled(w, groups[0].id, 400)
        replies = len(w.engine.requests)
        groups.append(await w.submit(n=3, **honest(CLIENTS[client] | {"rests": 5.0}, 60)))
        while len(w.engine.requests) < replies + 3:
            await some_time(0.5)
        silence = Silence(w, "engine hangs")
        await some_time(20)
        silence.heal()
        for submitted in groups:
            await all_earned(w, submitted.id)
        w.assert_quiet()


@pytest.mark.deep
@pytest.mark.parametrize(("earlier", "client"), [(True, "waits"), *((False, client) for client in CLIENTS)])
async def test_an_engine_that_drips_when_the_service_starts(world: MakeWorld, earlier: bool, client: str) -> None:
    """All calls of this service are slow. They are compared with the pace that an earlier service stored, or else with
    an assumed pace."""
    if earlier:
        async with world([SAY]) as w:
            await warm(w)
            async with asyncio.timeout(20):
                while not await w.service.store.engine_paces():
                    await some_time(0.5)
    async with world([SAY]) as w:
        drip(w.engine, 4.0)
        groups = [await w.submit(n=2, **honest(CLIENTS[client], 60))]
        for _ in range(4 * earlier):
            await some_time(15)
            groups.append(await w.submit(n=2, **honest(CLIENTS[client], 60)))
        await some_time(15)
        drip(w.engine, 0.0)
        for submitted in groups:
            await all_earned(w, submitted.id)
        w.assert_quiet()
