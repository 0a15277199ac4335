"""A call's head, for tests that read a body and care for nothing around it."""

from __future__ import annotations

from outrider.dialects.base import WireCall

CALL = WireCall("POST", "/v1/chat/completions")
