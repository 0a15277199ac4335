"""Agents that run elsewhere, and owners of their sessions, as plain HTTP clients without Outrider's client code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from outrider.service.service import Service
from support.service import running_service

Message = dict[str, Any]


class Agent:
    """A conversation over Chat Completions at the base URL of an opened session."""

    def __init__(self, http: httpx.AsyncClient, opened: dict[str, Any]) -> None:
        self.base_url = opened["base_url"]
        self.messages: list[Message] = []
        self._http = http
        self._headers = {"Authorization": f"Bearer {opened['key']}"}

    async def post(self, messages: list[Message], **fields: Any) -> httpx.Response:
        body = {"model": "any", "messages": messages, **fields}
        return await self._http.post(f"{self.base_url}/v1/chat/completions", json=body, headers=self._headers)

    async def ask(self, text: str) -> str:
        """Ask a question and return the reply, which is added to the conversation."""
        self.messages.append({"role": "user", "content": text})
        reply = await self.post(self.messages)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        return str(message["content"])


class Owner:
    """A client of a service's control API."""

    def __init__(self, http: httpx.AsyncClient, url: str, token: str | None = None) -> None:
        self.url = url
        self._http = http
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> httpx.Response:
        return await self._http.request(
            method, f"{self.url}/v1{path}", json=body, params=query, headers=self._headers, timeout=60
        )

    async def open(self, **fields: Any) -> dict[str, Any]:
        reply = await self.call("POST", "/sessions", fields)
        assert reply.status_code == 201, reply.text
        opened: dict[str, Any] = reply.json()
        assert opened["running"]
        return opened

    async def complete(self, opened: dict[str, Any], **report: Any) -> httpx.Response:
        return await self.call("POST", f"/sessions/{opened['session']['id']}/complete", report)

    async def done(self, group_id: str) -> dict[str, Any]:
        """Wait until a group is done, and return the group with its samples."""
        reply = await self.call("GET", f"/groups/{group_id}", wait=30, samples=True)
        group: dict[str, Any] = reply.json()
        assert group["state"] == "done", group
        return group

    async def result(self, opened: dict[str, Any]) -> dict[str, Any]:
        """Wait until an opened session is done, and return its result."""
        group = await self.done(opened["session"]["group_id"])
        result: dict[str, Any] = group["sessions"][opened["session"]["sample_index"]]["result"]
        return result


class Elsewhere:
    """A service, its owner, and a client for agents."""

    def __init__(self, service: Service, http: httpx.AsyncClient, url: str) -> None:
        self.service = service
        self.http = http
        self.owner = Owner(http, url)

    def agent(self, opened: dict[str, Any]) -> Agent:
        return Agent(self.http, opened)


@asynccontextmanager
async def elsewhere(tmp_path: Path, **settings: Any) -> AsyncIterator[Elsewhere]:
    async with (
        httpx.AsyncClient(verify=False, timeout=30) as http,
        running_service(tmp_path=tmp_path, **settings) as (service, url),
    ):
        yield Elsewhere(service, http, url)
