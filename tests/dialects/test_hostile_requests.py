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
from support.gemini import text, user

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
