"""A service whose engine takes images, and an agent that sends images in any dialect."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from engines.upstream import Answer, Upstream, upstream
from outrider.config import LanesConfig
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import images_in
from outrider.service.service import Service
from outrider.spec import EngineSpec
from support.service import running_service

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
ADDRESS = "https://example.org/there.png"
SAID = "seen"
PAGES = {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}
CONVERSATION = (([1, 2, 3], [7, 8]), ([1, 2, 3, 7, 8, 4, 5], [9]))
"""Prompt and output ids of two turns; the second continues the first."""

_BASE64 = base64.b64encode(PNG).decode()
_DATA_URL = f"data:image/png;base64,{_BASE64}"
_ANTHROPIC = {"type": "base64", "media_type": "image/png", "data": _BASE64}


def _chat(shown: Sequence[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
    return {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}


def _responses(shown: Sequence[str]) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": url} for url in shown]
    return {"role": "user", "content": [{"type": "input_text", "text": "look"}, *parts]}


def _messages(shown: Sequence[str]) -> dict[str, Any]:
    sources = [{"type": "url", "url": url} if url == ADDRESS else _ANTHROPIC for url in shown]
    parts = [{"type": "image", "source": source} for source in sources]
    return {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}


def _gemini(shown: Sequence[str]) -> dict[str, Any]:
    inline = {"inlineData": {"mimeType": "image/png", "data": _BASE64}}
    linked = {"fileData": {"fileUri": ADDRESS, "mimeType": "image/png"}}
    return {"role": "user", "parts": [{"text": "look"}, *(linked if url == ADDRESS else inline for url in shown)]}


def bodies(dialect: str) -> list[dict[str, Any]]:
    """Return two requests of one conversation. In the first, the user sends PNG. In the second, after the reply, the
    user sends PNG again and the image at ADDRESS."""
    first, again = [_DATA_URL], [_DATA_URL, ADDRESS]
    said = {"role": "assistant", "content": SAID}
    match dialect:
        case "chat":
            return [{"model": "any", "messages": [_chat(first), *rest]} for rest in ([], [said, _chat(again)])]
        case "responses":
            return [{"model": "any", "input": [_responses(first), *rest]} for rest in ([], [said, _responses(again)])]
        case "messages" | "counted":
            head: dict[str, Any] = {"model": "any", "max_tokens": 64}
            return [{**head, "messages": [_messages(first), *rest]} for rest in ([], [said, _messages(again)])]
        case _:
            told = {"role": "model", "parts": [{"text": SAID}]}
            return [{"contents": [_gemini(first), *rest]} for rest in ([], [told, _gemini(again)])]


def result_body(dialect: str) -> dict[str, Any]:
    """Return a request in which PNG is the result of a tool call, like a screenshot."""
    match dialect:
        case "chat":
            call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
            told = {"role": "assistant", "content": None, "tool_calls": [call]}
            part = {"type": "image_url", "image_url": {"url": _DATA_URL}}
            result = {"role": "tool", "tool_call_id": "call_1", "content": [part]}
            return {"model": "any", "messages": [_chat([]), told, result]}
        case "responses":
            told = {"type": "function_call", "call_id": "call_1", "name": "screenshot", "arguments": "{}"}
            output = [{"type": "input_image", "image_url": _DATA_URL}]
            result = {"type": "function_call_output", "call_id": "call_1", "output": output}
            return {"model": "any", "input": [_responses([]), told, result]}
        case "messages":
            call = {"type": "tool_use", "id": "call_1", "name": "screenshot", "input": {}}
            content = [{"type": "image", "source": _ANTHROPIC}]
            result = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
            history = [_messages([]), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            return {"model": "any", "max_tokens": 64, "messages": history}
        case _:
            call = {"functionCall": {"name": "screenshot", "args": {}}}
            inline = {"inlineData": {"mimeType": "image/png", "data": _BASE64}}
            answer = {"functionResponse": {"name": "screenshot", "response": {"output": ""}, "parts": [inline]}}
            return {"contents": [_gemini([]), {"role": "model", "parts": [call]}, {"role": "user", "parts": [answer]}]}


PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/any:generateContent",
}
COUNTED = "/v1/messages/count_tokens"


class Shower:
    """An agent that makes the calls of `bodies` over HTTP, or with the option `result` the call of `result_body`. A
    status other than 200 is an error."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._dialect: str = options["dialect"]
        self._bodies = [result_body(self._dialect)] if options.get("result") else bodies(self._dialect)

    async def init(self, context: HarnessContext) -> None:
        """The agent needs nothing in the sandbox."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        async with aiohttp.ClientSession() as http:
            for body in self._bodies:
                url = context.endpoint.base_url + PATHS.get(self._dialect, COUNTED)
                async with http.post(url, json=body) as reply:
                    if reply.status != 200:
                        raise ValueError(f"{reply.status}: {await reply.text()}")
        return HarnessOutcome()


def seen_by_the_grader(outcome: Outcome) -> float:
    """Return the number of images in the transcript whose bytes reached the grader unchanged."""
    return sum(image.data == PNG for message in outcome.transcript for image in images_in(message))


def task(dialect: str, **options: Any) -> dict[str, Any]:
    return {
        "instruction": "look",
        "harness": {"agent": "support.pictures:Shower", "options": {"dialect": dialect, **options}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": "support.pictures:seen_by_the_grader"},
    }


def _answer(prompt: list[int], output: list[int], *, captured: bool) -> Answer:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": SAID}, "finish_reason": "stop"}
    if not captured:
        return Answer(events=[{"choices": [choice]}])
    content = [{"token": "t", "logprob": -0.5}] * len(output)
    choice |= {"token_ids": output, "logprobs": {"content": content}}
    return Answer(events=[{"choices": [choice], "prompt_token_ids": prompt}])


@asynccontextmanager
async def picture_service(
    tmp_path: Path, *, sessions: int = 1, captured: bool = True
) -> AsyncIterator[tuple[Service, str, Upstream]]:
    """Yield the service, its URL, and the upstream server, which records requests. The upstream has replies for
    `sessions` sessions, which must run one after another. Without `captured`, its replies have no token ids."""
    answers = [_answer(*ids, captured=captured) for ids in CONVERSATION] * sessions
    async with upstream(*answers, pages=PAGES) as (server_url, server):
        engine = EngineSpec(kind="openai", name="sees", url=server_url, options={"ids": captured})
        lanes = LanesConfig(run=1)
        async with running_service(tmp_path=tmp_path, engines=(engine,), lanes=lanes) as (service, url):
            yield service, url, server


def png(width: int, height: int) -> bytes:
    """Return the first 33 bytes of a PNG, with the size but without pixels."""
    head = struct.pack(">II", width, height) + b"\x08\x06\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + b"IHDR" + head + bytes(4)
