"""The head of a call, for tests that only read its body."""

from __future__ import annotations

from outrider.dialects.base import WireCall

CALL = WireCall("POST", "/v1/chat/completions")
