"""The official clients, for servers without TLS. They do not read the machine's certificates, which would take 40 to
150 ms of processor time. No client retries a call."""

from __future__ import annotations

import ssl
from typing import Any

from support.later import anthropic, genai, openai


def openai_client(base_url: str, *, api_key: str = "k") -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


def anthropic_client(base_url: str, *, api_key: str = "k") -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


def google_client(base_url: str, *, api_key: str = "k", **options: Any) -> genai.Client:
    """Return a client. `options` are further fields of `genai.types.HttpOptions`."""
    unread: dict[str, Any] = dict.fromkeys(("verify", "ssl"), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    http = genai.types.HttpOptions(
        base_url=base_url,
        retry_options=genai.types.HttpRetryOptions(attempts=1),
        client_args=unread,
        async_client_args=unread,
        **options,
    )
    return genai.Client(api_key=api_key, http_options=http)
