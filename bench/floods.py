"""What other sessions notice of two that send bodies made to be as much work as possible, in each dialect.

Fifty sessions make calls, with a pause between them, first alone and then while two others send such bodies: of 64 MiB,
of the most that is taken, and of 1 MiB. Durations are milliseconds. Run as a program it sends one body:

    python -m bench.floods http://127.0.0.1:PORT/s/KEY KIND BYTES

and prints the status of the answer, or 0 for none.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from bench.corpus import Corpus
from bench.http import Client
from bench.processes import ROOT, World, world
from outrider.sessions.intake import MAX_TEXT_BODY

INNOCENT = 50
ATTACKERS = 2
PAUSE_SECONDS = 0.5
CALM_SECONDS = 5.0
REPLY_TOKENS = 16
PERCENTILES = (50, 99)
SIZES = (64 << 20, MAX_TEXT_BODY - (64 << 10), 1 << 20)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GEMINI = "/v1beta/models/policy:generateContent"
MODEL = b'"model":"policy","max_tokens":4,'
ONE = b'{"role":"user","content":"a"}'


class Flood:
    """A body: `head`, then `item` as often as fits, separated by commas, then `tail`."""

    def __init__(self, path: str, head: bytes, item: bytes, tail: bytes, *, between: bytes = b",") -> None:
        self.path = path
        self._head, self._item, self._tail, self._between = head, item, tail, between

    def body(self, size: int) -> bytes:
        room = size - len(self._head) - len(self._tail) - len(self._item)
        more = self._between + self._item
        return self._head + self._item + more * (room // len(more)) + self._tail


def _chat(head: bytes, item: bytes, tail: bytes, between: bytes = b",") -> Flood:
    return Flood(CHAT, b"{" + MODEL + head, item, tail + b"}", between=between)


FLOODS: Mapping[str, Flood] = {
    "chat messages": _chat(b'"messages":[', ONE, b"]"),
    "chat answers": _chat(b'"messages":[' + ONE + b",", b'{"role":"assistant","content":"b"},' + ONE, b"]"),
    "chat calls": _chat(
        b'"messages":[' + ONE + b',{"role":"assistant","tool_calls":[',
        b'{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}',
        b"]}," + ONE + b"]",
    ),
    "chat arguments": _chat(
        b'"messages":[' + ONE + b',{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":'
        b'{"name":"f","arguments":"[',
        b"[]",
        b']"}}]},' + ONE + b"]",
    ),
    "chat parts": _chat(b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]"),
    "chat tools": _chat(b'"messages":[' + ONE + b'],"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]"),
    "chat schema": _chat(
        b'"messages":[' + ONE + b'],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
        b"1",
        b"]}}}]",
    ),
    "chat ignored": _chat(b'"messages":[' + ONE + b'],"metadata":[', b"[]", b"]"),
    "chat text": _chat(b'"messages":[{"role":"user","content":"', b"word", b'"}]', b" "),
    "chat blanks": _chat(b'"messages":[{"role":"user","content":"', b" ", b'"}]', b""),
    "chat escapes": _chat(b'"messages":[{"role":"user","content":"', b"\\n", b'"}]', b""),
    "chat umlauts": _chat(b'"messages":[{"role":"user","content":"', b"\\u00fc", b'"}]', b""),
    "chat stops": _chat(b'"messages":[' + ONE + b'],"stop":[', b'"s"', b"]"),
    "chat spaces": _chat(b'"messages":[' + ONE, b" ", b"]", b""),
    "chat junk": Flood(CHAT, b"", b"[", b"", between=b""),
    "messages messages": Flood(MESSAGES, b"{" + MODEL + b'"messages":[', ONE, b"]}"),
    "messages blocks": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"
    ),
    "messages results": Flood(
        MESSAGES,
        b"{" + MODEL + b'"messages":[{"role":"user","content":[',
        b'{"type":"tool_result","tool_use_id":"1","content":"a"}',
        b"]}]}",
    ),
    "messages system": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[' + ONE + b'],"system":[', b'{"type":"text","text":"a"}', b"]}"
    ),
    "messages tools": Flood(
        MESSAGES, b"{" + MODEL + b'"messages":[' + ONE + b'],"tools":[', b'{"name":"f","input_schema":{}}', b"]}"
    ),
    "responses items": Flood(RESPONSES, b"{" + b'"model":"policy","input":[', ONE, b"]}"),
    "responses calls": Flood(
        RESPONSES,
        b'{"model":"policy","input":[' + ONE + b",",
        b'{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}',
        b"," + ONE + b"]}",
    ),
    "responses tools": Flood(
        RESPONSES, b'{"model":"policy","input":"a","tools":[', b'{"type":"function","name":"f"}', b"]}"
    ),
    "gemini contents": Flood(GEMINI, b'{"contents":[', b'{"role":"user","parts":[{"text":"a"}]}', b"]}"),
    "gemini parts": Flood(GEMINI, b'{"contents":[{"role":"user","parts":[', b'{"text":"a"}', b"]}]}"),
    "gemini answers": Flood(
        GEMINI,
        b'{"contents":[',
        b'{"role":"model","parts":[{"functionCall":{"name":"f","args":{}}}]},'
        b'{"role":"user","parts":[{"functionResponse":{"name":"f","response":{}}}]}',
        b"]}",
    ),
    "gemini tools": Flood(
        GEMINI,
        b'{"contents":[{"role":"user","parts":[{"text":"a"}]}],"tools":[{"functionDeclarations":[',
        b'{"name":"f"}',
        b"]}]}",
    ),
}


def send(url: str, flood: Flood, size: int) -> int:
    """The status of the answer to a body of so many bytes; 0 where the connection broke."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    try:
        connection.request("POST", parts.path + flood.path, flood.body(size), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


class Plan(msgspec.Struct, frozen=True):
    """Which floods are sent, each in these sizes by every attacker, and for how long calls are made before."""

    kinds: Sequence[str]
    sizes: Sequence[int] = SIZES
    calm_seconds: float = CALM_SECONDS


FULL = Plan(tuple(FLOODS))
QUICK = Plan(("chat messages", "messages results", "responses items", "gemini contents"), calm_seconds=2.0)


class _Call(msgspec.Struct, frozen=True):
    began: float
    milliseconds: float
    status: int


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        async with world(corpus, reply_tokens=REPLY_TOKENS, sessions=INNOCENT + ATTACKERS) as processes:
            return await _measured(plan, processes)


async def _measured(plan: Plan, processes: World) -> dict[str, Any]:
    gateway = processes.gateway
    calls: list[_Call] = []
    async with Client() as client, asyncio.TaskGroup() as group:
        innocent = [group.create_task(_calling(client, url, calls)) for url in gateway.urls[:INNOCENT]]
        await asyncio.sleep(plan.calm_seconds)
        calm, memory, stalls = list(calls), gateway.memory_mib(), await _stalls(gateway.urls[0])
        calls.clear()
        floods = []
        for kind in plan.kinds:
            began, before = time.perf_counter(), await _stalls(gateway.urls[0])
            statuses = await asyncio.gather(*(_flooding(url, kind, plan.sizes) for url in gateway.urls[INNOCENT:]))
            after = await _stalls(gateway.urls[0])
            during = [call for call in calls if call.began >= began]
            floods.append(
                {
                    "kind": kind,
                    "seconds": time.perf_counter() - began,
                    "statuses": statuses[0],
                    "calls": len(during),
                    "failed": sum(call.status != 200 for call in during),
                    "call_ms": _percentiles(during),
                    "stalls": after["count"] - before["count"],
                }
            )
        for task in innocent:
            task.cancel()
    after = await _stalls(gateway.urls[0])
    return {
        "sessions": INNOCENT,
        "attackers": ATTACKERS,
        "sizes": list(plan.sizes),
        "calm_ms": _percentiles(calm),
        "flooded_ms": _percentiles(calls),
        "failed": sum(call.status != 200 for call in calls),
        "memory_mib": gateway.peak_memory_mib() - memory,
        "longest_stall_ms": 1000 * after["longest"],
        "longest_stall_before_ms": 1000 * stalls["longest"],
        "floods": floods,
    }


async def _calling(client: Client, url: str, calls: list[_Call]) -> None:
    """One innocent session: a call, a pause, and so on."""
    body = orjson.dumps(
        {"model": "policy", "max_tokens": REPLY_TOKENS, "messages": [{"role": "user", "content": "Hi"}]}
    )
    while True:
        began = time.perf_counter()
        async with client.post(url + CHAT, body) as answer:
            await answer.whole()
            calls.append(_Call(began, 1000 * (time.perf_counter() - began), answer.status))
        await asyncio.sleep(PAUSE_SECONDS)


async def _flooding(url: str, kind: str, sizes: Sequence[int]) -> list[int]:
    statuses = []
    for size in sizes:
        sender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.floods", url, kind, str(size)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        out, _ = await sender.communicate()
        statuses.append(int(out))
    return statuses


async def _stalls(url: str) -> dict[str, float]:
    """What the service's watchdog has seen."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /v1/status HTTP/1.0\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, float] = orjson.loads(answer.partition(b"\r\n\r\n")[2])["nodes"][0]["stalls"]
    return found


def _percentiles(calls: Sequence[_Call]) -> dict[str, float]:
    if len(calls) < 2:
        return {f"p{cut}": calls[0].milliseconds if calls else 0.0 for cut in PERCENTILES}
    cuts = statistics.quantiles([call.milliseconds for call in calls], n=100, method="inclusive")
    return {f"p{cut}": cuts[cut - 1] for cut in PERCENTILES}


if __name__ == "__main__":
    print(send(sys.argv[1], FLOODS[sys.argv[2]], int(sys.argv[3])))
