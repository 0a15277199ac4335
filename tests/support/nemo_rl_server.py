"""A server with the routes and the rules of NeMo RL's vLLM workers, for tests of the engine kind `openai`.

Follows `nemo_rl.models.generation.vllm.vllm_worker_async` (August 2026). The server has only `/v1/chat/completions` and
`/tokenize`. It refuses sampling parameters other than the trainer's. It renders the messages itself, and then replaces
the beginning of the prompt, up to the end token of the last assistant message, by `required_prefix_token_ids`.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.wire.http_server import Receive, Scope, Send

END = "<|im_end|>"
CONTEXT = 4096


class NemoRLServer:
    """Replies `said` to every request. The reply is encoded letter by letter, so its ids differ from the ids of the
    rendered message."""

    def __init__(self, tokenizer: Tokenizer, *, said: str = "hello world", temperature: float = 0.5) -> None:
        self._tokenizer = tokenizer
        self._said = said
        self._temperature = temperature
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        match scope["method"], scope["path"]:
            case "POST", "/tokenize":
                ids = self._tokenizer.encode(orjson.loads(body)["prompt"])
                await _json(send, 200, {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids})
            case "POST", "/v1/chat/completions":
                await self._chat(orjson.loads(body), send)
            case _:
                await _json(send, 404, {"detail": "Not Found"})

    async def _chat(self, body: dict[str, Any], send: Send) -> None:
        self.requests.append(body)
        if body.get("top_k") not in (None, -1) or (body["temperature"], body["top_p"]) != (self._temperature, 1.0):
            await _json(send, 500, {"detail": "AssertionError: request sampling matches neither the train sampling"})
            return
        prompt = self._prompt(body["messages"], body.get("required_prefix_token_ids"))
        reply = [token for letter in self._said for token in self._tokenizer.encode(letter)] + self._end
        start = {"role": "assistant", "content": self._said}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        logprobs = {"content": [{"token": "t", "logprob": -math.log(2)}] * len(reply)}
        choice = {"index": 0, "delta": start, "finish_reason": "stop", "token_ids": reply, "logprobs": logprobs}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(reply)}
        for event in ({"choices": [choice], "prompt_token_ids": prompt}, {"choices": [], "usage": usage}):
            await send(
                {"type": "http.response.body", "body": b"data: " + orjson.dumps(event) + b"\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    @property
    def _end(self) -> list[int]:
        return self._tokenizer.encode(END)

    def _prompt(self, messages: list[dict[str, Any]], prefix: list[int] | None) -> list[int]:
        rendered = self._rendered(messages) + self._tokenizer.encode("<|im_start|>assistant\n")
        if prefix is None:
            return rendered
        [end] = self._end
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        ends = [at for at, token in enumerate(rendered) if token == end]
        return prefix[: len(prefix) - (prefix[-1] == end)] + rendered[ends[last] :]

    def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        texts = (f"<|im_start|>{message['role']}\n{message['content']}{END}\n" for message in messages)
        return self._tokenizer.encode("".join(texts))


async def _json(send: Send, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})
