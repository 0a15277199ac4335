"""An agent that calls several models over HTTP in one dialect, with a separate history for each model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from real.dialect_clients import CLIENTS, MODEL, Item, Way, events_of

DUET = "service.duet:Duet"


class Duet:
    """Options: `calls` has the names of the models to call, in order; `dialect` and `stream` set the form of the calls.
    The agent goes on after a call that is refused."""

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
