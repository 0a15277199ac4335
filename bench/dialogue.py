"""A conversation as a client keeps it: messages as JSON, a new one before each turn, the reply after it.

It knows no tokens. Invariant: what was sent once is sent again byte for byte, as clients do.
"""

from __future__ import annotations

import orjson


class Dialogue:
    """`ask` gives the body of the next request, `answer` takes its reply."""

    def __init__(self, *, max_tokens: int, stream: bool = False) -> None:
        self._settings = orjson.dumps({"model": "policy", "max_tokens": max_tokens, "stream": stream})
        self._messages: list[bytes] = []

    def ask(self, *texts: str) -> bytes:
        self._messages += [orjson.dumps({"role": "user", "content": text}) for text in texts]
        return self._settings[:-1] + b',"messages":[' + b",".join(self._messages) + b"]}"

    def answer(self, body: bytes) -> int:
        """The tokens of the prompt and the reply in a Chat Completions answer that was not streamed."""
        answer = orjson.loads(body)
        self._messages.append(orjson.dumps(answer["choices"][0]["message"]))
        total: int = answer["usage"]["total_tokens"]
        return total
