"""Nodes on other machines, as the service has them: they dial in, and stay while they are heard of.

It knows no HTTP. Invariants: there is one node of a name; one that has not been heard of for SILENCE_SECONDS is given
up, its attempts are run elsewhere, and its process is told so when it comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from importlib.metadata import version
from types import TracebackType
from typing import Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.config import Config
from outrider.engines.relay.link import Disconnected, Socket
from outrider.engines.relay.messages import Close, close_reason, encode
from outrider.errors import ErrorRecord
from outrider.nodes.elsewhere import host_id, setup_elsewhere
from outrider.nodes.messages import HELLO, Hello, Welcome
from outrider.nodes.remote_node import RemoteNode, ServiceParts
from outrider.nodes.resumable import ResumableSocket
from outrider.nodes.telling import Telling
from outrider.sessions.attempt import Node
from outrider.sessions.resources import Capacity, NodeResources

log = logging.getLogger("outrider.node")

HELLO_SECONDS = 10.0
FINAL = frozenset({Close.LEFT, Close.NONSENSE})
"""Ends of a connection after which none follows."""


class JoinedNodes:
    """`async with JoinedNodes(...) as joined`: within the block nodes may `attend`. `own` are the names of the
    service's own nodes, which none of these may have."""

    def __init__(self, config: Config, parts: ServiceParts, telling: Telling, *, own: Collection[str]) -> None:
        self.added: Callable[[Node], None] = lambda _: None
        """Called with each node that begins to run attempts."""
        self.removed: Callable[[Node], None] = lambda _: None
        """Called with each that does so no more."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when one can take more sessions than before."""
        self._config = config
        self._version = version("outrider")
        self._parts = parts
        self._telling = telling
        self._own = own
        self._members: dict[str, Member] = {}
        self._machines: dict[str, NodeResources] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members.values():
            member.serving.cancel()
        await shielded(lambda: self._tasks.__aexit__(None, None, None))

    async def attend(self, name: str, socket: Socket) -> None:
        """Have the node at the other end of a new connection, until that ends."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = HELLO.decode(await socket.receive())
        except TimeoutError:
            await socket.close(Close.SILENT, "no hello of a node came in time")
            return
        except (Disconnected, msgspec.DecodeError) as error:
            await socket.close(Close.NONSENSE, close_reason(f"no hello of a node: {error}"))
            return
        if hello.version != (ours := self._version):
            reason = f"the node runs Outrider {hello.version}, the service {ours}"
            await socket.close(Close.PROTOCOL, close_reason(reason))
            return
        while (member := self._members.get(name)) is None or member.hello.instance != hello.instance:
            if hello.received:
                await socket.close(Close.REMOVED, "the service has given this node up")
                return
            # Only the machine that it was on may replace a node, and only one that is not there any more. One that has
            # not begun has nothing to come back for: its machine may have died, and be another one to us since.
            if name in self._own or (
                member is not None and (member.connected or (member.begun and member.hello.machine != hello.machine))
            ):
                await socket.close(Close.CONFLICT, close_reason(f"there is a node {name!r} already"))
                return
            if member is None:
                member = self._admit(name, hello)
                break
            await member.ended("it was started again")  # others may have waited for that, too: look again
        await member.carry(socket, hello.received)

    def _admit(self, name: str, hello: Hello) -> Member:
        resources = self._machines.setdefault(hello.machine, NodeResources(hello.capacity))
        parts = msgspec.structs.replace(self._parts, resources=resources)
        node = RemoteNode(name, hello.machine, parts, elsewhere=hello.host != host_id())
        node.on_room = self.on_room
        member = Member(node, hello)
        self._members[name] = member
        member.serving = self._tasks.create_task(self._serve(member, resources.capacity), name=f"node {name}")
        return member

    async def _serve(self, member: Member, capacity: Capacity) -> None:
        node = member.node

        def ready(error: ErrorRecord | None) -> None:
            if error is not None:
                log.error("node %s cannot run sessions: %s", node.name, error.message)
                return
            log.info("node %s has joined", node.name)
            member.begun = True
            self._telling.nodes.append(node)
            for model, pool in self._parts.pools.items():  # what has changed since its first message
                node.tell(model, pool.state())
            self.added(node)

        async def ended() -> None:
            if node in self._telling.nodes:
                self._telling.nodes.remove(node)
                self.removed(node)

        how: object = "the service ends"
        try:
            setup = await asyncio.to_thread(setup_elsewhere, self._config, node.name, capacity)
            how = await node.serve(member.socket, setup, ready=ready, ended=ended, heard=lambda: member.socket.heard)
        except Exception as error:  # a bug, which must not end the service
            log.exception("node %s failed", node.name)
            how = error
        finally:
            log.info("node %s has left: %s", node.name, how)
            member.drop()
            if self._members.get(node.name) is member:
                del self._members[node.name]
            if all(other.node.machine != node.machine for other in self._members.values()):
                self._machines.pop(node.machine, None)


class Member:
    """A node that has joined, and the connections that it has now: another one may have come before the loss of the
    first was noticed."""

    def __init__(self, node: RemoteNode, hello: Hello) -> None:
        self.node = node
        self.hello = hello
        self.begun = False
        """Whether it has run attempts."""
        self.socket = ResumableSocket()
        self._connections = 0
        self.serving: asyncio.Task[None]

    @property
    def connected(self) -> bool:
        return self._connections > 0

    async def carry(self, socket: Socket, arrived: int) -> None:
        """Work over a connection until it ends."""
        replaced = self.socket.take_over()
        self._connections += 1
        self.node.set_reachable(True)
        try:
            await socket.send(encode(Welcome(self.socket.received)))
            end = await self.socket.carry(socket, arrived, replaced)
        except Disconnected as error:
            end = error
        finally:
            self._connections -= 1
            self.node.set_reachable(self.connected)
        if end.code in FINAL:
            self.socket.end(end)
        elif not self.serving.done():
            log.info("the connection of node %s is gone: %s", self.node.name, end)

    async def ended(self, why: str) -> None:
        """Give the node up; returns when nothing of it is left."""
        self.socket.end(Disconnected(Close.REMOVED, why))
        await asyncio.wait([self.serving])

    def drop(self) -> None:
        """Nothing more is said to it."""
        self.socket.take_over()
