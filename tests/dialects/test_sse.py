from __future__ import annotations

import json

from outrider.dialects import sse


def test_an_event_with_and_without_a_name() -> None:
    assert sse.event(b"{}") == b"data: {}\n\n"
    assert sse.event(b"{}", b"ping") == b"event: ping\ndata: {}\n\n"


def test_data_is_one_line_by_any_client_s_reckoning() -> None:
    text = "a\u2028b\u2029c\x85d\u00e9"
    line = sse.one_line(json.dumps(text, ensure_ascii=False).encode())
    assert json.loads(line) == text
    assert len(line.decode().splitlines()) == 1
