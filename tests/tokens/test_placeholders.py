"""A layout whose placeholders are filled has the same ids as the family's rendering without placeholders."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.messages import Message, Role, ToolCall
from outrider.tokens.rendering import renderer as renderers
from outrider.tokens.rendering.renderer import PlaceholderTokenizer, Renderer
from outrider.tokens.rendering.tokenizer import SHORT_TEXT

from .renderers import FAMILIES, family_renderer, small_tokenizer
from .strategies import TOOLS, arguments, hermes_call, plain

LONG = "The quick brown fox jumps over it. "
long_texts = st.tuples(plain, st.sampled_from(["", LONG, LONG * 3, " " * 40, "\n" * 40]), plain).map("".join)
messages = st.one_of(
    st.builds(Message, role=st.just(Role.USER), content=long_texts),
    st.builds(Message, role=st.just(Role.TOOL), content=long_texts, tool_call_id=st.just("c1")),
    st.builds(
        Message,
        role=st.just(Role.ASSISTANT),
        content=long_texts,
        reasoning=st.none() | long_texts,
        tool_calls=st.lists(
            st.builds(ToolCall, st.just("c1"), st.just("read_file"), arguments.map(str)), max_size=2
        ).map(tuple),
    ),
)
systems = st.none() | st.builds(Message, role=st.just(Role.SYSTEM), content=long_texts)


@cache
def plain_family(family: str) -> Renderer:
    """The same renderer without the layout step."""
    made = Renderer(small_tokenizer(), family)
    made._placeholders = None
    made._recorded_family = renderers._create(small_tokenizer(), family, retention="all")
    made._template_family = renderers._create(small_tokenizer(), family, retention=None)
    return made


@pytest.mark.parametrize("family", FAMILIES)
@given(st.lists(messages, max_size=4), systems, long_texts, st.sampled_from([TOOLS, ()]))
def test_prompts_are_the_same(
    family: str, history: list[Message], system: Message | None, last: str, tools: Any
) -> None:
    asked = [*([system] if system else []), Message(role=Role.USER, content=LONG), *history]
    asked.append(Message(role=Role.USER, content=last))
    assert family_renderer(family).render(asked, tools) == plain_family(family).render(asked, tools)


@pytest.mark.parametrize("family", FAMILIES)
@given(st.lists(messages.filter(lambda message: message.role is not Role.ASSISTANT), min_size=1, max_size=3))
def test_bridges_are_the_same(family: str, new: list[Message]) -> None:
    prompt = plain_family(family).render([Message(role=Role.USER, content=LONG)], TOOLS)
    output = [*small_tokenizer().encode(hermes_call("read_file", {"path": "a"})), *plain_family(family).stop_ids[:1]]
    for history in ("recorded", "template"):
        ours = family_renderer(family).bridge(prompt, output, new, TOOLS, history)
        assert ours == plain_family(family).bridge(prompt, output, new, TOOLS, history)


def test_a_layout_that_failed_leaves_the_next_one_alone() -> None:
    placeholders = PlaceholderTokenizer(small_tokenizer())
    placeholders.encode("left over " * SHORT_TEXT)
    laid_out = [5, *placeholders.encode(LONG), *placeholders.encode("short"), *placeholders.encode(LONG * 2)]
    encode = small_tokenizer().encode
    assert placeholders.fill([laid_out])[0] == [5, *encode(LONG), *encode("short"), *encode(LONG * 2)]
