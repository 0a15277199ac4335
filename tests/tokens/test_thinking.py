"""Thinking switched for one turn changes only the end of its prompt; every recorded id stays."""

from __future__ import annotations

from typing import Any

import pytest
import renderers
from pydantic import TypeAdapter

from outrider.errors import RequestError
from outrider.messages import Message, ParsedMessages, Role
from outrider.tokens.rendering.chat_template import ChatTemplate, conversation_dicts, new_message_dicts
from outrider.tokens.rendering.renderer import Renderer, ThinkingSwitch
from outrider.tokens.tree.request_index import PromptNode
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import ForkCause, JoinKind
from support.steps import run_inline

from .renderers import FAMILIES, family_renderer, small_tokenizer

ASKED = Message(role=Role.USER, content="Where is it?")
SAID = Message(role=Role.ASSISTANT, content="There.")
MORE = Message(role=Role.USER, content="Where?")
OUTPUT = [*small_tokenizer().encode("There."), 2]


def answered(prompt: PromptNode, family: str) -> list[int]:
    """The sampled ids of a reply. If the prompt opens a thought, the ids close it first."""
    renderer = family_renderer(family)
    thought = "hm\n</think>\n\n" if renderer.opens_reasoning(prompt.tail(renderer.tail_start)) else ""
    return [*small_tokenizer().encode(f"{thought}There."), 2]


def theirs(family: str, thinking: bool) -> Any:
    """The family's renderer of the `renderers` package, with thinking on or off."""
    config = TypeAdapter(renderers.RendererConfig).validate_python(
        {"name": family, "thinking_retention": "all", "enable_thinking": thinking}
    )
    return renderers.create_renderer(small_tokenizer(), config)


def joined(tree: TokenTree, *messages: Message, thinking: bool | None = None) -> Joined:
    return run_inline(tree.join(ParsedMessages(messages), (), b"", thinking=thinking))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_the_familys_own_with_thinking_as_asked_for(family: str, thinking: bool) -> None:
    tree = TokenTree(family_renderer(family), "recorded")
    first = joined(tree, ASKED, thinking=thinking)
    own = theirs(family, thinking)
    prompt = first.prompt.ids().tolist()
    assert prompt == own.render_ids(conversation_dicts([ASKED], late_system=True), add_generation_prompt=True)
    output = answered(first.prompt, family)
    tree.commit(first.prompt, output, SAID)
    second = joined(tree, ASKED, SAID, MORE, thinking=thinking)
    bridged = own.bridge_to_next_turn(prompt, output, new_message_dicts([MORE], late_system=True))
    assert second.prompt.ids().tolist() == list(bridged.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_switching_midway_appends_to_every_recorded_id(family: str) -> None:
    tree = TokenTree(family_renderer(family), "recorded")
    first = joined(tree, ASKED)
    output = answered(first.prompt, family)
    tree.commit(first.prompt, output, SAID)
    known = [*first.prompt.ids().tolist(), *output]
    ends = {}
    for thinking, kind in ((False, JoinKind.APPEND), (True, JoinKind.FORK)):
        second = joined(tree, ASKED, SAID, MORE, thinking=thinking)
        ids = second.prompt.ids().tolist()
        assert ids[: len(known)] == known
        assert second.kind is kind
        assert second.cause is (ForkCause.SIBLING if kind is JoinKind.FORK else None)
        ends[thinking] = small_tokenizer().decode(ids[len(known) :])
        assert (
            run_inline(tree.measure(ParsedMessages([ASKED, SAID, MORE]), (), b"", thinking=thinking))
            == second.prompt.length
        )
    assert ends[False].endswith("<think>\n\n</think>\n\n")
    assert not ends[True].endswith("</think>\n\n")


def test_the_same_request_is_a_retry_only_with_the_same_thinking() -> None:
    tree = TokenTree(family_renderer("qwen3"), "recorded")
    first = joined(tree, ASKED)
    tree.commit(first.prompt, OUTPUT, SAID)
    assert joined(tree, ASKED, thinking=True).prompt is first.prompt  # thinking is on by default
    switched = joined(tree, ASKED, thinking=False)
    assert (switched.kind, switched.cause, switched.forked_from) == (JoinKind.FORK, ForkCause.SIBLING, 0)
    assert joined(tree, ASKED, thinking=False).prompt is switched.prompt
    assert joined(tree, ASKED).prompt is first.prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_whether_a_prompt_thinks_is_read_from_its_end(family: str) -> None:
    renderer = family_renderer(family)
    tree = TokenTree(renderer, "recorded")
    assert renderer.switches_thinking
    assert not renderer.opens_reasoning(joined(tree, ASKED, thinking=False).prompt.tail(renderer.tail_start))
    assert renderer.opens_reasoning(joined(tree, ASKED, thinking=True).prompt.tail(renderer.tail_start)) == (
        family != "qwen3"
    )


def test_a_template_of_the_models_own_is_not_switched() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special={})
    renderer = Renderer(small_tokenizer(), "qwen3", template=template)
    assert not renderer.switches_thinking
    assert renderer.thinking_switch(False) is None


def test_a_prompt_with_another_end_is_refused() -> None:
    class Odd(Renderer):
        def thinking_switch(self, thinking: bool | None) -> ThinkingSwitch | None:
            return ThinkingSwitch(False, [1, 1, 1], [2])

    tree = TokenTree(Odd(small_tokenizer(), "qwen3"), "recorded")
    with pytest.raises(RequestError, match="thinking cannot be switched"):
        joined(tree, ASKED, thinking=False)
