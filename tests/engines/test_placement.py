"""The heap of engine loads gives the same minimum as a plain search, and remains bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.pool.placement import LoadHeap

NAMES = st.sampled_from("abcd")


@given(st.lists(st.tuples(NAMES, st.none() | st.integers(0, 5)), max_size=400))
def test_least_is_what_a_plain_search_finds(moves: list[tuple[str, int | None]]) -> None:
    heap = LoadHeap()
    model: dict[str, int] = {}
    for name, load in moves:
        if load is None:
            heap.drop(name)
            model.pop(name, None)
        else:
            heap.put(name, (False, load, 0))
            model[name] = load
        assert heap.least() == (min(model, key=lambda known: model[known]) if model else None)
        assert len(heap) == len(model)


def test_many_changes_without_a_look_stay_bounded() -> None:
    heap = LoadHeap()
    for load in range(10_000):
        heap.put("a", (False, load, 0))
    assert heap.least() == "a"
    assert len(heap._heap) < 200
