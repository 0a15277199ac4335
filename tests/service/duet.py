"""An agent that talks to several models over HTTP, in one dialect, each in a history of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from real.dialect_clients import CLIENTS, MODEL, Item, Way, events_of

DUET = "service.duet:Duet"


class Duet:
    """Options: `calls` are the names of the models to call, in turn; `dialect` and `stream` say how. It goes on when a
    call is refused."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._calls: list[str] = options["calls"]
        self._client = next(client for client in CLIENTS if client.name == options.get("dialect", "chat"))
        self._stream: bool = options.get("stream", False)

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        histories: dict[str, list[Item]] = {}
        async with aiohttp.ClientSession(context.endpoint.base_url + "/", headers=self._client.headers) as http:
            for model in self._calls:
                history = histories.setdefault(model, [])
                history.append(self._client.user(f"{context.task.instruction}: {model}, line {len(history) // 2}"))
                history += await self._ask(http, model, history)
        return HarnessOutcome()

    async def _ask(self, http: aiohttp.ClientSession, model: str, history: list[Item]) -> list[Item]:
        body = self._client.body(history, Way(200, 1.0), stream=self._stream)
        body |= {"model": model} if "model" in body else {}
        path = self._client.path(stream=self._stream).replace(f"/{MODEL}:", f"/{model}:")
        async with http.post(path.lstrip("/"), json=body) as reply:
            if reply.status != 200:
                return []
            data = await reply.read()
        return (self._client.gather(events_of(data)) if self._stream else self._client.read(json.loads(data))).echo
