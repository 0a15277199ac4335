"""Long texts that are encoded ahead: the same prompt, and no long text is encoded while others wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from outrider.messages import Message, ParsedMessages, Role
from outrider.tokens.renderer import FamilyRenderer
from outrider.tokens.tokenizer import LARGE_TEXT, Unencoded
from outrider.tokens.tree import Joined, TokenTree

from .renderers import FAMILIES, family_renderer
from .test_skeleton import plain_family

MANY = [Message(role=Role.USER, content=f"{place} many wörds " * (LARGE_TEXT // 50)) for place in range(5)]
LONG = [Message(role=Role.USER, content="one long wörd " * (LARGE_TEXT // 10))]
SHORT = [Message(role=Role.USER, content="a few words, longer than a separator")]
REPLY = Message(role=Role.ASSISTANT, content="Yes, and so it is.")


def joined_sparing(tree: TokenTree, messages: list[Message]) -> tuple[Joined, int]:
    """As a conversation does it, and how many times text had to be encoded ahead."""
    known: dict[str, list[int]] = {}
    tokenizer = tree._renderer.tokenizer
    for tries in range(len(messages) + 2):
        try:
            with tokenizer.sparing(known):
                return tree.join(ParsedMessages(messages), (), b""), tries
        except Unencoded as missing:
            known |= tokenizer.encode_ahead(missing.texts)
    raise AssertionError("the same texts are wanted again and again")


def kinds(families: Sequence[str]) -> Iterator[FamilyRenderer]:
    for family in families:
        yield from (family_renderer(family), plain_family(family))


@pytest.mark.parametrize("families", [FAMILIES[:1], pytest.param(FAMILIES[1:], marks=pytest.mark.deep)], ids=repr)
@pytest.mark.parametrize("messages", [SHORT, LONG, MANY], ids=["short", "long", "many"])
def test_what_is_encoded_ahead_makes_the_same_prompts(messages: list[Message], families: Sequence[str]) -> None:
    for renderer in kinds(families):
        tree, other = TokenTree(renderer, "recorded"), TokenTree(renderer, "recorded")
        first, tries = joined_sparing(tree, messages)
        assert first.prompt.delta == other.join(ParsedMessages(messages), (), b"").prompt.delta
        assert (tries == 0) is (messages is SHORT)
        output = [*renderer.tokenizer.encode(REPLY.content), *renderer.stop_ids[:1]]
        for one in (tree, other):
            prompt = one.join(ParsedMessages(messages), (), b"").prompt
            one.commit(prompt, output, REPLY)
        more = [*messages, REPLY, *messages]
        second, _ = joined_sparing(tree, more)
        wanted = other.join(ParsedMessages(more), (), b"")
        assert (second.kind, second.prompt.delta) == (wanted.kind, wanted.prompt.delta)


def test_all_texts_of_a_layout_are_wanted_at_once() -> None:
    assert joined_sparing(TokenTree(family_renderer(), "recorded"), MANY)[1] == 1


def test_outside_of_a_sparing_block_any_text_is_encoded() -> None:
    tokenizer = family_renderer().tokenizer
    with pytest.raises(Unencoded), tokenizer.sparing({}):
        tokenizer.encode(LONG[0].content)
    assert tokenizer.encode(LONG[0].content) == tokenizer.encode_ahead([LONG[0].content])[LONG[0].content]
