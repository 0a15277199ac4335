"""Where a request joins the tree, and why: one hand-written case for each join and cause."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import ContextOverflow, RequestError, TooLarge
from outrider.messages import Message, ParsedMessages, Role, ToolCall, image_from_bytes
from outrider.tokens.rendering.tokenizer import MAX_SLOW_TEXT
from outrider.tokens.tree.request_index import MAX_TOOL_VALUES
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import BranchKind, BranchPolicy, FinishReason, ForkCause, JoinKind
from support.steps import run_inline

from .renderers import FAMILIES, family_renderer, small_tokenizer
from .rollout import Rollout
from .strategies import TOOLS, hermes_call

IM_END = 2
SYSTEM = Message(role=Role.SYSTEM, content="You are a helpful assistant.")
QUESTION = Message(role=Role.USER, content="Read the file.")
AGAIN = Message(role=Role.USER, content="And again.")
CALL = hermes_call("read_file", {"path": "notes.txt", "limit": 2.0})
THOUGHT = "<think>\nI must read.\n</think>\n\n"


def ids(text: str, *, end: bool = True) -> list[int]:
    return small_tokenizer().encode(text) + ([IM_END] if end else [])


def result_of(reply: Message, text: str = "ok") -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=reply.tool_calls[0].id)


def outcome(joined: Joined) -> tuple[JoinKind, ForkCause | None, int | None]:
    return joined.kind, joined.cause, joined.prompt.parent.index if joined.prompt.parent else None


ROOT = (JoinKind.ROOT, None, None)
REWRITTEN = (JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, None)
SYSTEM_CHANGED = (JoinKind.FORK, ForkCause.SYSTEM_CHANGED, None)
REFUSED = (JoinKind.FORK, ForkCause.BRIDGE_REFUSED, None)


def rewritten_from(parent: int) -> tuple[JoinKind, ForkCause, int]:
    return JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, parent


def append(parent: int) -> tuple[JoinKind, None, int]:
    return JoinKind.APPEND, None, parent


def sibling(parent: int) -> tuple[JoinKind, ForkCause, int]:
    return JoinKind.FORK, ForkCause.SIBLING, parent


class Talk:
    """A rollout whose first turn answers QUESTION with `said`."""

    def __init__(self, said: str = THOUGHT + CALL, *, end: bool = True) -> None:
        self.rollout = Rollout(family_renderer("qwen3"))
        first = self.rollout.join([SYSTEM, QUESTION], TOOLS)
        assert outcome(first) == ROOT
        self.reply = self.rollout.answer(first, ids(said, end=end), tools=TOOLS)

    def then(self, *messages: Message) -> Joined:
        return self.rollout.join([SYSTEM, QUESTION, *messages], TOOLS)


def test_new_messages_append() -> None:
    talk = Talk()
    second = talk.then(talk.reply, result_of(talk.reply))
    assert outcome(second) == append(0)
    reply = talk.rollout.answer(second, ids("Done."), tools=TOOLS)
    assert outcome(talk.then(talk.reply, result_of(talk.reply), reply, AGAIN)) == append(1)


@pytest.mark.parametrize(
    "change",
    [
        {"reasoning": None},
        {"reasoning": "\nI must read. "},
        {"content": "  \n"},
        {"arguments": '{"limit":2,"path":"notes.txt"}'},
        {"arguments": '{\n  "path": "notes.\\u0074xt", "limit": 2.0\n}'},
        {"id": "other"},
        {"reasoning": "I must read.I must read."},
        {"reasoning": "I must read.\n\nI must read.\n"},
    ],
    ids=str,
)
def test_what_clients_do_to_an_echo_changes_nothing(change: dict[str, str | None]) -> None:
    talk = Talk()
    assert outcome(talk.then(altered(talk.reply, change), result_of(talk.reply))) == append(0)


@pytest.mark.parametrize(
    "change",
    [
        {"reasoning": "I must not read."},
        {"content": "Sure."},
        {"arguments": '{"path": "notes.txt", "limit": 3}'},
        {"arguments": '{"path": "notes.txt", "limit": "2"}'},
        {"arguments": '{"path": "notes.txt"}'},
        {"name": "write_file"},
    ],
    ids=str,
)
def test_a_changed_echo_forks(change: dict[str, str | None]) -> None:
    talk = Talk()
    joined = talk.then(altered(talk.reply, change), result_of(talk.reply))
    assert outcome(joined) == REWRITTEN
    assert joined.forked_from == 0


def altered(reply: Message, change: dict[str, str | None]) -> Message:
    of_call = {name: value for name, value in change.items() if name in ("id", "name", "arguments")}
    of_message = {name: value for name, value in change.items() if name not in of_call}
    calls = tuple(msgspec.structs.replace(call, **of_call) for call in reply.tool_calls)
    return msgspec.structs.replace(reply, tool_calls=calls, **of_message)


@pytest.mark.parametrize("change", [{"content": "Read the file. "}, {"role": Role.SYSTEM}], ids=str)
def test_a_changed_first_question_is_another_conversation(change: dict[str, str]) -> None:
    talk = Talk()
    question = msgspec.structs.replace(QUESTION, **change)
    joined = talk.rollout.join([SYSTEM, question, talk.reply, AGAIN], TOOLS)
    assert outcome(joined) == ROOT
    assert joined.prompt.conversation == 1


def test_other_tools_are_another_conversation() -> None:
    talk = Talk()
    assert outcome(talk.rollout.join([SYSTEM, QUESTION])) == ROOT
    assert outcome(talk.rollout.join([SYSTEM, QUESTION], TOOLS * 2)) == ROOT


def test_two_answers_to_one_tool_call_are_siblings() -> None:
    talk = Talk()
    assert outcome(talk.then(talk.reply, result_of(talk.reply, "one"))) == append(0)
    second = talk.then(talk.reply, result_of(talk.reply, "two"))
    assert outcome(second) == sibling(0)
    assert second.forked_from == 0
    assert talk.rollout.tree.forks == {ForkCause.SIBLING: 1}


def test_an_edit_further_back_keeps_the_ids_before_it() -> None:
    talk = Talk()
    reply = talk.rollout.answer(talk.then(talk.reply, result_of(talk.reply)), ids("Done."), tools=TOOLS)
    joined = talk.then(talk.reply, result_of(talk.reply, "edited"), reply, AGAIN)
    assert outcome(joined) == rewritten_from(0)
    assert joined.forked_from == 1
    again = talk.rollout.answer(joined, ids("Again."), tools=TOOLS)
    assert outcome(talk.then(talk.reply, result_of(talk.reply, "edited"), reply, AGAIN, again, AGAIN)) == append(2)
    early = talk.then(AGAIN)
    assert outcome(early) == REWRITTEN
    assert early.forked_from == 0


def test_a_reminder_that_moves_forks_from_the_last_turn_before_it() -> None:
    """A client adds a note behind its newest message and removes it in the next request. Every request keeps the ids of
    turn 0, the last turn before the first note."""
    talk = Talk("Hello.")
    note = Message(role=Role.USER, content="Remember the plan.")
    history = [talk.reply]
    for number in range(1, 4):
        joined = talk.then(*history, AGAIN, note)
        assert outcome(joined) == (append(0) if number == 1 else rewritten_from(0))
        reply = talk.rollout.answer(joined, ids(f"Reply {number}."), tools=TOOLS)
        history += [AGAIN, reply]
    assert {sample.turns for sample in talk.rollout.check_samples()} == {(0, 1), (0, 2), (0, 3)}


def test_what_follows_an_edit_is_rendered_as_the_family_renders_it() -> None:
    for family in FAMILIES:
        rollout = Rollout(family_renderer(family))
        first = rollout.answer(rollout.join([SYSTEM, QUESTION], TOOLS), ids("</think>\n\nHello."), tools=TOOLS)
        quoted = [Message(role=Role.ASSISTANT, content="Never said.", reasoning=thought) for thought in ("Hm.", None)]
        late = Message(role=Role.SYSTEM, content="Late.")
        joined = rollout.join([SYSTEM, QUESTION, first, AGAIN, late, quoted[0], AGAIN, quoted[1], AGAIN], TOOLS)
        assert outcome(joined) == rewritten_from(0)
        rollout.answer(joined, ids("Yes."), tools=TOOLS)
        rollout.check_samples()


def test_where_the_template_would_drop_reasoning_a_rewritten_history_is_rendered_whole() -> None:
    rollout = Rollout(family_renderer("qwen3"), "template")
    reply = rollout.answer(rollout.join([QUESTION], TOOLS), ids(THOUGHT + CALL), tools=TOOLS)
    quoted = Message(role=Role.ASSISTANT, content="Never said.")
    result = result_of(reply)
    assert outcome(rollout.join([QUESTION, reply, result, quoted, AGAIN], TOOLS)) == REWRITTEN
    calling = Message(role=Role.ASSISTANT, tool_calls=reply.tool_calls)
    assert outcome(rollout.join([QUESTION, reply, result, calling, result], TOOLS)) == rewritten_from(0)


def test_a_message_dropped_or_inserted_forks() -> None:
    talk = Talk("Hello.")
    reply = talk.rollout.answer(talk.then(talk.reply, AGAIN), ids("Done."), tools=TOOLS)
    assert outcome(talk.then(talk.reply, reply, AGAIN)) == REWRITTEN
    assert outcome(talk.then(talk.reply, AGAIN, AGAIN, reply, AGAIN)) == rewritten_from(0)
    assert outcome(talk.rollout.join([QUESTION, talk.reply, AGAIN], TOOLS)) == SYSTEM_CHANGED


def test_of_replies_that_read_alike_the_one_with_the_clients_call_ids_is_gone_on_with() -> None:
    talk = Talk(CALL)
    other = talk.rollout.answer(talk.then(), ids(CALL), tools=TOOLS)
    assert other.tool_calls[0].id != talk.reply.tool_calls[0].id
    for parent, reply in enumerate((talk.reply, other)):
        assert outcome(talk.then(reply, result_of(reply, f"{parent}"))) == append(parent)
    renamed = altered(other, {"id": "made-up"})
    assert outcome(talk.then(renamed, result_of(renamed, "2"))) == sibling(1)


def test_the_same_request_again_is_a_retry() -> None:
    talk = Talk("Hello.")
    retry = talk.then()
    assert (retry.kind, retry.forked_from) == (JoinKind.RETRY, 0)
    other = talk.rollout.answer(retry, ids("Hi."), tools=TOOLS)
    assert outcome(talk.then(other, AGAIN)) == append(1)
    assert outcome(talk.then(talk.reply, AGAIN)) == append(0)
    again = talk.then(talk.reply, AGAIN)
    assert again.kind is JoinKind.RETRY
    assert again.prompt.parent is not None


def test_equal_replies_with_different_reasoning_are_told_apart() -> None:
    talk = Talk("<think>\none\n</think>\n\nYes.")
    other = talk.rollout.answer(talk.then(), ids("<think>\ntwo\n</think>\n\nYes."), tools=TOOLS)
    assert outcome(talk.then(talk.reply, AGAIN)) == append(0)
    assert outcome(talk.then(other, AGAIN)) == append(1)


def test_quoted_reasoning_is_part_of_what_the_model_saw() -> None:
    """If a request changes the reasoning of an assistant message that was not sampled in this session, it is no
    retry."""
    rollout = Rollout(family_renderer("qwen3"))
    quoted = Message(role=Role.ASSISTANT, content="Yes.", reasoning="one")
    first = rollout.join([QUESTION, quoted, AGAIN])
    reply = rollout.answer(first, ids("Fine."))
    for reasoning in ("two", "three"):
        other = msgspec.structs.replace(quoted, reasoning=reasoning)
        assert outcome(rollout.join([QUESTION, other, AGAIN])) == REWRITTEN
        assert outcome(rollout.join([QUESTION, other, AGAIN, reply, AGAIN])) == REWRITTEN
    dropped = msgspec.structs.replace(quoted, reasoning=None)
    assert rollout.join([QUESTION, dropped, AGAIN]).kind is JoinKind.RETRY
    assert outcome(rollout.join([QUESTION, dropped, AGAIN, reply, AGAIN])) == append(0)


def test_reasoning_added_to_a_quoted_message_is_a_change() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    quoted = Message(role=Role.ASSISTANT, content="Yes.")
    reply = rollout.answer(rollout.join([QUESTION, quoted, AGAIN]), ids("Fine."))
    thinking = msgspec.structs.replace(quoted, reasoning="new")
    assert outcome(rollout.join([QUESTION, thinking, AGAIN])) == REWRITTEN
    assert outcome(rollout.join([QUESTION, thinking, AGAIN, reply, AGAIN])) == REWRITTEN


def test_an_aborted_turn_has_no_continuation() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    reply = rollout.answer(rollout.join([QUESTION]), ids("Hel", end=False), finish=FinishReason.ABORT)
    retry = rollout.join([QUESTION])
    assert (retry.kind, retry.forked_from) == (JoinKind.RETRY, 0)
    assert outcome(rollout.join([QUESTION, reply, AGAIN])) == REWRITTEN


def test_a_call_that_failed_left_no_turn() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    rollout.join([QUESTION])
    retry = rollout.join([QUESTION])
    assert (retry.kind, retry.forked_from) == (JoinKind.RETRY, None)
    rollout.answer(retry, ids("Hello."))
    assert [turn.conversation for turn in rollout.turns] == [0]


def test_parallel_calls_commit_in_any_order() -> None:
    rollout = Rollout(family_renderer("qwen3"))
    title = Message(role=Role.SYSTEM, content="Write a title.")
    main, side = rollout.join([SYSTEM, QUESTION]), rollout.join([title, QUESTION])
    named = rollout.answer(side, ids("A title."))
    reply = rollout.answer(main, ids("Hello."))
    one = rollout.join([SYSTEM, QUESTION, reply, AGAIN])
    two = rollout.join([SYSTEM, QUESTION, reply, QUESTION])
    assert (outcome(one), outcome(two)) == (append(1), sibling(1))
    assert outcome(rollout.join([title, QUESTION, named, AGAIN])) == append(0)
    rollout.answer(two, ids("Two."))
    rollout.answer(one, ids("One."))
    samples = rollout.check_samples()
    assert [(sample.kind.value, sample.turns) for sample in samples] == [
        ("main", (1, 3)),
        ("main", (1, 2)),
    ]
    kept = dict.fromkeys(BranchKind, BranchPolicy.MASK)
    assert [sample.turns for sample in rollout.check_samples(kept) if sample.label == "title"] == [(0,)]


def test_thinking_that_was_stopped_open_cannot_be_gone_on_with() -> None:
    talk = Talk("<think>\nI must")
    joined = talk.then(talk.reply, AGAIN)
    assert outcome(joined) == REFUSED
    assert joined.forked_from == 0
    assert talk.rollout.tree.forks == {ForkCause.BRIDGE_REFUSED: 1}
    assert talk.then(talk.reply, AGAIN).kind is JoinKind.RETRY
    assert talk.rollout.tree.forks == {ForkCause.BRIDGE_REFUSED: 1}
    reply = talk.rollout.answer(joined, ids("Hello."), tools=TOOLS)
    assert outcome(talk.then(talk.reply, AGAIN, reply, AGAIN)) == append(1)


def test_a_truncated_turn_is_closed_and_gone_on_with() -> None:
    for said in ("Hello wor", "<think>\nI must", '<tool_call>\n{"name": "read'):
        talk = Talk(said, end=False)
        assert outcome(talk.then(talk.reply, AGAIN)) == append(0)


def test_ids_after_the_stop_token_are_never_cut_off() -> None:
    talk = Talk("Hello.<|im_end|>, more", end=False)
    assert talk.reply.content == "Hello."
    assert outcome(talk.then(talk.reply, AGAIN)) == REFUSED


def test_template_history_forks_at_a_user_message() -> None:
    for history, expected in (
        ("recorded", sibling(0)),
        ("template", (JoinKind.FORK, ForkCause.TEMPLATE_HISTORY, None)),
    ):
        rollout = Rollout(family_renderer("qwen3"), history)  # type: ignore[arg-type]  # one of the literals
        reply = rollout.answer(rollout.join([QUESTION], TOOLS), ids(THOUGHT + CALL), tools=TOOLS)
        result = result_of(reply)
        assert outcome(rollout.join([QUESTION, reply, result], TOOLS)) == append(0)
        other = msgspec.structs.replace(result, content="other")
        fork = rollout.join([QUESTION, reply, other, AGAIN], TOOLS)
        assert outcome(fork) == expected


def test_a_request_that_ends_with_a_reply_is_rendered_whole() -> None:
    talk = Talk("Hello.")
    assert outcome(talk.then(talk.reply)) == REWRITTEN


def test_a_request_that_cannot_be_read_or_rendered_changes_nothing() -> None:
    rollout = Rollout(family_renderer("qwen3.5"))
    image = Message(role=Role.USER, parts=(image_from_bytes("image/png", b"1"),))
    with pytest.raises(RequestError):
        rollout.join([QUESTION, image])
    with pytest.raises(RequestError):
        run_inline(rollout.tree.join(Unreadable([QUESTION]), (), b""))
    with pytest.raises(RequestError):
        rollout.join([])
    assert outcome(rollout.join([QUESTION])) == ROOT
    assert rollout.join([QUESTION]).prompt.conversation == 0


class Unreadable(ParsedMessages):
    def parse(self, index: int) -> Message:
        raise RequestError(f"messages[{index}] is malformed")


def test_arguments_nested_without_end_are_only_text() -> None:
    deep = "[" * 30_000
    rollout = Rollout(family_renderer("qwen3"))
    quoted = Message(role=Role.ASSISTANT, tool_calls=(ToolCall("c", "read_file", deep),))
    assert outcome(rollout.join([QUESTION, quoted, result_of(quoted)])) == ROOT


def test_a_text_that_takes_too_much_memory_to_encode_is_refused() -> None:
    tree = TokenTree(family_renderer(), "recorded")
    text = Message(role=Role.USER, content="\u00fc" * (MAX_SLOW_TEXT + 1))
    with pytest.raises(TooLarge, match="too long to be encoded"):
        run_inline(tree.join(ParsedMessages([text]), (), b""))
    run_inline(tree.join(ParsedMessages([Message(role=Role.USER, content="go on")]), (), b""))


def test_a_text_that_does_not_fit_is_refused_before_all_of_it_is_encoded() -> None:
    tree = TokenTree(family_renderer(), "recorded")
    text = Message(role=Role.USER, content="a word " * 600_000)
    steps = tree.join(ParsedMessages([text]), (), b"", context=4096)
    with pytest.raises(ContextOverflow, match="the model's context is 4096"):
        run_inline(steps)
    assert tree.forks == {}


def test_tools_that_take_too_long_to_write_are_refused() -> None:
    raw = b"[" + b"1," * MAX_TOOL_VALUES + b"1]"
    with pytest.raises(TooLarge, match="JSON values"):
        run_inline(
            TokenTree(family_renderer(), "recorded").join(
                ParsedMessages([Message(role=Role.USER, content="a")]), TOOLS, raw
            )
        )
