"""For random actions of clients in any order, the ids that the engine gets are the ids that are trained on."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.messages import Message, Role
from outrider.tokens.rendering.renderer import History
from outrider.tokens.samples import Policy
from outrider.trajectory import BranchKind, BranchPolicy, JoinKind

from .any_session import Clients, Move, moves
from .clients import echoed, news, sampled
from .renderers import FAMILIES, family_renderer
from .rollout import Rollout, says
from .strategies import TOOLS

policies = st.fixed_dictionaries({kind: st.sampled_from(list(BranchPolicy)) for kind in BranchKind})


@pytest.mark.parametrize("history", ["recorded", "template"])
@given(st.lists(moves, min_size=3, max_size=16), st.sampled_from(FAMILIES), policies)
def test_any_session_is_recorded_exactly(history: History, made: list[Move], family: str, policy: Policy) -> None:
    clients = Clients(Rollout(family_renderer(family), history))
    for number, move in enumerate(made):
        clients.act(*move)
        if clients.open and number % 4 == 3:
            clients.finish(0)
    clients.finish_all()
    clients.rollout.check_samples()
    clients.rollout.check_samples(policy)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_a_straight_session_is_one_sample(seed: int, length: int) -> None:
    """A session that only appends, with the changes that clients make to their histories, is one row that trains on
    every sampled id."""
    rng = Random(seed)
    rollout = Rollout(family_renderer("qwen3"))
    messages: tuple[Message, ...] = (Message(role=Role.USER, content="Read the file."),)
    for index in range(length):
        joined = rollout.join(messages, TOOLS)
        assert joined.kind is (JoinKind.APPEND if index else JoinKind.ROOT)
        ids = sampled(rng)
        while not can_go_on(ids):
            ids = sampled(rng)
        reply = rollout.answer(joined, ids, tools=TOOLS)
        messages = (*echoed(rng, (*messages, reply)), *news(rng, reply))
    assert len(rollout.check_samples()) == (1 if any(rollout.gave) else 0)
    assert not rollout.causes


def can_go_on(ids: list[int]) -> bool:
    """Whether the family can append to these ids."""
    renderer = family_renderer("qwen3")
    user = Message(role=Role.USER, content="")
    return renderer.bridge(renderer.render([user], ()), ids, [user], (), "recorded") is not None


@given(st.integers(0, 2**32))
def test_the_clients_echo_says_the_same(seed: int) -> None:
    """`echoed` makes only changes that `says` accepts."""
    rng = Random(seed)
    rollout = Rollout(family_renderer("qwen3"))
    joined = rollout.join([Message(role=Role.USER, content="x")], TOOLS)
    reply = rollout.answer(joined, sampled(rng), tools=TOOLS)
    assert all(map(says, echoed(rng, [reply]), [reply]))
