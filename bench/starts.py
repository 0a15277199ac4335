"""The processor time of short commands, each a process of its own that calls a service, compared with the start of
Python.

The service is a stub with fixed replies, so that only the command counts: its imports, its call, and its output. The
commands take turns. A figure is the smallest of its repetitions, because other work of the machine only adds to it.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

import msgspec

from bench.floors import Receive, Scope, Send
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lifecycle import SessionState
from outrider.schemas import (
    EngineList,
    GroupList,
    NodeList,
    PolicyStatus,
    ResultsPage,
    ServiceStatus,
    SessionView,
    TimelineView,
    TokenList,
    TurnList,
)

SESSION = "s-0019a4e2b6c1f3d2-0"
COMMANDS = (
    *("--version", "--help", "status", f"show {SESSION}"),
    *("engines list", "nodes list", "policy show", "token list"),
)
REPLIES: dict[str, msgspec.Struct] = {
    "/v1/status": ServiceStatus(version="0", model="policy", sessions={}, cursor=0, nodes=(), engines=()),
    "/v1/groups": GroupList(groups=()),
    f"/v1/sessions/{SESSION}": SessionView(
        id=SESSION,
        group_id="g-0019a4e2b6c1f3d2",
        sample_index=0,
        state=SessionState.QUEUED,
        attempt=1,
        node=None,
        created=0.0,
        updated=0.0,
        last_error=None,
        result=None,
    ),
    f"/v1/sessions/{SESSION}/turns": TurnList(turns=()),
    f"/v1/sessions/{SESSION}/timeline": TimelineView(
        session_id=SESSION,
        group_id="g-0019a4e2b6c1f3d2",
        attempt=1,
        state=SessionState.QUEUED,
        now=0.0,
        attempts=(),
        spans=(),
    ),
    "/v1/engines": EngineList(engines=()),
    "/v1/nodes": NodeList(nodes=()),
    "/v1/policy": PolicyStatus(version=0, paused=None, engines=()),
    "/v1/tokens": TokenList(tokens=()),
    "/v1/results": ResultsPage(groups=(), cursor=0),
}


async def run(quick: bool) -> dict[str, Any]:
    return await measure(3 if quick else 20)


async def measure(repetitions: int) -> dict[str, Any]:
    """Return the seconds of processor time of each command, and of a Python that does nothing."""
    spent: dict[str, list[float]] = {}
    async with serving(_reply) as url:
        for _ in range(repetitions):
            for words in ("", *(f"{words} --url {url}" if words[0] != "-" else words for words in COMMANDS)):
                name = words.partition(" --url")[0]
                spent.setdefault(name, []).append(await _seconds(words.split()))
    return {"python": min(spent.pop("")), "commands": {name: min(found) for name, found in spent.items()}}


async def _seconds(words: list[str]) -> float:
    """Return the processor seconds of one command, or of a Python that does nothing if there are no words."""
    given = ("-m", "outrider.cli", *words) if words else ("-c", "")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, *given, stdout=null)
    assert await process.wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _reply(scope: Scope, receive: Receive, send: Send) -> None:
    body = msgspec.json.encode(REPLIES[scope["path"]])
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
