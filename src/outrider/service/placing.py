"""Where sessions run: the nodes, what was placed on each, and the rule by which a session gets one.

It knows no queue and no store. The sessions on a machine may ask together for twice the processors, memory and GPUs
that it has: so many wait there, and take over what becomes free. A session that finds no such room stays in the queue
and keeps its place. Until it has room, no other session that asks for what it is short of goes to a machine that could
take it, so that small ones cannot starve it; those that ask for none of that pass (see `room_behind`).
Invariant: no more sessions are on a node than it has slots, but for those that it had when it lost some.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import Generic, Protocol, TypeVar

import msgspec

from outrider.errors import NotFound
from outrider.schemas import NodeStats
from outrider.sessions.priority_semaphore import Quantities, fits, room_behind
from outrider.sessions.resources import ResourceAmount, free_of, session_needs, total_of
from outrider.spec import RuntimeSpec, TaskSpec, runtimes_of

OVERBOOKING = 2
"""What the sessions on a machine may ask for in all, in multiples of what it has."""

RUN_LANE = "run"

JOIN_SECONDS = 60.0
"""How long nodes on other machines may take to join a service that was started again."""


class Placeable(Protocol):
    """What is asked of a node; see `sessions.attempt.Node`."""

    name: str
    machine: str

    def stats(self) -> NodeStats: ...
    def has_image(self, runtime: RuntimeSpec) -> bool: ...


N = TypeVar("N", bound=Placeable)


@dataclass(eq=False)
class _Machine:
    """What the sessions on all nodes of a machine ask for in all."""

    needs: Quantities = ResourceAmount().quantities
    waiting: list[Quantities] = field(default_factory=list)
    """What each session asks for that waits for room on it, in the order of the queue."""


@dataclass(eq=False)
class _Place(Generic[N]):
    """A node, and the number of sessions that were placed on it."""

    node: N
    machine: _Machine
    sessions: int = 0

    def has_room(self, needs: Quantities) -> bool:
        most = total_of(self.node.stats().resources).quantities
        room = tuple(OVERBOOKING * has - taken for has, taken in zip(most, self.machine.needs, strict=True))
        for number, others in enumerate(self.machine.waiting):
            room = room_behind(others, room, first=not number)
        return fits(needs, room)


class Places(Generic[N]):
    """Nodes are known by name. `evaluation_share` of the run slots is for evaluations, as long as some wait."""

    def __init__(self, nodes: Sequence[N], *, evaluation_share: float = 0.0) -> None:
        self.drained: set[str] = set()
        """Names of nodes that take no new sessions."""
        self._machines: dict[str, _Machine] = {}
        self._places: dict[str, _Place[N]] = {}
        for node in nodes:
            self.add(node)
        self._gone: set[Quantities] = set()
        """What nodes had that were removed."""
        self._began = time.monotonic()
        self._evaluation_share = evaluation_share
        self._reserved = 0
        """Sessions in the share of evaluations."""

    def add(self, node: N) -> None:
        """Have another node, in place of one of that name."""
        self._places[node.name] = _Place(node, self._machines.setdefault(node.machine, _Machine()))

    def remove(self, node: N) -> None:
        """Forget a node. The sessions that are on it are given back all the same."""
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

    def nodes(self) -> list[N]:
        return [place.node for place in self._places.values()]

    def machines(self) -> list[N]:
        """A node of each machine, and of several the one with the most slots: others may just be starting."""
        nodes = sorted((place.node for place in self._places.values()), key=lambda node: node.stats().capacity)
        return list({node.machine: node for node in nodes}.values())

    def check_known(self, name: str) -> None:
        """Raises NotFound."""
        if name not in self._places:
            raise NotFound(f"no node {name!r}", hint=f"there are {', '.join(map(repr, self._places)) or 'none'}")

    def free_slots(self) -> int:
        """How many more sessions the nodes can take."""
        return sum(map(self._slots, self._places.values()))

    def free_share(self) -> int:
        """How many of these the share of evaluations has room for."""
        if not self._evaluation_share:
            return 0
        lanes = [lane for place in self._open() for lane in place.node.stats().lanes]
        share = math.ceil(self._evaluation_share * sum(lane.size for lane in lanes if lane.name == RUN_LANE))
        return min(max(0, share - self._reserved), self.free_slots())

    def look_again(self) -> None:
        """Forget which sessions have found no room: the queue is read from its beginning."""
        for place in self._places.values():
            place.machine.waiting.clear()

    def find(self, task: TaskSpec) -> N | None:
        """The node for a session: of those with a slot, and room for what it asks for, one where that is free now, then
        one that has its images, then one without GPUs unless it needs some, then the one with the most free slots. None
        if the session must wait."""
        needs = session_needs(task)
        runtimes = [runtime for runtime, _ in runtimes_of(task)]
        able = [place for place in self._places.values() if needs.within(total_of(place.node.stats().resources))]
        if not able and self.may_fit(needs):
            return None
        # One that fits on no node was accepted when there was more: any node will tell it so.
        found = [place for place in self._open() if self._slots(place) and (place in able or not able)]
        if able and any(needs.quantities):
            found = [place for place in found if place.has_room(needs.quantities)]
            if not found:
                for machine in {place.machine for place in able}:
                    machine.waiting.append(needs.quantities)

        def fitness(place: _Place[N]) -> tuple[bool, bool, bool, int]:
            resources = place.node.stats().resources
            free, images = needs.within(free_of(resources)), all(map(place.node.has_image, runtimes))
            return free, images, bool(needs.gpus or not resources.gpus), self._slots(place)

        return max(found, key=fitness).node if found else None

    def may_fit(self, needs: ResourceAmount, *, others: bool = True) -> bool:
        """Whether a node that can take this is there or may come: one that could has left, or, with `others`, the
        service began so lately that not all may have joined."""
        if others and time.monotonic() - self._began < JOIN_SECONDS:
            return True
        here = (total_of(place.node.stats().resources).quantities for place in self._places.values())
        return any(fits(needs.quantities, has) for has in (*here, *self._gone))

    def take(self, node: N, task: TaskSpec, *, reserved: bool) -> Callable[[], None]:
        """Count a session on a node; what is returned gives its place back, and is to be called once."""
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

    def _open(self) -> list[_Place[N]]:
        return [place for name, place in self._places.items() if name not in self.drained]

    def _slots(self, place: _Place[N]) -> int:
        if place.node.name in self.drained:
            return 0
        return max(0, place.node.stats().capacity - place.sessions)
