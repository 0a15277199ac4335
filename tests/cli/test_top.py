"""`outrider top`: one frame and its JSON, rates, errors by cause, and the live view on a real pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cli.world import PROGRAM, Cli
from outrider.cli import top
from outrider.cli.top import TopReadings, TopView, frame
from outrider.client.client import AsyncClient, Client
from outrider.errors import Forbidden
from outrider.schemas import QueryReply, RateList, ServiceStatus
from support.service import running_service, say

TASK: dict[str, Any] = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
BROKEN = {**TASK, "evaluator": {"kind": "command", "run": "exit 7"}, "max_attempts": 1}
ADMIN = "an-admins-token-of-32-characters"


async def some_runs(url: str, token: str | None = None) -> None:
    async with AsyncClient(url, token=token) as client:
        groups = [await client.submit({"task": TASK, "n": 3}), await client.submit({"task": BROKEN, "n": 2})]
        await client.wait([group.id for group in groups])


def drawn(view: TopView, width: int) -> list[str]:
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(frame(view))
    return captured.get().splitlines()


async def test_one_frame_has_states_lanes_engines_and_errors(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (service, url):
        await some_runs(url)
        await service.rates.take()
        seen = await cli("top", "--once", "--url", url)
        document = (await cli("top", "--once", "--json", "--url", url)).document
    view = msgspec.convert(document, TopView)
    assert "sessions: 5 done" in seen.out
    assert "policy version 0" in seen.out
    assert re.search(r"\d\.\d\d sessions/s · \d+\.\d failed/s · \d+\.\d calls/s · \d+\.\d tokens/s", seen.out)
    assert "scripted" in seen.out
    assert re.search(r"^evaluator: evaluator_error +2 ", seen.out, re.MULTILINE)
    [cause] = view.errors or ()
    assert (cause.code, cause.times) == ("evaluator_error", 2)
    assert view.rates is not None
    assert view.rates.sessions > 0
    assert view.rates.tokens
    assert view.service.sessions["done"] == 5


async def test_a_frame_fits_80_columns(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url):
        await some_runs(url)

        def read() -> TopView:
            with Client(url) as client:
                return TopReadings(client).read()

        view = await asyncio.to_thread(read)
    lines = drawn(view, 80)
    assert max(map(len, lines)) <= 80
    assert any("evaluator: evaluator_error" in line for line in lines)


async def test_a_tenant_gets_rates_from_two_readings(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")], token=ADMIN) as (_, url):
        async with AsyncClient(url, token=ADMIN) as api:
            token = (await api.create_token("anna", "submit")).text

        def read(readings: TopReadings) -> TopView:
            return readings.read()

        with Client(url, token=token) as client:
            readings = TopReadings(client)
            first = await asyncio.to_thread(read, readings)
            await some_runs(url, token)
            second = await asyncio.to_thread(read, readings)
    assert first.rates is None
    assert second.rates is not None
    assert abs(second.rates.sessions * second.rates.seconds - 5) < 1e-6
    assert second.rates.tokens is None
    assert second.errors == ()  # errors are read every ten seconds, so these are of the first reading


def test_a_removal_of_groups_makes_no_negative_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of a removed group count as done no longer."""
    seconds = iter((0.0, 10.0, 20.0))
    monkeypatch.setattr(top, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(seconds)))
    done = iter((100, 40, 45))

    class Tenant(Client):
        """The client of a tenant, whose token may not read the service's rates."""

        def __init__(self) -> None:
            pass

        def status(self) -> ServiceStatus:
            return ServiceStatus(version="1", model="m", sessions={"done": next(done)}, cursor=0, nodes=(), engines=())

        def rates(self) -> RateList:
            raise Forbidden("only for admins")

        def query(self, sql: str) -> QueryReply:
            return QueryReply(columns=(), rows=(), truncated=False, seconds=0.0)

    readings = TopReadings(Tenant())
    rates = [readings.read().rates for _ in range(3)]
    assert rates[:2] == [None, None]
    assert rates[2] is not None
    assert (rates[2].sessions, rates[2].seconds) == (0.5, 10.0)


async def test_a_clock_that_is_set_back_stops_neither_rates_nor_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")], token=ADMIN) as (_, url):
        async with AsyncClient(url, token=ADMIN) as api:
            token = (await api.create_token("anna", "submit")).text

        def read() -> TopView:
            with Client(url, token=token) as client:
                readings = TopReadings(client)
                readings.read()
                moved = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=lambda: time.monotonic() + 20)
                monkeypatch.setattr(top, "time", moved)
                asked: list[str] = []
                monkeypatch.setattr(readings, "_read_errors", lambda: asked.append("errors"))
                view = readings.read()
                assert asked == ["errors"]
                return view

        assert (await asyncio.to_thread(read)).rates is not None


async def test_the_live_view_is_drawn_again_and_q_ends_it(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url):
        master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        before = termios.tcgetattr(terminal)
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "top", "--url", url, stdin=terminal, stdout=terminal, stderr=terminal, env=_environment()
        )
        try:
            await _until(master, b"sessions: none")
            await some_runs(url)
            await _until(master, b"sessions: 5 done")
            os.write(master, b"q")
            assert await asyncio.wait_for(process.wait(), 10) == 0
            assert termios.tcgetattr(terminal)[3] == before[3]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(terminal)
            os.close(master)


async def test_the_live_view_outlasts_a_service_that_is_gone(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 60, 0, 0))
    try:
        async with running_service(tmp_path=tmp_path) as (_, url):
            process = await asyncio.create_subprocess_exec(
                *PROGRAM, "top", "--url", url, stdin=terminal, stdout=terminal, stderr=terminal, env=_environment()
            )
            assert b"more lines: outrider top --once" in await _until(master, b"more lines: outrider top --once")
        await _until(master, b"asked again each second")
        os.write(master, b"q")
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(terminal)
        os.close(master)


async def test_the_command_ends_with_its_terminal(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        master, terminal = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "top", "--url", url, stdin=terminal, stdout=terminal, stderr=terminal, env=_environment()
        )
        os.close(terminal)
        try:
            await _until(master, b"sessions: none")
            os.close(master)
            await asyncio.wait_for(process.wait(), 10)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "TERM": "xterm"}


async def _until(master: int, wanted: bytes) -> bytes:
    """Read the terminal until the text appears, and return the bytes that were read. Movements of the cursor do not
    matter."""
    os.set_blocking(master, False)
    seen, end = b"", time.monotonic() + 60
    while wanted not in re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen):
        assert time.monotonic() < end, seen[-2000:]
        try:
            seen += os.read(master, 65536)
        except BlockingIOError:
            await asyncio.sleep(0.02)
    return seen
