"""A tree made from stored turns joins later requests as the tree that recorded these turns would have joined them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.concurrency.cancellation import Steps
from outrider.messages import Message, ParsedMessages, Role
from outrider.tokens.rendering.renderer import History
from outrider.tokens.tree.request_index import PromptNode, TurnNode
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import JoinKind
from support.steps import run_inline

from .any_session import Clients, Move, moves
from .renderers import FAMILIES, family_renderer
from .rollout import Rollout
from .strategies import TOOLS
from .test_changed_heads import AGAIN, EXPERT, OTHERS, TRIAGE, Talk, spelled, within


class Twin:
    """A tree and its restored copy, which get the same requests and turns. Every join is compared."""

    def __init__(self, tree: TokenTree, restored: TokenTree) -> None:
        self.tree = tree
        self.restored = restored
        self.pairs: list[tuple[PromptNode, PromptNode]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def join(self, *request: Any, **about: Any) -> Steps[Joined]:
        joined = yield from self.tree.join(*request, **about)
        again = yield from self.restored.join(*request, **about)
        assert again.prompt.ids().tolist() == joined.prompt.ids().tolist()
        assert (again.kind, again.cause, again.added) == (joined.kind, joined.cause, joined.added)
        assert again.prompt.conversation == joined.prompt.conversation
        assert index_of(again.prompt.parent) == index_of(joined.prompt.parent)
        assert again.forked_from == joined.forked_from
        self.pairs.append((joined.prompt, again.prompt))
        return joined

    def commit(self, prompt: PromptNode, output: Sequence[int], reply: Message | None) -> TurnNode:
        other = next(again for joined, again in self.pairs if joined is prompt)
        node = self.tree.commit(prompt, output, reply)
        assert self.restored.commit(other, output, reply).index == node.index
        return node


def index_of(turn: TurnNode | None) -> int | None:
    return None if turn is None else turn.index


def restored(rollout: Rollout) -> TokenTree:
    tree = TokenTree(rollout.renderer, rollout.history)
    run_inline(tree.restore(rollout.turns))
    return tree


@pytest.mark.parametrize("history", ["recorded", "template"])
@given(st.lists(moves, min_size=2, max_size=10), st.lists(moves, min_size=1, max_size=10), st.sampled_from(FAMILIES))
def test_any_session_goes_on_after_a_restart(
    history: History, before: list[Move], after: list[Move], family: str
) -> None:
    clients = Clients(Rollout(family_renderer(family), history))
    for move in before:
        clients.act(*move)
        clients.finish_all()
    rollout = clients.rollout
    copy = restored(rollout)
    assert copy.forks == rollout.tree.forks
    rollout.tree = Twin(rollout.tree, copy)  # type: ignore[assignment]  # a double
    for move in after:
        clients.act(*move)
    clients.finish_all()
    rollout.check_samples()


def test_a_turn_that_was_not_stored_leaves_a_gap() -> None:
    """The calls of two agents overlap, and the service stops before it has stored the first one's turn."""
    rollout = Rollout(family_renderer("qwen3"))
    lost = rollout.join([Message(role=Role.USER, content="Who are you?")])
    kept = rollout.join([Message(role=Role.USER, content="Where is it?")], TOOLS)
    rollout.answer(lost, [5, 6, 7])
    rollout.answer(kept, [8, 9, 10], tools=TOOLS)
    del rollout.turns[0]
    tree = restored(rollout)
    again = run_inline(tree.join(ParsedMessages([Message(role=Role.USER, content="Who are you?")]), (), b""))
    assert again.kind is JoinKind.ROOT
    assert tree.commit(again.prompt, [5, 6, 7], None).index == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("restart", range(2, 6))
def test_agents_hand_over_to_each_other_across_a_restart(family: str, restart: int) -> None:
    """Agents with different heads work in turn on one history. The history's ids, which no tokenizer would choose, are
    spliced behind each head."""
    talk = Talk(family)
    history = talk.history
    for number, (head, tools) in enumerate(((EXPERT, OTHERS), (TRIAGE, TOOLS), (EXPERT, TOOLS), (None, OTHERS))):
        if len(talk.rollout.turns) == restart:
            talk.rollout.tree = Twin(talk.rollout.tree, restored(talk.rollout))  # type: ignore[assignment]
        reply = talk.ask([*history, AGAIN], spelled(f"Answer {number}.", family), head, tools)
        history = [*history, AGAIN, reply]
    assert sum(talk.rollout.tree.forks.values()) == 4
    assert all(within(gave, talk.rollout.given[-1]) for gave in talk.rollout.gave[:-1])
    talk.rollout.check_samples()
