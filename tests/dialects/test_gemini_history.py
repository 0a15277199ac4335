"""Calls that come back without ids, or with other ids, are matched to the recorded calls, and results to their
calls."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.dialects.base import Memory
from outrider.dialects.gemini.contents import signature
from outrider.dialects.gemini.history import KEPT_READERS
from outrider.messages import Message, ToolCall
from support.gemini import DIALECT, answered, called, completed, messages, model, read, said, text, user

HI = user(text("list"))
GO = user(text("go on"))


def ids(message: Message) -> list[str]:
    return [call.id for call in message.tool_calls]


def answer(memory: Memory, *contents: Any, reply: Message) -> None:
    """Send one request and answer it with `reply`."""
    DIALECT.reply(read(*contents, memory=memory), completed(reply))


def bash(*ids: str, content: str = "") -> Message:
    return said(content, tool_calls=tuple(ToolCall(id, "bash", '{"command": "ls", "n": 1.0}') for id in ids))


LS = called("bash", command="ls", n=1)


@pytest.mark.parametrize(
    "call",
    [
        called("bash", "call_x", command="ls", n=1),
        called("bash", "bash__call_x", command="ls", n=1),
        called("bash", "made-by-the-client", n=1, command="ls"),
        LS,
        {**LS, "thoughtSignature": signature("call_x")},
        {**LS, "thoughtSignature": "skip_thought_signature_validator"},
    ],
)
@pytest.mark.parametrize("answer_id", [None, "call_x", "bash__call_x", "made-by-the-client"])
def test_a_call_is_ours_whatever_became_of_its_id(call: dict[str, Any], answer_id: str | None) -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_x"))
    echoed = messages(read(HI, model(call), user(answered("bash", "a.txt", answer_id)), memory=memory))
    assert ids(echoed[1]) == ["call_x"]
    assert echoed[2].tool_call_id == "call_x"


def test_a_signature_alone_is_enough() -> None:
    signed = {**LS, "thoughtSignature": signature("call_é").replace("+", "-").replace("/", "_")}
    assert ids(messages(read(HI, model(signed), GO))[1]) == ["call_é"]


def test_the_same_call_at_two_places_is_two_calls() -> None:
    memory: Memory = {}
    first = user(answered("bash", "a"))
    answer(memory, HI, reply=bash("call_1st"))
    answer(memory, HI, model(LS), first, reply=bash("call_2nd"))
    echoed = messages(read(HI, model(LS), first, model(LS), user(answered("bash", "b")), memory=memory))
    assert [ids(echoed[1]), ids(echoed[3])] == [["call_1st"], ["call_2nd"]]
    assert [echoed[2].tool_call_id, echoed[4].tool_call_id] == ["call_1st", "call_2nd"]


def test_two_agents_that_call_the_same_are_told_apart_by_what_came_before() -> None:
    memory: Memory = {}
    other = user(text("list, too"))
    answer(memory, HI, reply=bash("call_1st"))
    answer(memory, other, reply=bash("call_2nd"))
    done = user(answered("bash", "a"))
    assert ids(messages(read(HI, model(LS), done, memory=memory))[1]) == ["call_1st"]
    assert ids(messages(read(other, model(LS), done, memory=memory))[1]) == ["call_2nd"]


def test_parallel_calls_of_one_tool_are_answered_in_order_or_by_id() -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_1", "call_2"))
    in_order = read(HI, model(LS, LS), user(answered("bash", "a"), answered("bash", "b")), memory=memory)
    assert [m.tool_call_id for m in messages(in_order)[2:]] == ["call_1", "call_2"]
    one = called("bash", "x", command="ls", n=1)
    two = called("bash", "y", command="ls", n=1)
    swapped = read(HI, model(one, two), user(answered("bash", "b", "y"), answered("bash", "a", "z")), memory=memory)
    assert [m.tool_call_id for m in messages(swapped)[2:]] == ["call_2", "call_1"]


def test_the_chunks_of_a_stream_sent_back_as_they_came_are_one_message() -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_x", content="Let me see."))
    echoed = read(HI, model(text("Let me ")), model(text("see.")), model(LS), model(text("")), GO, memory=memory)
    [_, reply, _] = messages(echoed)
    assert (reply.content, ids(reply)) == ("Let me see.", ["call_x"])


def test_a_history_nobody_knows_is_numbered_and_stays_so() -> None:
    memory: Memory = {}
    start = [HI, model(LS, LS), user(answered("bash", "a"), answered("bash", "b"))]
    first = read(*start, memory=memory)
    assert ids(messages(first)[1]) == ["call_0", "call_1"]
    assert [m.tool_call_id for m in messages(first)[2:]] == ["call_0", "call_1"]
    DIALECT.reply(first, completed(bash("call_x", "call_y")))
    again = read(*start, model(LS, LS), GO, memory=memory)
    assert [ids(messages(again)[1]), ids(messages(again)[4])] == [["call_0", "call_1"], ["call_x", "call_y"]]
    raws = [[request.messages.raw(index) for index in range(4)] for request in (first, again)]
    assert raws[0] == raws[1]


def test_a_history_that_was_spelled_anew_still_finds_its_calls_in_order() -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_1st"))
    answer(memory, HI, model(LS), user(answered("bash", "a")), reply=bash("call_2nd"))
    other = {"parts": [text("list")], "role": "user"}
    echoed = messages(read(other, model(LS), user(answered("bash", "a")), model(LS), GO, memory=memory))
    assert [ids(echoed[1]), ids(echoed[3])] == [["call_1st"], ["call_2nd"]]


def test_the_later_of_two_equal_replies_is_meant_unless_the_id_says_otherwise() -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_1st"))
    answer(memory, HI, reply=bash("call_2nd"))
    assert ids(messages(read(HI, model(LS), GO, memory=memory))[1]) == ["call_2nd"]
    kept = called("bash", "call_1st", command="ls", n=1)
    assert ids(messages(read(HI, model(kept), GO, memory=memory))[1]) == ["call_1st"]


def test_one_signature_on_two_calls_names_the_first() -> None:
    signed = {**LS, "thoughtSignature": signature("call_x")}
    assert ids(messages(read(HI, model(signed, signed), GO))[1]) == ["call_x", "call_1"]


def test_a_made_up_id_is_nobody_else_s() -> None:
    history = [HI, model(called("bash", "call_1"), called("now")), user(answered("now", "7")), model(LS, LS), GO]
    read_as = messages(read(*history))
    assert [ids(read_as[1]), ids(read_as[3])] == [["call_1", "call_2"], ["call_3", "call_4"]]


def test_an_answer_to_no_call_keeps_its_own_id() -> None:
    request = read(HI, user(answered("bash", "a", "theirs"), answered("bash", "b")))
    assert [m.tool_call_id for m in messages(request)[1:]] == ["theirs", None]


def test_arguments_that_are_no_object_come_back_as_they_were_sampled() -> None:
    memory: Memory = {}
    odd = said(tool_calls=(ToolCall("call_x", "bash", "[1, NaN"),))
    request = read(HI, memory=memory)
    part = DIALECT.reply(request, completed(odd))
    assert b'"args":{"INVALID_JSON":"[1, NaN"}' in part
    echoed = messages(read(HI, model(called("bash", INVALID_JSON="[1, NaN")), GO, memory=memory))[1]
    assert echoed.tool_calls == odd.tool_calls


def test_raw_tells_messages_apart() -> None:
    memory: Memory = {}
    done = user(answered("bash", "a"), answered("bash", "a"), text("x"))
    other_ids = called("bash", "1", command="ls", n=1), called("bash", "2", command="ls", n=1)
    requests = [read(HI, model(LS, LS), done, memory=memory), read(GO, model(*other_ids), done, memory={})]
    raws = [request.messages.raw(index) for request in requests for index in range(len(request.messages))]
    read_as = [message for request in requests for message in messages(request)]
    assert len(raws) == 10
    for raw, message in zip(raws, read_as, strict=True):
        assert [m for r, m in zip(raws, read_as, strict=True) if r == raw] == [message] * raws.count(raw)
    assert raws.count(raws[4]) == 2


def test_a_long_session_of_many_histories_forgets_only_its_shortcuts() -> None:
    memory: Memory = {}
    answer(memory, HI, reply=bash("call_x"))
    for number in range(KEPT_READERS + 5):
        read(user(text(str(number))), memory=memory)
    assert len(memory["history"].readers) == KEPT_READERS
    echoed = messages(read(HI, model(LS), user(answered("bash", "a")), memory=memory))
    assert [ids(echoed[1]), echoed[2].tool_call_id] == [["call_x"], "call_x"]


def test_what_was_seen_is_not_decoded_again() -> None:
    memory: Memory = {}
    history = [HI, model(LS), user(answered("bash", "a"))]
    read(*history, memory=memory)
    memory["history"].contents.clear()
    read(*history, GO, memory=memory)
    assert len(memory["history"].contents) == 1
