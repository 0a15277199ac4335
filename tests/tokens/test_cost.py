"""The cost of one more turn: time that does not grow with the history, and a bounded number of bytes."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Sequence
from time import thread_time

import pytest

from outrider.messages import Message, ParsedMessages, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.tree.tree import TokenTree
from support.steps import run_inline

from .renderers import family_renderer, small_tokenizer
from .strategies import TOOLS

RAW = json.dumps(list(TOOLS)).encode()
WORD = " hello"
WORD_TOKENS = len(small_tokenizer().encode(WORD * 1000)) / 1000


class Watched(Renderer):
    """Counts the prompt ids that each bridge was shown."""

    def __init__(self) -> None:
        super().__init__(small_tokenizer(), "qwen3")
        self.lengths: list[int] = []

    def bridge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        self.lengths.append(len(prompt))
        return super().bridge(prompt, output, new, tools, history)


def text(tokens: float) -> str:
    return WORD * round(tokens / WORD_TOKENS)


class Sent(ParsedMessages):
    """Messages whose bytes are made in advance, like those of a real request."""

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__(messages)
        self._raws = [super(Sent, self).raw(index) for index in range(len(messages))]

    def raw(self, index: int) -> bytes:
        return self._raws[index]

    def head(self, count: int) -> bytes:
        return b"\0".join(self._raws[:count])


class Talk:
    """A conversation of tool calls that grows by one turn at a time."""

    def __init__(self, renderer: Renderer) -> None:
        self.tree = TokenTree(renderer, "recorded")
        self.sent = [Message(role=Role.USER, content="Read the file.")]

    def turn(self, new: Sequence[str], sampled: int) -> None:
        joined = run_inline(self.tree.join(Sent(self.sent), TOOLS, RAW))
        name = f"c{len(self.sent)}"
        call = ToolCall(name, "read_file", f'{{"path": "{name}"}}')
        reply = Message(
            role=Role.ASSISTANT, content=f"Reading {name}.", reasoning=f"I need {name}.", tool_calls=(call,)
        )
        self.tree.commit(joined.prompt, [*range(300, 299 + sampled), 2], reply)
        results = [Message(role=Role.TOOL, content=f"{name}{word}", tool_call_id=name) for word in new]
        self.sent += [reply, *results]

    def ask(self, question: str) -> float:
        """CPU seconds to join one more message and to read out the prompt's ids."""
        messages = Sent([*self.sent, Message(role=Role.USER, content=question)])
        start = thread_time()
        run_inline(self.tree.join(messages, TOOLS, RAW)).prompt.ids()
        return thread_time() - start


def test_one_more_turn_costs_its_own_tokens() -> None:
    """2,000 new tokens cost less than five times as much on a history of 100k tokens as on one of 1k. The ids of the
    history are only copied; to render them again would be work on 50 times as many tokens."""
    short, long = Talk(family_renderer("qwen3")), Talk(family_renderer("qwen3"))
    for talk, turns in ((short, 1), (long, 100)):
        for _ in range(turns):
            talk.turn([text(800)], 200)
    questions = [f"{number}{text(2000)}" for number in range(15)]
    pairs = [(short.ask(question), long.ask(question)) for question in questions]
    quick, slow = (min(times) for times in zip(*pairs, strict=True))
    longest = run_inline(long.tree.join(Sent(long.sent), TOOLS, RAW)).prompt
    assert longest.length > 95_000
    assert slow < 5 * quick, f"{1000 * quick:.2f} ms after 1k tokens, {1000 * slow:.2f} ms after 100k"


def test_the_family_is_shown_only_the_end_of_a_prompt() -> None:
    renderer = Watched()
    talk = Talk(renderer)
    for _ in range(20):
        talk.turn([text(200)], 20)
    assert len(renderer.lengths) == 19
    assert max(renderer.lengths) < 20


@pytest.mark.deep
def test_a_call_of_2000_tokens_keeps_less_than_10_kilobytes() -> None:
    talk = Talk(family_renderer("qwen3"))
    new = [text(750), text(750)]
    for _ in range(10):
        talk.turn(new, 500)
    before = run_inline(talk.tree.join(Sent(talk.sent), TOOLS, RAW)).prompt.length
    gc.collect()
    tracemalloc.start()
    for _ in range(100):
        talk.turn(new, 500)
    tokens = run_inline(talk.tree.join(Sent(talk.sent), TOOLS, RAW)).prompt.length - before
    talk.sent.clear()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] / 100
    tracemalloc.stop()
    assert 1900 < tokens / 100 < 2100
    # Outside the tree, the service keeps 200 bytes more for each call (bench/memory.py).
    assert kept < 9_800, f"{kept:.0f} bytes a call of {tokens / 100:.0f} tokens"
