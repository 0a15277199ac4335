"""A whole service whose store is a PostgreSQL database."""

from __future__ import annotations

import asyncio
import signal

import pytest

from outrider.errors import ServiceError
from outrider.lifecycle import StopReason
from outrider.store.postgresql import PostgresqlDatabase
from outrider.store.store import Store
from support.postgresql import PostgresqlServer

from .conftest import MakeWorld
from .test_restart import assert_nothing_twice, done_events, finish_all
from .world import result_of


@pytest.mark.deep
async def test_it_is_stopped_in_the_middle_and_started_again(world: MakeWorld, postgresql: PostgresqlServer) -> None:
    url = await postgresql.new_database()
    async with world(store=url) as w:
        first = await w.done((await w.submit("ask", n=2)).id, samples=True)
        await w.submit("ask", "wait door", "ask", n=10)
        await w.submit("ask", verdicts=["wait never"])
        await w.stage.arrived["door"].wait()
        with pytest.raises(ServiceError, match="another service"):
            async with Store(PostgresqlDatabase(url, sole=True, patience=0.0)):
                pass
    async with world(store=url) as w:
        groups = await finish_all(w, 3)
        assert groups[0] == first
        for group in groups:
            assert [result_of(session).stop_reason for session in group.sessions] == [StopReason.COMPLETED] * group.n
        assert_nothing_twice(groups, await done_events(w))


@pytest.mark.deep
async def test_no_session_notices_a_restart_of_the_server(world: MakeWorld, postgresql: PostgresqlServer) -> None:
    """Some sessions wait in their agents, one in its grader. The server is down when they go on."""
    async with world(store=await postgresql.new_database()) as w:
        await w.submit("ask", "wait door", "ask", n=4)
        await w.submit("ask", verdicts=["wait hall"])
        await w.stage.arrived["door"].wait()
        await w.stage.arrived["hall"].wait()
        for ending in (signal.SIGKILL, signal.SIGINT):
            postgresql.kill(ending)
            w.stage.open["door" if ending is signal.SIGKILL else "hall"].set()
            for _ in range(100):  # time in which the sessions find no server
                await asyncio.sleep(0)
            postgresql.start()
        groups = await finish_all(w, 2)
        for session in (session for group in groups for session in group.sessions):
            assert (result_of(session).attempt, result_of(session).stop_reason) == (1, StopReason.COMPLETED)
        assert_nothing_twice(groups, await done_events(w))
        w.assert_quiet()
