"""Which node a session gets, and which sessions wait for room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.counts import NodeCounts
from outrider.errors import NotFound
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import LaneStats, NodeStats, ResourceStats
from outrider.service.placing import OVERBOOKING, NodePlacement
from outrider.sessions.attempt import Attempt
from outrider.spec import EvaluatorSpec, HarnessSpec, Resources, RuntimeSpec, TaskSpec
from outrider.trajectory import SessionResult


class Plain:
    """A node that has only a capacity, resources and images, and runs nothing."""

    def __init__(self, name: str, capacity: int = 8, *, images: tuple[str, ...] = (), run: int = 4, **has: Any) -> None:
        self.name = self.machine = name
        self.capacity = capacity
        self.resources = ResourceStats(**{"cpus": 4.0, "memory_mb": 1000} | has)
        self._images = images
        self._lane = LaneStats(name="run", size=run, in_use=0, waiting=0, served=0, waited_seconds=0.0)

    def stats(self) -> NodeStats:
        return NodeStats(
            name=self.name, sessions=0, capacity=self.capacity, lanes=(self._lane,), resources=self.resources
        )

    def counts(self) -> NodeCounts:
        return NodeCounts()

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return runtime.image in self._images

    async def pull_image(self, reference: str, name: str) -> RootImage:
        raise NotImplementedError

    async def run(self, attempt: Attempt) -> SessionResult:
        raise NotImplementedError


def needing(
    cpus: float | None = None,
    memory_mb: int | None = None,
    image: str | None = None,
    gpus: int = 0,
    **evaluator: Any,
) -> TaskSpec:
    return TaskSpec(
        instruction="x",
        harness=HarnessSpec(agent="tools"),
        runtime=RuntimeSpec(resources=Resources(cpus=cpus, memory_mb=memory_mb, gpus=gpus), image=image),
        evaluator=EvaluatorSpec(run="true", **evaluator),
    )


ANY = needing()


GIVE_BACK: dict[str, list[Callable[[], None]]] = defaultdict(list)
"""By node, the functions that give back the places which `put` has taken."""


@pytest.fixture(autouse=True)
def _anew() -> None:
    GIVE_BACK.clear()


def placed_on(nodes: Sequence[Plain], **options: float) -> NodePlacement:
    """Return a placement on these nodes, for a service that expects no other node to join."""
    return NodePlacement(nodes, **{"join_seconds": 0.0} | options)


def put(places: NodePlacement, task: TaskSpec, *, reserved: bool = False) -> str | None:
    """Place a session. Returns the node's name, or None if there is no room."""
    node = places.find(task)
    if node is None:
        return None
    GIVE_BACK[node.name].append(places.take(node, task, reserved=reserved))
    return node.name


def test_the_node_with_the_most_free_slots_is_chosen() -> None:
    places = placed_on([Plain("a", 2), Plain("b", 4), Plain("c", 3)])
    assert [put(places, ANY) for _ in range(10)] == [*"bbcabcabc", None]


def test_resources_that_are_free_now_come_before_the_image_and_the_image_before_slots() -> None:
    busy = Plain("busy", 9, images=("i",), cpus_set_aside=3.0)
    bare = Plain("bare", 8)
    ready = Plain("ready", 2, images=("i",))
    assert put(placed_on([busy, bare, ready]), needing(2, image="i")) == "ready"
    assert put(placed_on([busy, bare, ready]), needing(1, image="i")) == "busy"
    assert put(placed_on([busy, bare]), needing(2, image="i")) == "bare"


def test_a_grader_s_image_and_resources_count_too() -> None:
    grader = RuntimeSpec(image="g", resources=Resources(cpus=3))
    graded = needing(1, image="i", carry=[], runtime=grader)
    half, whole = Plain("half", 9, images=("i",)), Plain("whole", 2, images=("i", "g"))
    assert put(placed_on([half, whole]), graded) == "whole"
    assert put(placed_on([Plain("little", cpus=2.0), Plain("large", 2, cpus=3.0)]), graded) == "large"


def test_so_many_wait_on_a_node_as_take_over_what_becomes_free() -> None:
    places = placed_on([Plain("a", 99)])
    assert [put(places, needing(2)) for _ in range(5)] == ["a"] * 4 + [None]


def test_a_large_session_waits_but_is_not_overtaken_by_small_ones() -> None:
    a = Plain("a", 99)
    places = placed_on([a])
    small, large = needing(1), needing(4)
    for _ in range(8):
        assert put(places, small) == "a"
    for freed in range(5):
        places.look_again()
        assert put(places, large) == ("a" if freed == 4 else None)
        assert put(places, small) is None, "it would take what the large one waits for"
        assert put(places, ANY) == "a", "it takes nothing that others wait for"
        GIVE_BACK["a"].pop(0)()


def test_only_nodes_that_could_take_it_are_held() -> None:
    large, little = Plain("large", 9, cpus=8.0), Plain("little", 9)
    places = placed_on([large, little])
    assert put(places, needing(8)) == put(places, needing(8)) == "large"
    assert put(places, needing(8)) is None
    assert put(places, needing(1)) == "little"


def test_sessions_that_wait_for_gpus_hold_up_those_that_want_none_only_for_the_first_of_them() -> None:
    places = placed_on([Plain("a", 99, gpus=2), Plain("plain", 99)])
    with_gpu = needing(cpus=1, gpus=1)
    assert [put(places, with_gpu) for _ in range(4)] == ["a"] * 4
    places.look_again()
    assert [put(places, with_gpu) for _ in range(9)] == [None] * 9
    assert [put(places, needing(cpus=4)) for _ in range(3)] == ["plain", "plain", None], "one of the four left is kept"
    places.look_again()
    assert [put(places, with_gpu), put(places, needing(cpus=3)), put(places, needing(cpus=1))] == [None, "a", None]
    GIVE_BACK["a"].pop(0)()
    places.look_again()
    assert put(places, with_gpu) == "a"


def test_gpus_that_are_free_now_come_first_and_no_node_without_is_asked() -> None:
    busy, free = Plain("busy", 9, gpus=2, gpus_set_aside=2), Plain("free", 2, gpus=1)
    assert put(placed_on([busy, Plain("none", 50), free]), needing(gpus=1)) == "free"
    assert put(placed_on([busy, Plain("none", 50)]), needing(gpus=2)) == "busy"


def test_who_needs_no_gpu_takes_the_slot_of_a_node_without_but_not_for_want_of_its_image() -> None:
    with_gpus, without = Plain("with", 50, gpus=2, images=("i",)), Plain("without", 1, images=("j",))
    places = placed_on([with_gpus, without])
    assert [put(places, needing(image="i")), put(places, ANY), put(places, ANY)] == ["with", "without", "with"]


def test_a_session_that_fits_nowhere_is_told_so_by_a_node() -> None:
    assert put(placed_on([Plain("a"), Plain("b", 9)]), needing(400)) == "b"


def test_a_drained_node_gets_nothing() -> None:
    a, b = Plain("a", 9, cpus=8.0), Plain("b", 1)
    places = placed_on([a, b])
    places.drained = {"a", "gone"}
    assert places.free_slots() == 1
    assert [put(places, ANY), put(places, ANY), put(places, needing(8))] == ["b", None, None]
    assert [node.drained for node in places.stats()] == [True, False]
    places.drained = set()
    places.look_again()
    assert put(places, needing(8)) == "a"
    with pytest.raises(NotFound, match="no node 'c'"):
        places.check_known("c")


def test_a_node_that_loses_slots_gets_nothing_until_it_has_some() -> None:
    a = Plain("a", 3)
    places = placed_on([a])
    for _ in range(3):
        put(places, ANY)
    a.capacity = 2
    GIVE_BACK["a"].pop()()
    assert (places.free_slots(), put(places, ANY)) == (0, None)


@pytest.mark.parametrize(("share", "run", "reserved"), [(0.0, 8, 0), (0.01, 8, 1), (0.25, 8, 2), (1.0, 4, 4)])
def test_the_share_of_evaluations_is_one_of_run_slots(share: float, run: int, reserved: int) -> None:
    a, drained = Plain("a", 8, run=run), Plain("b", 8, run=run)
    places = placed_on([a, drained], evaluation_share=share)
    places.drained = {"b"}
    assert places.free_share() == reserved
    for left in range(reserved):
        put(places, ANY, reserved=True)
        assert places.free_share() == reserved - left - 1
    if reserved:
        GIVE_BACK["a"].pop()()
    assert places.free_share() == min(reserved, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 2), st.integers(0, 99)), max_size=60))
def test_no_node_is_given_more_than_it_takes(steps: list[tuple[bool, int, int, int]]) -> None:
    nodes = [Plain("a", 3, gpus=2), Plain("b", 9, cpus=2.0, gpus=1)]
    places = placed_on(nodes)
    placed: list[tuple[str, TaskSpec, Callable[[], None]]] = []
    for arrives, cpus, gpus, number in steps:
        if number % 3:  # otherwise the sessions that wait for room are remembered
            places.look_again()
        if arrives:
            task = needing(cpus or None, gpus=gpus)
            if (node := places.find(task)) is not None:
                placed.append((node.name, task, places.take(node, task, reserved=False)))
        elif placed:
            placed.pop(number % len(placed))[2]()
        for each in nodes:
            here = [task.runtime.resources for name, task, _ in placed if name == each.name]
            assert len(here) <= each.capacity
            assert sum(resources.cpus or 0 for resources in here) <= OVERBOOKING * each.resources.cpus
            assert sum(resources.gpus for resources in here) <= OVERBOOKING * each.resources.gpus


def test_nodes_come_and_go_with_sessions_on_them() -> None:
    a, again = Plain("a", 2), Plain("a", 2)
    places = placed_on([a])
    assert [put(places, needing(4)), put(places, needing(4))] == ["a", "a"]
    places.remove(a)
    assert (places.free_slots(), places.stats(), put(places, ANY)) == (0, [], None)
    places.add(again)
    places.remove(a)  # a late message about the earlier node
    assert places.free_slots() == 2
    for give_back in GIVE_BACK.pop("a"):
        give_back()
    assert [put(places, needing(4)) for _ in range(3)] == ["a", "a", None]


def test_what_is_left_of_a_node_counts_on_its_machine_while_another_is_there() -> None:
    a, b = Plain("a", 9), Plain("b", 9)
    a.machine = b.machine = "both"
    places = placed_on([a, b])
    assert [put(places, needing(2)) for _ in range(5)] == ["a", "b", "a", "b", None]
    places.remove(a)
    assert put(places, needing(2)) is None
    GIVE_BACK["a"].pop()()
    places.look_again()
    assert put(places, needing(2)) == "b"


def test_what_only_a_node_could_take_that_has_gone_waits_for_it() -> None:
    large = Plain("large", cpus=16.0)
    places = placed_on([large, Plain("small")])
    places.remove(large)
    assert [put(places, needing(8)), put(places, needing(400))] == [None, "small"]
    places.add(large)
    assert put(places, needing(8)) == "large"


def test_a_service_that_has_just_begun_waits_for_nodes_to_join() -> None:
    assert put(placed_on([Plain("small")], join_seconds=60.0), needing(8)) is None
    assert put(placed_on([Plain("small")]), needing(8)) == "small", "which tells it that it has too little"
