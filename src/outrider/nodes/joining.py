"""The processes of this machine that join a service on another machine.

Each process has its own connection (`dialling.py`). Invariant: a process that exits is started again until the machine
leaves the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from outrider.concurrency.cancellation import shielded
from outrider.config import Config
from outrider.errors import ErrorRecord, Forbidden, InvalidField, NotFound, error_from
from outrider.nodes.messages import TO_STARTER, Join, LeaveService
from outrider.nodes.processes import setup_of
from outrider.nodes.spawning import NodeProcess, one_after_another
from outrider.sessions.resources import Capacity
from outrider.wire.link import Disconnected
from outrider.wire.link_protocol import encode


class JoiningMachine:
    """A machine that joins the service at `url`. `await machine.run(...)` keeps `config.processes` node processes
    running. A single process is called `name`; several processes are called `name` with a number appended. `joined` is
    called with the name of each process that has joined."""

    def __init__(
        self,
        config: Config,
        capacity: Capacity,
        *,
        url: str,
        token: str | None,
        ca: str | None,
        name: str,
        joined: Callable[[str], None],
    ) -> None:
        if not config.processes:
            raise InvalidField("a machine without processes runs no sessions", field="processes")
        machine = uuid4().hex
        names = [name] if config.processes == 1 else [f"{name}-{number}" for number in range(config.processes)]
        self._joins = [
            Join(
                url=url,
                token=token,
                ca=ca,
                machine=machine,
                own=setup_of(config, each, number, capacity),
            )
            for number, each in enumerate(names)
        ]
        self._joined = joined
        self._processes: dict[str, NodeProcess] = {}
        self._refusal: ErrorRecord | None = None
        self._accepted = False
        """True once the service has accepted a process of this machine."""
        self._leaving = asyncio.Event()

    async def run(self, stop: Callable[[], Coroutine[Any, Any, object]], *, seconds: float) -> None:
        """Run the processes until `stop()` returns. After that they take no new sessions, and running sessions have
        `seconds` seconds to end. If the service refuses this machine, raises the service's error."""
        clock = asyncio.get_running_loop().time
        tasks = asyncio.TaskGroup()
        await tasks.__aenter__()
        stopping = tasks.create_task(stop())
        lives = [
            tasks.create_task(
                one_after_another(
                    join.own.name,
                    partial(self._live, join),
                    lambda _: self._refusal is None and not self._leaving.is_set(),
                )
            )
            for join in self._joins
        ]
        end: float | None = None
        try:
            while any(not life.done() for life in lives) and self._refusal is None and (end is None or clock() < end):
                awaited = [life for life in lives if not life.done()] + ([stopping] if end is None else [])
                left = None if end is None else end - clock()
                await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done() and end is None:
                    end = clock() + seconds
                    self._leaving.set()
                    for process in list(self._processes.values()):
                        with suppress(Disconnected):
                            await process.pipe.send(encode(LeaveService()))
        finally:
            for task in (stopping, *lives):
                task.cancel()
            await shielded(lambda: tasks.__aexit__(None, None, None))
        if self._refusal is not None:
            raise error_from(self._refusal)

    async def _live(self, join: Join, process: NodeProcess) -> None:
        """Exchange messages with a process until the process closes its pipe, or until the service refuses the
        machine."""
        name = join.own.name
        self._processes[name] = process
        try:
            if self._leaving.is_set():
                return
            await process.pipe.send(encode(join))
            while True:
                ready = TO_STARTER.decode(await process.pipe.receive())
                if ready.error is not None:
                    # These two may be the reply of a reverse proxy (see PROXY_STATUSES in wire/link_protocol.py). Then
                    # another process tries again.
                    if not (self._accepted and ready.error.code in (Forbidden.code, NotFound.code)):
                        self._refusal = ready.error
                    return
                self._accepted = True
                self._joined(name)
                if self._leaving.is_set():  # the machine began to leave before this process had joined
                    await process.pipe.send(encode(LeaveService()))
        except Disconnected:
            pass
        finally:
            del self._processes[name]
