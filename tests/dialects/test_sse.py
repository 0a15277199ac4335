"""Server-sent events as the dialects write them."""

from __future__ import annotations

import json

from outrider.dialects.base import event, line


def test_an_event_with_and_without_a_name() -> None:
    assert event({}) == b"data: {}\n\n"
    assert event({}, b"ping") == b"event: ping\ndata: {}\n\n"


def test_data_is_one_line_by_any_client_s_reckoning() -> None:
    text = "a\u2028b\u2029c\x85d\u00e9"
    assert json.loads(line(text)) == text
    assert len(line(text).decode().splitlines()) == 1
