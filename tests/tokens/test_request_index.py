"""A long history is indexed from the remembered prefix of an earlier request, with the same result as without."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.messages import Message, Role
from outrider.tokens.rendering.reply_stream import ReplyStream
from outrider.tokens.tree import request_index
from outrider.tokens.tree.canonical import ALL_PRINTED
from outrider.tokens.tree.request_index import REMEMBER_EVERY, UNSTABLE_TAIL, RequestIndexer
from outrider.tokens.tree.tree import TokenTree
from support.steps import run_inline

from .clients import echoed, news, rewritten, sampled
from .renderers import family_renderer
from .strategies import TOOLS

RAW = b"tools"


class Marked:
    """Messages, the newest with a cache marker, which changes only their bytes. `read` counts the calls of `raw`."""

    def __init__(self, messages: Sequence[Message], marks: int = 3) -> None:
        self._messages = messages
        self._marks = marks
        self.read = 0

    def __len__(self) -> int:
        return len(self._messages)

    def raw(self, index: int) -> bytes:
        self.read += 1
        mark = "marked" if index >= len(self) - self._marks else ""
        return repr((self._messages[index], mark)).encode()

    def head(self, count: int) -> bytes:
        mine = [self._messages[index] for index in range(count)]
        return repr((mine, max(0, count - len(self) + self._marks))).encode()

    def role(self, index: int) -> Role:
        return self._messages[index].role

    def size(self, index: int) -> int:
        return 1

    def parse(self, index: int) -> Message:
        return self._messages[index]


def said(rng: Random, number: int) -> list[Message]:
    """A conversation of `number` messages."""
    roles = (Role.USER, Role.ASSISTANT)
    return [Message(role=roles[at % 2], content=f"{at} {rng.randrange(3)}") for at in range(number)]


@given(st.integers(0, 2**32))
def test_a_remembered_prefix_changes_no_index(seed: int) -> None:
    rng = Random(seed)
    tree = TokenTree(family_renderer("qwen3"), "recorded")
    known = RequestIndexer(ALL_PRINTED)
    talks = [said(rng, rng.randrange(60)) for _ in range(3)]
    for _ in range(20):
        which = rng.randrange(len(talks))
        talk = talks[which]
        if talk and rng.random() < 0.3:
            talk = talk.copy()
            talk[rng.randrange(len(talk))] = said(rng, 1)[0]
        talks[which] = talk = talk[: rng.randrange(len(talk) + 1) if rng.random() < 0.1 else None]
        talk += said(rng, rng.randrange(1, 5))
        tools, raw = rng.choice([((), b""), (TOOLS, RAW)])
        got = run_inline(known.index(Marked(talk), tools, raw))
        anew = run_inline(RequestIndexer(ALL_PRINTED).index(Marked(talk), tools, raw))
        assert (got.keys, got.prefixes) == (anew.keys, anew.prefixes)
        known.remember(got, run_inline(tree.join(Marked(talk), tools, raw)).prompt)


def test_a_long_history_is_not_indexed_again() -> None:
    tree = TokenTree(family_renderer("qwen3"), "recorded")
    talk = said(Random(1), 100)
    for _ in range(30):
        messages = Marked(talk)
        run_inline(tree.join(messages, (), b""))
        talk = [*talk, *said(Random(2), 2)]
    assert messages.read <= 2 * UNSTABLE_TAIL + REMEMBER_EVERY + 4


@pytest.mark.deep
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**32)), min_size=8, max_size=40))
def test_a_remembered_prefix_changes_no_join(moves: list[tuple[int, int]]) -> None:
    """Plays the same session three times: with no remembered prefixes, with the shortest ones, and with the default
    constants."""
    asked, *others = (_joins(moves, **limits) for limits in (NONE, SHORT, {}))
    assert others == [asked] * len(others)


NONE = {"MIN_REMEMBERED": 10**9}
SHORT = {"MIN_REMEMBERED": 1, "UNSTABLE_TAIL": 1, "REMEMBER_EVERY": 1}


def _joins(moves: list[tuple[int, int]], **limits: int) -> list[object]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(request_index, name, value)
        return _session(moves)


def _session(moves: list[tuple[int, int]]) -> list[object]:
    renderer = family_renderer("qwen3")
    tree = TokenTree(renderer, "recorded")
    finished: list[tuple[Message, ...]] = [(Message(role=Role.USER, content="Read the file."),)]
    found: list[object] = []
    for action, seed in moves:
        rng = Random(seed)
        old = finished[-1 - rng.randrange(min(2, len(finished)))]
        changed = rewritten(rng, old) if action == 0 else echoed(rng, old)
        messages = (*changed, *news(rng, old[-1]))
        joined = run_inline(tree.join(Marked(messages, marks=0), TOOLS, RAW))
        prompt = joined.prompt
        found.append((joined.kind, joined.cause, joined.forked_from, prompt.ids().tolist(), prompt.conversation))
        ids = sampled(rng)
        stream = ReplyStream(
            renderer, prompt_tail=prompt.tail(renderer.tail_start), tools=TOOLS, stop=(), call_id=f"c{len(found)}"
        )
        stream.push(ids)
        reply = stream.finish().message
        tree.commit(prompt, ids, reply)
        finished.append((*messages, reply))
    return found
