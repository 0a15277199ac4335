"""The service's side of nodes on other machines. Such a node opens the connection, and remains a member while it sends
messages.

Invariants: a joining node replaces a member of the same name only if the member is disconnected, and the node and the
member have the same token. If the member was ever ready to run sessions, the same run of the joining program must also
have started both. When a node breaks the protocol, or is silent for too long (`NodeWaits`), the service gives the node
up: the node's attempts run on other nodes, and the node's process is notified.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection
from typing import Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.events import Feed
from outrider.config import Config
from outrider.engines.pool.leader import pool_state
from outrider.environment import host_id, installed_version
from outrider.errors import UNREADABLE, ErrorRecord, storable
from outrider.nodes.joined_settings import settings_for_node
from outrider.nodes.messages import HELLO, MAX_FROM_NODE, MAX_HELLO, NodeHello, NodeWelcome
from outrider.nodes.pool_publisher import PoolPublisher
from outrider.nodes.remote_node import RemoteNode, ServiceParts
from outrider.redaction import redacted
from outrider.schemas import RefusedNode
from outrider.sessions.attempt import Node
from outrider.sessions.resources import Capacity, NodeResources
from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import Close, close_reason, encode
from outrider.wire.resumable import ResumableSocket

log = logging.getLogger("outrider.node")

HELLO_SECONDS = 10.0
FINAL = frozenset({Close.LEFT, Close.NONSENSE})
"""Close codes after which a node does not connect again."""
MAX_MEMBERS = 1024
"""Maximum number of nodes that can be joined at the same time."""
MAX_REFUSED = 16
"""The status shows at most this many nodes that were cut off for an invalid message: the most recent ones."""


class JoinedNodes:
    """The nodes that have joined: `async with JoinedNodes(...) as joined`. In the block, `joined.attend` serves the
    connections of nodes. `own` has the names of the service's own nodes, which a joining node cannot use."""

    def __init__(self, config: Config, parts: ServiceParts, publisher: PoolPublisher, *, own: Collection[str]) -> None:
        self.added = Feed[Node]()
        """Publishes each node that begins to run attempts."""
        self.removed = Feed[Node]()
        """Publishes each node that no longer runs attempts."""
        self.room = Feed[None]()
        """Publishes when a node can run more sessions than before."""
        self._config = config
        self._version = installed_version("outrider")
        self._parts = parts
        self._publisher = publisher
        self._own = own
        self.refused: deque[RefusedNode] = deque(maxlen=MAX_REFUSED)
        """The nodes that were recently cut off for an invalid message."""
        self._members: dict[str, JoinedNode] = {}
        self._machines: dict[str, NodeResources] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self._members.values():
            member.serving.cancel()
        await shielded(lambda: self._tasks.__aexit__(None, None, None))

    async def attend(self, name: str, socket: Socket, owner: str) -> None:
        """Serve a node over a new connection until the connection ends. `owner` is the name of the node's token."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await socket.receive()
            if len(frame) > MAX_HELLO:
                await socket.close(Close.NONSENSE, f"a hello of {len(frame)} bytes")
                return
            hello = HELLO.decode(frame)
        except TimeoutError:
            await socket.close(Close.SILENT, "no hello of a node came in time")
            return
        except (Disconnected, *UNREADABLE) as error:
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
            # A connected member is never replaced. To replace a disconnected member, a new node must have the member's
            # token. If the member was ever ready, the new node must also have the member's `machine`. If the member was
            # never ready, `machine` may differ: the joining program may just have been started again, and `machine` is
            # a new random name at each start.
            if name in self._own or (
                member is not None
                and (
                    member.connected
                    or (member.begun and member.hello.machine != hello.machine)
                    or member.owner != owner
                )
            ):
                await socket.close(Close.CONFLICT, close_reason(f"there is a node {name!r} already"))
                return
            if any(other.node.machine == hello.machine and other.owner != owner for other in self._members.values()):
                await socket.close(Close.CONFLICT, "a node of another token is on this machine")
                return
            if member is None:
                if len(self._members) >= MAX_MEMBERS:
                    await socket.close(Close.CONFLICT, f"there are {MAX_MEMBERS} nodes already")
                    return
                member = self._admit(name, hello, owner)
                break
            member.socket.end(Disconnected(Close.REMOVED, "it was started again"))
            await asyncio.wait([member.serving])
            # Other connections may have waited for the end of this member, too, so the loop checks the name again.
        if member.owner != owner:
            await socket.close(Close.CONFLICT, close_reason(f"node {name!r} came with another token"))
            return
        await member.carry(socket, hello.received)

    def _admit(self, name: str, hello: NodeHello, owner: str) -> JoinedNode:
        resources = self._machines.setdefault(hello.machine, NodeResources(hello.capacity))
        parts = msgspec.structs.replace(self._parts, resources=resources)
        elsewhere = not hello.host or hello.host != host_id()
        node = RemoteNode(name, hello.machine, parts, elsewhere=elsewhere, dialled=True)
        node.room.subscribe(self.room.publish)
        member = JoinedNode(node, hello, owner)
        self._members[name] = member
        member.serving = self._tasks.create_task(self._serve(member, resources.capacity), name=f"node {name}")
        return member

    async def _serve(self, member: JoinedNode, capacity: Capacity) -> None:
        node = member.node

        def ready(error: ErrorRecord | None) -> None:
            if error is not None:
                log.error("node %s cannot run sessions: %s", node.name, error.message)
                return
            log.info("node %s has joined", node.name)
            member.begun = True
            self._publisher.nodes.append(node)
            # pools may have changed since their states were sent at the start
            for model, pool in self._parts.pools.items():
                node.send_pool_state(model, pool_state(pool))
            self.added.publish(node)

        async def ended() -> None:
            if node in self._publisher.nodes:
                self._publisher.nodes.remove(node)
                self.removed.publish(node)

        how: object = "the service ends"
        try:
            setup = await asyncio.to_thread(settings_for_node, self._config, node.name, capacity)
            how = end = await node.serve(member.socket, setup, ready=ready, ended=ended)
            if end.code == Close.NONSENSE:
                log.warning("node %s is cut off: %s", node.name, end.reason)
                self.refused.append(
                    RefusedNode(
                        name=node.name, token=member.owner, at=time.time(), reason=redacted(storable(end.reason))
                    )
                )
        except Exception as error:  # a bug that concerns one node must not end the service
            log.exception("node %s failed", node.name)
            how = error
        finally:
            log.info("node %s has left: %s", node.name, how)
            member.socket.take_over()  # nothing more is sent over the node's connections
            if self._members.get(node.name) is member:
                del self._members[node.name]
            if all(other.node.machine != node.machine for other in self._members.values()):
                self._machines.pop(node.machine, None)


class JoinedNode:
    """A node that has joined. It may have several connections at a time, because a new one may arrive before the
    service detects that the previous one is broken."""

    def __init__(self, node: RemoteNode, hello: NodeHello, owner: str) -> None:
        self.node = node
        self.hello = hello
        self.owner = owner
        self.begun = False
        """True once the node has reported that it is ready."""
        self.socket = ResumableSocket(MAX_FROM_NODE)
        self._connections = 0
        self.serving: asyncio.Task[None]

    @property
    def connected(self) -> bool:
        return self._connections > 0

    async def carry(self, socket: Socket, arrived: int) -> None:
        """Send and receive over a connection until it ends. `arrived` is the number of message pieces that the node has
        received over its earlier connections."""
        replaced = self.socket.take_over()
        self._connections += 1
        self.node.set_reachable(True)
        try:
            await socket.send(encode(NodeWelcome(self.socket.received)))
            end = await self.socket.carry(socket, arrived, replaced)
            # If this side has found a breach of the protocol, send the reason to the node.
            if end.code == Close.NONSENSE:
                await socket.close(end.code, close_reason(end.reason))
        except Disconnected as error:
            end = error
        finally:
            self._connections -= 1
            self.node.set_reachable(self.connected)
        if end.code in FINAL:
            self.socket.end(end)
        elif not self.serving.done():
            log.info("the connection of node %s is gone: %s", self.node.name, end)
