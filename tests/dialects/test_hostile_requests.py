"""Requests of about 1 MB that are made to be slow to read, or to leave as much as possible in memory.

All requests of a node are read in one thread, so a request that takes seconds delays every other session.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from outrider.dialects import DIALECTS
from outrider.dialects.base import Memory, WireCall
from outrider.dialects.gemini import history
from outrider.errors import RequestError
from support.gemini import answered, called, messages, model, read, text, user

NAMED = {dialect.name: dialect for dialect in DIALECTS}
MANY = 30_000
SECONDS = 2.0
"""Maximum processor time to read one request. Each request here takes less than 0.5 s. It would take at least 4 s if
the work grew with the square of the request's length."""
HI = user(text("hi"))


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def calls_without_ids() -> list[Any]:
    return [model(*[called("a")] * MANY), HI]


def calls_whose_numbers_are_taken() -> list[Any]:
    taken = [called("a", f"call_{number}") for number in range(MANY // 2, MANY)]
    return [model(*taken), HI, *[content for _ in range(MANY // 8) for content in (model(called("b")), HI)]]


def signed_calls() -> list[Any]:
    signatures = [base64.b64encode(b"outrider:%d" % number).decode() for number in range(MANY)]
    return [model(*[{**called("a"), "thoughtSignature": signed} for signed in signatures]), HI]


def results_in_reverse() -> list[Any]:
    results = [answered("a", "", str(number)) for number in reversed(range(MANY))]
    return [model(*[called("a", str(number)) for number in range(MANY)]), user(*results)]


@pytest.mark.parametrize(
    "contents", [calls_without_ids, calls_whose_numbers_are_taken, signed_calls, results_in_reverse]
)
def test_the_calls_of_a_message_get_their_ids_in_linear_time(contents: Callable[[], list[Any]]) -> None:
    sent = contents()
    assert seconds_of(lambda: read(*sent)) < SECONDS


def test_numbers_of_calls_are_not_used_twice() -> None:
    sent = [model(called("a"), called("a", "call_2"), called("a")), HI, model(called("a"), called("a", "call_9")), HI]
    found = [call.id for message in messages(read(*sent)) for call in message.tool_calls]
    assert found == ["call_0", "call_2", "call_3", "call_4", "call_9"]


def test_results_of_equal_calls_are_taken_in_order() -> None:
    sent = [
        model(called("a", "1"), called("b", "2"), called("a", "3")),
        user(*[answered("a", "")] * 3, answered("b", "")),
    ]
    assert [message.tool_call_id for message in messages(read(*sent))[1:]] == ["1", "3", None, "2"]


def test_what_a_session_stores_of_refused_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is stored before it is known whether its prompt fits the model, and counting tokens makes no turn. So
    no limit of the session ends such calls."""
    monkeypatch.setattr(history, "MAX_STORED", 100_000, raising=False)
    memory: Memory = {}
    for number in range(50):
        long = f"{number} " + "x" * 2000
        call, result = model(text(long), called(long, long)), user(answered(long, "", long))
        read(call, result, model(called("a")), HI, memory=memory)
        kept = memory["history"]
        assert sum(len(msgspec.json.encode(content)) for content in kept.contents.values()) <= 120_000
        assert len(kept.ids_by_path) <= 20
        assert len(kept.readers) <= 20


def test_the_readers_of_a_session_keep_a_bounded_number_of_messages_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_IN_READERS", 100)
    memory: Memory = {}
    for number in range(10):
        read(user(text(str(number))), *[model(text("ok")), HI] * 20, memory=memory)
    assert [len(reader.spans) for reader in memory["history"].readers.values()] == [41, 41]
    read(*[model(text("ok")), HI] * 100, memory=memory)
    assert [len(reader.spans) for reader in memory["history"].readers.values()] == [200]
    for number in range(10):  # a message may have any number of calls
        read(user(text(str(number))), model(*[called("a")] * 45), HI, memory=memory)
    assert len(memory["history"].readers) == 2


def test_allowed_functions_are_looked_up_in_linear_time() -> None:
    names = [f"a{number}" for number in range(MANY)]
    tools = [{"functionDeclarations": [{"name": name} for name in names]}]
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": names[::-1]}}
    assert seconds_of(lambda: read(HI, tools=tools, toolConfig=config)) < SECONDS


@pytest.mark.parametrize("kind", ["functions", "hosted"])
def test_allowed_tools_of_responses_are_looked_up_in_linear_time(kind: str) -> None:
    function = {"type": "function", "name": "x"}
    if kind == "functions":  # an allowed name may mean a tool of every namespace
        tools: list[Any] = [{"type": "namespace", "name": f"n{at}", "tools": [function]} for at in range(MANY // 2)]
        allowed = [function] * MANY
    else:
        tools = [function, *[{"type": f"hosted{at}"} for at in range(MANY)]]
        allowed = [function, *tools[:0:-1]]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = json.dumps({"model": "m", "input": "hi", "tools": tools, "tool_choice": choice}).encode()
    responses = NAMED["responses"]
    assert seconds_of(lambda: responses.parse(WireCall("POST", "/v1/responses"), body, {})) < SECONDS


def test_a_wrong_text_is_found_in_linear_time() -> None:
    inner: Any = [0] * 120_000
    for _ in range(400):
        inner = {"k" * 5000: inner}
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "other": inner, "stop": "\ud800"}
    body = json.dumps(fields).encode()

    def refused() -> None:
        with pytest.raises(RequestError, match="stop: an unpaired surrogate"):
            NAMED["chat"].parse(WireCall("POST", "/v1/chat/completions"), body, {})

    assert seconds_of(refused) < SECONDS
