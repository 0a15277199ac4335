"""A recorded history behind other tools or another system prompt: where the request joins, and which ids the engine
gets."""

from __future__ import annotations

import json

import msgspec
import pytest

from outrider.messages import Message, ParsedMessages, Role, ToolSpec
from outrider.tokens.rendering.chat_template import ChatTemplate
from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.tree.tree import Joined
from outrider.trajectory import ForkCause, JoinKind
from support.steps import run_inline

from .renderers import FAMILIES, family_renderer, small_tokenizer
from .rollout import Rollout
from .strategies import TOOLS, hermes_call, xml_call

IM_END = 2
TRIAGE, EXPERT = (Message(role=Role.SYSTEM, content=f"You are {who}.") for who in ("a helper", "an expert"))
QUESTION, AGAIN = (Message(role=Role.USER, content=text) for text in ("Read the file.", "And again."))
FEWER: tuple[ToolSpec, ...] = ()
OTHERS: tuple[ToolSpec, ...] = ({"type": "function", "function": {"name": "search", "parameters": {}}},)


def spelled(text: str, family: str = "qwen3") -> list[int]:
    """One token for each character, which no tokenizer would choose. If the family's prompts open a thought, the ids
    close it first."""
    opened = [] if family == "qwen3" else small_tokenizer().encode("</think>")
    return [*opened, *(token for char in text for token in small_tokenizer().encode(char)), IM_END]


def result_of(reply: Message, text: str = "ok") -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=reply.tool_calls[0].id)


def within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


class Talk:
    """A conversation of two turns with TRIAGE and TOOLS: the first reply thinks and calls a tool, the second answers.
    No tokenizer would choose their ids."""

    def __init__(self, family: str = "qwen3", rollout: Rollout | None = None) -> None:
        self.rollout = rollout or Rollout(family_renderer(family))
        think = "<think>" if family == "qwen3" else ""
        call = (hermes_call if family == "qwen3" else xml_call)("read_file", {"path": "a"})
        encode = small_tokenizer().encode
        called = [*encode(think), *spelled("Hm.")[:-1], *encode(f"</think>{call}"), IM_END]
        first = self.ask([QUESTION], called)
        reply = self.ask([QUESTION, first, result_of(first)], spelled("It says nothing.", family))
        self.history = [QUESTION, first, result_of(first), reply]

    def join(
        self, history: list[Message], system: Message | None = TRIAGE, tools: tuple[ToolSpec, ...] = TOOLS
    ) -> Joined:
        return self.rollout.join([system, *history] if system else history, tools)

    def ask(
        self,
        history: list[Message],
        output: list[int],
        system: Message | None = TRIAGE,
        tools: tuple[ToolSpec, ...] = TOOLS,
    ) -> Message:
        return self.rollout.answer(self.join(history, system, tools), output, tools=tools)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("system", "tools", "cause"),
    [
        (TRIAGE, FEWER, ForkCause.TOOLS_CHANGED),
        (TRIAGE, TOOLS * 2, ForkCause.TOOLS_CHANGED),
        (EXPERT, TOOLS, ForkCause.SYSTEM_CHANGED),
        (None, TOOLS, ForkCause.SYSTEM_CHANGED),
        (EXPERT, OTHERS, ForkCause.TOOLS_AND_SYSTEM_CHANGED),
        (None, FEWER, ForkCause.TOOLS_AND_SYSTEM_CHANGED),
    ],
)
def test_the_history_keeps_its_ids_behind_another_head(
    family: str, system: Message | None, tools: tuple[ToolSpec, ...], cause: ForkCause
) -> None:
    talk = Talk(family)
    joined = talk.join([*talk.history, AGAIN], system, tools)
    assert (joined.kind, joined.cause, joined.forked_from) == (JoinKind.FORK, cause, 1)
    assert joined.prompt.parent is None
    given = joined.prompt.ids().tolist()
    assert all(within(gave, given) for gave in talk.rollout.gave)
    assert given != talk.rollout.renderer.render([*([system] if system else []), *talk.history, AGAIN], tools)
    reply = talk.rollout.answer(joined, spelled("Still nothing.", family), tools=tools)
    after = talk.join([*talk.history, AGAIN, reply, AGAIN], system, tools)
    assert (after.kind, after.prompt.parent and after.prompt.parent.index) == (JoinKind.APPEND, 2)
    assert talk.rollout.tree.forks == {cause: 1}
    assert len(talk.rollout.check_samples()) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_agents_that_hand_over_and_back_each_go_on_from_their_own_ids(family: str) -> None:
    """Two agents are two rows, however often they take turns."""
    talk = Talk(family)
    history = talk.history
    for number in range(4):
        system, tools = ((EXPERT, OTHERS), (TRIAGE, TOOLS))[number % 2]
        reply = talk.ask([*history, AGAIN], spelled(f"Answer {number}.", family), system, tools)
        history = [*history, AGAIN, reply]
    assert [turn.parent for turn in talk.rollout.turns] == [None, 0, None, 1, 2, 3]
    assert [turn.forked_from for turn in talk.rollout.turns[2:]] == [1, 2, 3, 4]
    assert talk.rollout.tree.forks == {ForkCause.TOOLS_AND_SYSTEM_CHANGED: 4}
    assert all(within(gave, talk.rollout.given[-1]) for gave in talk.rollout.gave[:-1])
    assert [sample.turns for sample in talk.rollout.check_samples()] == [(0, 1, 3, 5), (2, 4)]


def test_thoughts_that_the_client_dropped_are_there_behind_another_head_too() -> None:
    talk = Talk()
    first, *rest = talk.history[1:]
    assert first.reasoning is not None
    silent = [QUESTION, msgspec.structs.replace(first, reasoning=None), *rest, AGAIN]
    joined = talk.join(silent, EXPERT)
    assert within(talk.rollout.gave[0], joined.prompt.ids().tolist())
    reply = talk.rollout.answer(joined, spelled("Yes."), tools=TOOLS)
    assert talk.join([*talk.history, AGAIN, reply, AGAIN], EXPERT).kind is JoinKind.APPEND, "the thoughts are recorded"
    other = [QUESTION, msgspec.structs.replace(first, reasoning="Never."), *rest, AGAIN, reply, AGAIN]
    assert talk.join(other, EXPERT).cause is ForkCause.HISTORY_REWRITTEN


def test_an_edit_as_well_keeps_the_ids_before_it() -> None:
    talk = Talk()
    edited = [*talk.history[:2], result_of(talk.history[1], "edited"), talk.history[3], AGAIN]
    joined = talk.join(edited, EXPERT)
    assert (joined.cause, joined.forked_from) == (ForkCause.SYSTEM_CHANGED, 0)
    given = joined.prompt.ids().tolist()
    assert [within(gave, given) for gave in talk.rollout.gave] == [True, False]


def test_the_same_request_behind_another_head_again_is_a_retry_once_there_is_an_answer() -> None:
    """A failed call leaves no turn, so the next call is the same fork, counted once."""
    talk = Talk()
    one, two = (talk.join([*talk.history, AGAIN], EXPERT) for _ in range(2))
    assert (two.kind, two.cause, two.forked_from) == (JoinKind.FORK, ForkCause.SYSTEM_CHANGED, 1)
    assert two.prompt is one.prompt
    talk.rollout.answer(two, spelled("Yes."), tools=TOOLS)
    assert talk.join([*talk.history, AGAIN], EXPERT).kind is JoinKind.RETRY
    assert talk.rollout.tree.forks == {ForkCause.SYSTEM_CHANGED: 1}
    assert [sample.kind.value for sample in talk.rollout.check_samples()] == ["main", "main"]


def test_a_count_of_tokens_is_of_the_prompt_that_would_be_sent() -> None:
    talk = Talk()
    messages = [EXPERT, *talk.history, AGAIN]
    counted = run_inline(talk.rollout.tree.measure(ParsedMessages(messages), OTHERS, json.dumps(OTHERS).encode()))
    assert counted == talk.rollout.join(messages, OTHERS).prompt.length


def test_without_a_reply_among_it_a_history_is_no_sign_of_a_conversation() -> None:
    talk = Talk()
    assert talk.join([QUESTION], EXPERT).kind is JoinKind.ROOT
    quoted = Message(role=Role.ASSISTANT, content="Never said.")
    assert talk.join([QUESTION, quoted, AGAIN], None, OTHERS).kind is JoinKind.ROOT


def test_a_template_that_shows_tools_among_the_messages_is_rendered_whole() -> None:
    """The renderer cannot find the end of the tools, so it splices nothing. The request still continues the
    conversation."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ tools }}{% endfor %}"
    renderer = Renderer(small_tokenizer(), "qwen3", template=ChatTemplate(source, special={}))
    assert renderer.render_split([TRIAGE, QUESTION], TOOLS) is None
    rollout = Rollout(renderer)
    reply = rollout.answer(rollout.join([TRIAGE, QUESTION], TOOLS), spelled("Yes."), tools=TOOLS)
    messages = ParsedMessages([EXPERT, QUESTION, reply, AGAIN])
    joined = run_inline(rollout.tree.join(messages, TOOLS, json.dumps(TOOLS).encode()))
    assert (joined.cause, joined.forked_from) == (ForkCause.SYSTEM_CHANGED, 0)
    assert joined.prompt.ids().tolist() == renderer.render([EXPERT, QUESTION, reply, AGAIN], TOOLS)


def test_a_prompt_of_system_messages_alone_has_no_history() -> None:
    assert family_renderer("qwen3").render_split([TRIAGE], TOOLS) is None
    rollout = Rollout(family_renderer("qwen3"))
    reply = rollout.answer(rollout.join([TRIAGE]), spelled("Yes."))
    assert rollout.join([EXPERT, reply, AGAIN]).kind is JoinKind.ROOT
