"""The processes of a machine that joins a service."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.config import Config
from outrider.errors import Forbidden, NotFound, OutriderError, Unauthorized
from outrider.nodes.joining import JoiningMachine
from outrider.nodes.messages import Ready
from outrider.sessions.resources import Capacity
from outrider.wire.link import Disconnected
from outrider.wire.link_protocol import encode


class Process:
    """A process of a node that says `words` to the program that has started it, and then exits."""

    def __init__(self, *words: Ready) -> None:
        self.pipe = self
        self._words = [encode(word) for word in words]

    async def send(self, frame: bytes) -> None:
        """Nobody reads the orders."""

    async def receive(self) -> bytes:
        if not self._words:
            raise Disconnected(1006)
        return self._words.pop(0)


def refused(error: OutriderError) -> Process:
    return Process(Ready(error=error.record()))


async def live(machine: JoiningMachine, process: Process) -> None:
    await machine._live(machine._joins[0], cast(Any, process))


@pytest.mark.parametrize("error", [Forbidden("403"), NotFound("404")])
async def test_a_proxy_that_knows_no_service_for_a_while_does_not_make_a_machine_leave(error: OutriderError) -> None:
    """A process that is started while the service restarts gets the reply of a reverse proxy. If a process of the
    machine was accepted before, the machine stays."""
    machine = JoiningMachine(
        Config(processes=1),
        Capacity(cpus=1.0, memory_mb=1024),
        url="http://127.0.0.1:9",
        token=None,
        ca=None,
        name="far",
        joined=lambda _: None,
    )
    await live(machine, refused(error))
    assert machine._refusal is not None, "the address or the token is wrong"
    machine._refusal = None
    await live(machine, Process(Ready()))
    await live(machine, refused(error))
    assert machine._refusal is None
    await live(machine, refused(Unauthorized("the token was revoked")))
    assert machine._refusal is not None
