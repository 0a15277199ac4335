"""Images that can be decoded, and an agent that sends images in any dialect, in messages and in tool results."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from support.pictures import PATHS


def picture(width: int, height: int, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an image with a gradient, which depends on `seed`."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0:height, 0:width]
    colours = np.stack([rows * 3 + seed * 40, columns * 5, rows + columns + seed], axis=-1) % 256
    file = io.BytesIO()
    Image.fromarray(colours.astype(np.uint8)).save(file, kind)
    return file.getvalue()


def conversation(dialect: str, turns: Sequence[tuple[str, Sequence[bytes]]], replies: Sequence[str]) -> dict[str, Any]:
    """Return a request with one user message of text and images per turn, and the replies between the turns. A turn
    with the text "tool" is the result of a call of `screenshot`, and the reply before this turn is the call."""
    messages: list[dict[str, Any]] = []
    for at, (text, pictures) in enumerate(turns):
        if at:
            messages.append(_reply(dialect, replies[at - 1], calls=text == "tool"))
        messages.append(_result(dialect, pictures) if text == "tool" else _user(dialect, text, pictures))
    tool = {"type": "object", "properties": {}}
    match dialect:
        case "chat":
            tools = [{"type": "function", "function": {"name": "screenshot", "parameters": tool}}]
            return {"model": "any", "messages": messages, "tools": tools}
        case "responses":
            return {
                "model": "any",
                "input": messages,
                "tools": [{"type": "function", "name": "screenshot", "parameters": tool}],
            }
        case "messages":
            tools = [{"name": "screenshot", "input_schema": tool}]
            return {"model": "any", "max_tokens": 64, "messages": messages, "tools": tools}
        case _:
            return {"contents": messages, "tools": [{"functionDeclarations": [{"name": "screenshot"}]}]}


def _user(dialect: str, text: str, pictures: Sequence[bytes]) -> dict[str, Any]:
    match dialect:
        case "chat":
            parts = [{"type": "image_url", "image_url": {"url": _url(data)}} for data in pictures]
            return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        case "responses":
            parts = [{"type": "input_image", "image_url": _url(data)} for data in pictures]
            return {"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}
        case "messages":
            blocks = [{"type": "image", "source": _source(data)} for data in pictures]
            return {"role": "user", "content": [*blocks, {"type": "text", "text": text}]}
        case _:
            return {"role": "user", "parts": [*(_inline(data) for data in pictures), {"text": text}]}


def _reply(dialect: str, text: str, *, calls: bool) -> dict[str, Any]:
    if not calls:
        return (
            {"role": "model", "parts": [{"text": text}]}
            if dialect == "gemini"
            else {
                "role": "assistant",
                "content": text,
            }
        )
    match dialect:
        case "chat":
            call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "responses":
            return {"type": "function_call", "call_id": "call_1", "name": "screenshot", "arguments": "{}"}
        case "messages":
            return {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "screenshot", "input": {}}],
            }
        case _:
            return {"role": "model", "parts": [{"functionCall": {"name": "screenshot", "args": {}}}]}


def _result(dialect: str, pictures: Sequence[bytes]) -> dict[str, Any]:
    match dialect:
        case "chat":
            parts = [{"type": "image_url", "image_url": {"url": _url(data)}} for data in pictures]
            return {"role": "tool", "tool_call_id": "call_1", "content": parts}
        case "responses":
            output = [{"type": "input_image", "image_url": _url(data)} for data in pictures]
            return {"type": "function_call_output", "call_id": "call_1", "output": output}
        case "messages":
            content = [{"type": "image", "source": _source(data)} for data in pictures]
            return {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": content}],
            }
        case _:
            response = {"name": "screenshot", "response": {"output": ""}, "parts": [_inline(data) for data in pictures]}
            return {"role": "user", "parts": [{"functionResponse": response}]}


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _source(data: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}


def _inline(data: bytes) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(data).decode()}}


def reply_text(dialect: str, body: Mapping[str, Any]) -> str:
    """Return the text of a reply, as a client of the dialect reads it."""
    match dialect:
        case "chat":
            return body["choices"][0]["message"]["content"] or ""
        case "responses":
            texts = (part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
            return "".join(texts)
        case "messages":
            return "".join(block.get("text", "") for block in body["content"])
        case _:
            return "".join(part.get("text", "") for part in body["candidates"][0]["content"].get("parts", ()))


REFUSALS: list[str] = []


class Looker:
    """An agent that sends images in a conversation.

    Options: `dialect`; `turns`, pairs of a text and a list of images, each given by its seed or as a text whose bytes
    are sent; `extra`, fields that are added to each request; `patience`, seconds after which the agent ends.

    Each request contains the whole history. After a reply with a status other than 200, the agent appends the status
    and the text of the reply to REFUSALS, and ends.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._dialect: str = options["dialect"]
        self._turns = [
            (text, [picture(32 * (2 + seed), 64, seed=seed) if isinstance(seed, int) else seed.encode() for seed in of])
            for text, of in options["turns"]
        ]
        self._extra: dict[str, Any] = options.get("extra", {})
        self._patience: float | None = options.get("patience")

    async def init(self, context: HarnessContext) -> None:
        """The agent needs nothing in the sandbox."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._converse(context)
        return HarnessOutcome()

    async def _converse(self, context: HarnessContext) -> None:
        replies: list[str] = []
        async with aiohttp.ClientSession() as http:
            for count in range(1, len(self._turns) + 1):
                body = conversation(self._dialect, self._turns[:count], replies) | self._extra
                async with http.post(context.endpoint.base_url + PATHS[self._dialect], json=body) as reply:
                    if reply.status != 200:
                        REFUSALS.append(f"{reply.status}: {await reply.text()}")
                        return
                    replies.append(reply_text(self._dialect, await reply.json()))


def task(dialect: str, turns: Sequence[tuple[str, Sequence[int | str]]], **options: Any) -> dict[str, Any]:
    return {
        "instruction": "look",
        "harness": {
            "agent": "support.vision:Looker",
            "options": {"dialect": dialect, "turns": [list(turn) for turn in turns], **options},
        },
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "completed"},
    }
