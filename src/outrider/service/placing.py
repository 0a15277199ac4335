"""Chooses a node for each session, and counts the sessions that are placed on each node.

The sessions on a machine may together need up to twice its processors, memory and GPUs. Some of the sessions then wait
on the machine until enough of these resources are free.

If no machine has room for a session, the session stays in the queue. The machines that are large enough for this
session then get no other session that needs the same scarce resources, because small sessions could otherwise starve a
large one. Sessions that need none of these resources are still placed (see `room_behind`).

Invariant: a node never gets more sessions than it has slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, sub

import msgspec

from outrider.errors import NotFound
from outrider.schemas import NodeStats
from outrider.sessions.attempt import Node
from outrider.sessions.priority_semaphore import Quantities, fits, room_behind
from outrider.sessions.resources import ResourceAmount, free_of, session_needs, total_of
from outrider.spec import TaskSpec, runtimes_of

OVERBOOKING = 2
"""The sessions on a machine may together need at most this many times the machine's resources."""

RUN_LANE = "run"

JOIN_SECONDS = 60.0
"""After a service's start, nodes on other machines have this many seconds to join it."""


@dataclass(eq=False)
class _Machine:
    """The total needs of all sessions on a machine, over all nodes there."""

    needs: Quantities = ResourceAmount().quantities
    waiting: list[Quantities] = field(default_factory=list)
    """The needs of the sessions that wait for room on this machine, in the order of the queue."""


@dataclass(eq=False)
class _NodeSlots:
    """A node, and the number of sessions that are placed on it."""

    node: Node
    machine: _Machine
    sessions: int = 0

    def has_room(self, needs: Quantities) -> bool:
        most = total_of(self.node.stats().resources).quantities
        room = tuple(OVERBOOKING * has - taken for has, taken in zip(most, self.machine.needs, strict=True))
        for number, others in enumerate(self.machine.waiting):
            room = room_behind(others, room, first=not number)
        return fits(needs, room)


class NodePlacement:
    """The nodes by name, and the sessions that are placed on each. Waiting evaluations get the fraction
    `evaluation_share` of all run slots before other sessions. Nodes on other machines are expected to join in the first
    `join_seconds`."""

    def __init__(
        self, nodes: Sequence[Node], *, evaluation_share: float = 0.0, join_seconds: float = JOIN_SECONDS
    ) -> None:
        self.drained: set[str] = set()
        """Names of the nodes on which no new sessions are placed."""
        self._machines: dict[str, _Machine] = {}
        self._places: dict[str, _NodeSlots] = {}
        for node in nodes:
            self.add(node)
        self._gone: set[Quantities] = set()
        """Total resources of each node that has left."""
        self._join_until = time.monotonic() + join_seconds
        self._evaluation_share = evaluation_share
        self._reserved = 0
        """Number of placed sessions that count towards the evaluations' share of the slots."""

    def add(self, node: Node) -> None:
        """Add a node. It replaces a node with the same name."""
        self._places[node.name] = _NodeSlots(node, self._machines.setdefault(node.machine, _Machine()))

    def remove(self, node: Node) -> None:
        """Remove a node, so that no more sessions are placed on it. Its running sessions continue. The functions that
        `take` returned for these sessions must still be called."""
        if node.name in self._places and self._places[node.name].node is node:
            del self._places[node.name]
            self._gone.add(total_of(node.stats().resources).quantities)
        if all(place.node.machine != node.machine for place in self._places.values()):
            self._machines.pop(node.machine, None)

    def stats(self) -> list[NodeStats]:
        return [
            msgspec.structs.replace(place.node.stats(), drained=name in self.drained)
            for name, place in self._places.items()
        ]

    def nodes(self) -> list[Node]:
        return [place.node for place in self._places.values()]

    def machines(self) -> list[Node]:
        """Return one node of each machine: the one with the most slots. The machine's other nodes may not have started
        completely."""
        nodes = sorted((place.node for place in self._places.values()), key=lambda node: node.stats().capacity)
        return list({node.machine: node for node in nodes}.values())

    def check_known(self, name: str) -> None:
        """Raise NotFound if there is no node called `name`."""
        if name not in self._places:
            raise NotFound(f"no node {name!r}", hint=f"there are {', '.join(map(repr, self._places)) or 'none'}")

    def free_slots(self) -> int:
        """Return how many more sessions the nodes can take."""
        return sum(map(self._slots, self._places.values()))

    def free_share(self) -> int:
        """Return how many of the free slots waiting evaluations may take before other sessions."""
        if not self._evaluation_share:
            return 0
        lanes = [lane for place in self._open() for lane in place.node.stats().lanes]
        share = math.ceil(self._evaluation_share * sum(lane.size for lane in lanes if lane.name == RUN_LANE))
        return min(max(0, share - self._reserved), self.free_slots())

    def look_again(self) -> None:
        """Forget which sessions wait for room. Call this before the queue is read from the beginning."""
        for place in self._places.values():
            place.machine.waiting.clear()

    def find(self, task: TaskSpec) -> Node | None:
        """Return the node for a session, or None if the session must wait. The node must have a free slot and room for
        the session's needs. Among such nodes, these are preferred, in this order:

        1. nodes on which the resources are free now
        2. nodes that have the images
        3. nodes without GPUs, if the session needs no GPUs
        4. nodes with the most free slots"""
        needs = session_needs(task)
        runtimes = [runtime for runtime, _ in runtimes_of(task)]
        able = [place for place in self._places.values() if needs.within(total_of(place.node.stats().resources))]
        if not able and self.may_fit(needs):
            return None
        # `able` is empty if the session is too large for every node that has ever joined this service process, for
        # example because an earlier process accepted it. Then any node may get the session. The node refuses the
        # session with an error.
        found = [place for place in self._open() if self._slots(place) and (place in able or not able)]
        if able and any(needs.quantities):
            found = [place for place in found if place.has_room(needs.quantities)]
            if not found:
                for machine in {place.machine for place in able}:
                    machine.waiting.append(needs.quantities)

        def fitness(place: _NodeSlots) -> tuple[bool, bool, bool, int]:
            resources = place.node.stats().resources
            free, images = needs.within(free_of(resources)), all(map(place.node.has_image, runtimes))
            return free, images, bool(needs.gpus or not resources.gpus), self._slots(place)

        return max(found, key=fitness).node if found else None

    def grader(self, task: TaskSpec) -> Node | None:
        """Return the node that grades a session whose agent ran elsewhere, or None if there are no nodes. A node that
        is large enough is preferred, then one that has the images, then the one with the most free slots."""
        needs = session_needs(task)
        runtimes = [runtime for runtime, _ in runtimes_of(task)]

        def fitness(place: _NodeSlots) -> tuple[bool, bool, int]:
            able = needs.within(total_of(place.node.stats().resources))
            return able, all(map(place.node.has_image, runtimes)), self._slots(place)

        return max(self._open(), key=fitness).node if self._open() else None

    def may_fit(self, needs: ResourceAmount, *, others: bool = True) -> bool:
        """Return True if a node that is large enough for these needs has joined or may still join. A node that has left
        may join again. With `others`, a node of any size may also join in the first `join_seconds`."""
        if others and time.monotonic() < self._join_until:
            return True
        here = (total_of(place.node.stats().resources).quantities for place in self._places.values())
        return any(fits(needs.quantities, has) for has in (*here, *self._gone))

    def take(self, node: Node, task: TaskSpec, *, reserved: bool) -> Callable[[], None]:
        """Count a session as placed on a node. Returns a function that gives the session's slot and resources back. It
        must be called exactly once."""
        place = self._places[node.name]
        needs = session_needs(task).quantities
        place.sessions += 1
        place.machine.needs = tuple(map(add, place.machine.needs, needs))
        self._reserved += reserved

        def give_back() -> None:
            place.sessions -= 1
            place.machine.needs = tuple(map(sub, place.machine.needs, needs))
            self._reserved -= reserved

        return give_back

    def _open(self) -> list[_NodeSlots]:
        return [place for name, place in self._places.items() if name not in self.drained]

    def _slots(self, place: _NodeSlots) -> int:
        if place.node.name in self.drained:
            return 0
        return max(0, place.node.stats().capacity - place.sessions)
