"""Agents that react to delays which `test_silence` does not cover: pauses of the policy, and large requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from outrider.errors import HarnessError
from outrider.harnesses.base import HarnessContext, HarnessOutcome, ProgramExit
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role

from .conftest import MakeWorld
from .test_silence import Silence, honest, settled, some_time, warm
from .world import SAY, World, result_of


class Patient:
    """An agent that sends a short request and, 3 s after the reply, one of `size` characters. If there is no reply
    within `patience` seconds, the agent ends without an error."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._patience: float = options["patience"]
        self._size: int = options["size"]

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        url = context.endpoint.base_url + "/v1/chat/completions"
        said = [{"role": "user", "content": "go"}]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {context.endpoint.api_key}"}) as http:
            for content in ("a", "a" * self._size):
                said.append({"role": "user", "content": content})
                call = asyncio.ensure_future(self._ask(http, url, {"model": "m", "messages": said}))
                await asyncio.wait([call], timeout=self._patience)
                if not call.done():
                    call.cancel()
                    await asyncio.wait([call])
                    return HarnessOutcome(log_tail="gave up")
                call.result()
                await asyncio.sleep(3)
        return HarnessOutcome(answer="done")

    async def _ask(self, http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
        headers = {"content-type": "application/json"}
        async with http.post(url, data=BytesIO(json.dumps(body).encode()), headers=headers) as reply:
            if reply.status != 200:
                raise HarnessError(await reply.text())


async def assert_earned(world: World, group_id: str) -> None:
    for session in (await world.done(group_id)).sessions:
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
        assert result.verdict is not None
        assert result.verdict.reward == 1.0


def task_of(size: int) -> dict[str, Any]:
    """Return the task of a `Patient` agent. The limits are wide, because the test's clock is faster than the
    machine's."""
    return honest({}, 60) | {
        "harness": {"agent": f"{__name__}:Patient", "options": {"patience": 6.0, "size": size}},
        "limits": {"agent_seconds": 200.0, "session_seconds": 800.0},
    }


UNHURRIED = 2.0
"""Speed of the test's clock while an agent waits for something that is not delayed. The agent's patience must be longer
than a busy machine needs for a large request."""


async def first_answer(w: World, asked: int) -> None:
    """Wait until the agent's first request is answered. The second request comes later."""
    while len(w.engine.requests) == asked:
        await some_time(0.1, times=UNHURRIED)
    await some_time(0.5, times=UNHURRIED)


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["abort", "finish"])
async def test_a_pause_of_the_policy_is_charged_to_no_agent(world: MakeWorld, mode: Any) -> None:
    async with world([SAY], http=True) as w:
        await warm(w)
        asked = len(w.engine.requests)
        submitted = await w.submit(**task_of(10))
        await first_answer(w, asked)
        await w.service.pool.policy.pause(mode)
        await some_time(20)
        await w.service.pool.policy.resume()
        await settled(w, submitted.id, 400, times=UNHURRIED)
        await assert_earned(w, submitted.id)
        w.assert_quiet()


@pytest.mark.deep
async def test_a_large_request_that_is_given_up_before_it_was_read_is_no_grade(world: MakeWorld) -> None:
    async with world([SAY], script={"context_tokens": 4_000_000}, http=True) as w:
        await warm(w)
        asked = len(w.engine.requests)
        submitted = await w.submit(**task_of(1 << 20))
        await first_answer(w, asked)
        silence = Silence(w, "engine is away")
        w.service.pool.health.look("scripted")
        await some_time(20)
        silence.heal()
        await settled(w, submitted.id, 400, times=UNHURRIED)
        await assert_earned(w, submitted.id)
        w.assert_quiet()


@pytest.mark.deep
async def test_large_turns_side_by_side_do_not_make_the_store_look_slow(world: MakeWorld) -> None:
    """The store needs time for an agent's large turns. This time is no reason to repeat a failed run."""
    async with world([SAY], script={"context_tokens": 4_000_000}) as w:
        store: Any = w.service.store
        keep, writer = store.add_turn, asyncio.Lock()

        async def add_turn(session: str, attempt: int, turn: Any, **more: Any) -> None:
            async with writer:
                await asyncio.sleep(1e-6 * sum(len(message.content) for message in turn.messages))
                await keep(session, attempt, turn, **more)

        store.add_turn = add_turn
        task = honest({}, 3) | {"harness": {"agent": f"{__name__}:Lavish"}}
        submitted = await w.submit(**task)
        await settled(w, submitted.id, 400)
        [session] = (await w.done(submitted.id)).sessions
        assert (result_of(session).attempt, result_of(session).stop_reason) == (1, StopReason.NONZERO_EXIT)


class Lavish:
    """An agent that sends six large messages at once and then fails."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        said = [[Message(role=Role.USER, content=f"{number} " + "a " * 400_000)] for number in range(6)]
        await asyncio.gather(*map(context.model.chat, said))
        raise ProgramExit("it failed", exit_code=1, hint="", log_tail="")
