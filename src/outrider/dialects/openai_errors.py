"""Writes OpenAI's error object, for Chat Completions and Responses. The other dialects write errors in their
`reply.py`.

Source: OpenAI API reference, "Error codes".
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ContextOverflow, OutriderError, Unauthorized, error_text, storable

_OPENAI_CODES = {ContextOverflow.code: "context_length_exceeded", Unauthorized.code: "invalid_api_key"}


def openai_error(error: OutriderError) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    status, text = error.http_status, error_text(error)
    if isinstance(error, ContextOverflow):
        # Clients recognise a context overflow by this text, not by the code, and then shorten their history.
        text = f"This model's maximum context length is exceeded: {text.rstrip('. ')}."
        text += " Please reduce the length of the messages."
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": text,
            "type": kind,
            "param": storable(error.field) if error.field else None,
            # OpenAI's code, if there is one, replaces Outrider's code for the error, because clients check for OpenAI's
            # codes.
            "code": "rate_limit_exceeded" if status == 429 else _OPENAI_CODES.get(error.code, error.code),
        }
    }
