"""Requests of about 1 MB that are made to be slow to read, or to leave as much as possible in memory.

All requests of a node are read in one thread, so a request that takes seconds delays every other session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider.dialects import DIALECTS
from outrider.dialects.base import WireCall
from outrider.errors import RequestError
from support.gemini import read, text, user

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
