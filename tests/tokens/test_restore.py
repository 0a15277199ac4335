"""A tree that is restored from stored turns joins all later requests as the tree that recorded them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.messages import Message, ParsedMessages, ToolSpec
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import FinishReason
from support.steps import run_inline

from .any_session import Clients, Move, moves
from .renderers import FAMILIES, family_renderer
from .rollout import Rollout, raw_of, restored


def told(joined: Joined) -> tuple[object, ...]:
    """All that a turn, and a later request, is told by where a request joined."""
    prompt = joined.prompt
    return (
        joined.kind,
        joined.cause,
        joined.forked_from,
        joined.added,
        prompt.parent.index if prompt.parent else None,
        prompt.delta,
        prompt.length,
        prompt.conversation,
        prompt.tools_digest,
        prompt.thinking,
        prompt.first_turn,
    )


class Twins(Rollout):
    """A session on two trees: the one that saw all of it, and from `begin` on one that was restored from its turns.
    They have to say the same of everything."""

    def __init__(self, renderer: Renderer, history: History = "recorded") -> None:
        super().__init__(renderer, history)
        self.restored: TokenTree | None = None
        self._pairs: list[tuple[Joined, Joined]] = []

    def begin(self) -> None:
        self.restored = restored(self.renderer, self.history, self.turns)
        assert self.restored.forks == self.tree.forks

    def join(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Joined:
        joined = super().join(messages, tools)
        if self.restored is not None:
            other = run_inline(self.restored.join(ParsedMessages(messages), tools, raw_of(tools)))
            assert told(other) == told(joined)
            assert self.restored.forks == self.tree.forks
            self._pairs.append((joined, other))
        return joined

    def answer(
        self,
        joined: Joined,
        output: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        finish: FinishReason = FinishReason.STOP,
    ) -> Message:
        reply = super().answer(joined, output, tools=tools, finish=finish)
        if self.restored is not None:
            [other] = [other for one, other in self._pairs if one is joined]
            node = self.restored.commit(other.prompt, output, self.turns[-1].reply)
            assert node.index == self.turns[-1].index
            assert other.prompt.first_turn == joined.prompt.first_turn
        return reply


@pytest.mark.parametrize("history", ["recorded", "template"])
@given(st.lists(moves, min_size=3, max_size=16), st.lists(moves, min_size=3, max_size=12), st.sampled_from(FAMILIES))
def test_after_any_session_both_trees_say_the_same(
    history: History, before: list[Move], after: list[Move], family: str
) -> None:
    twins = Twins(family_renderer(family), history)
    clients = Clients(twins)
    for number, move in enumerate(before):
        clients.act(*move)
        if clients.open and number % 4 == 3:
            clients.finish(0)
    clients.finish_all()
    twins.begin()
    for move in after:
        clients.act(*move)
    clients.finish_all()
    twins.check_samples()
