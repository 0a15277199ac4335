"""A conversation as stored by a client: messages as JSON. Each turn adds a new message and then the reply. The module
is independent of tokens. Invariant: a message that was sent once is sent again byte for byte, as clients do.
"""

from __future__ import annotations

import orjson


class Dialogue:
    """`ask` returns the body of the next request, `answer` adds its reply."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = orjson.dumps({"model": "policy", "max_tokens": max_tokens, "stream": stream})
        self._messages: list[bytes] = []

    def ask(self, *texts: str) -> bytes:
        self._messages += [orjson.dumps({"role": "user", "content": text}) for text in texts]
        return self._settings[:-1] + b',"messages":[' + b",".join(self._messages) + b"]}"

    def answer(self, body: bytes) -> int:
        """Add a Chat Completions reply that was not streamed, and return the tokens of its prompt and output."""
        answer = orjson.loads(body)
        self._messages.append(orjson.dumps(answer["choices"][0]["message"]))
        total: int = answer["usage"]["total_tokens"]
        return total
