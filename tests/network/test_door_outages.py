"""Servers and name servers that fall silent, slow down or cut off their replies.

A request ends within a time limit and with an error that names the cause. The server counts as broken, unless a program
in the sandbox may have caused the failure to prevent its grade.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from network.world import Answer, Server, a_door, a_server, connect, get, said
from outrider.destinations import Phase
from outrider.sandbox.network.door import Door
from outrider.sandbox.network.proxy import WAITS, ProxyWaits
from outrider.sandbox.network.shared import Lookups
from support.waiting import until

PAGE = "http://pip.mirror.internal/simple/x/"
START = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf"


@asynccontextmanager
async def an_index(tmp_path: Path, answer: Answer, waits: ProxyWaits = WAITS) -> AsyncIterator[tuple[Door, Server]]:
    """Yield a door with a package index that replies as `answer` does, and the index's server."""
    async with a_server(answer=answer) as server:
        index = f"http://index.test:{server.port}/simple/"
        names = {"index.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, "mirror:pip", names=names, pip_index=index, waits=waits) as (door, _):
            yield door, server


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    await reader.read()


async def stalled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    writer.write(START)
    await reader.read()


async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    writer.write(START)


async def give_up(folder: Path, text: str, taken: int) -> None:
    """Send a request, read `taken` bytes of the reply, wait 0.3 s and hang up, as a client with a time limit does."""
    reader, writer = await asyncio.open_unix_connection(folder / "door")
    writer.write(text.encode())
    if taken:
        await reader.read(taken)
    await asyncio.sleep(0.3)
    writer.close()


@pytest.mark.parametrize(
    ("answer", "reason"), [(silent, "did not answer"), (stalled, "stopped in the middle of its reply")]
)
async def test_an_index_that_is_silent_when_the_phase_ends_has_failed(
    tmp_path: Path, answer: Answer, reason: str
) -> None:
    """The client gives up long before the proxy's own limit for silence. pip, for example, gives up after 15 s."""
    async with an_index(tmp_path, answer, ProxyWaits(answer=0.2)) as (door, _):
        await give_up(tmp_path, get(PAGE), 4 if answer is stalled else 0)
        await asyncio.sleep(0.1)
        assert door.broken(Phase.AGENT) == f"pip.mirror.internal:80 {reason}", "while the phase still runs"
        await door.enter(None)
        assert door.broken(Phase.AGENT) == f"pip.mirror.internal:80 {reason}"
        assert door.broken(Phase.VERIFIER) is None


async def test_a_request_just_before_the_end_is_no_failure(tmp_path: Path) -> None:
    """Otherwise a program could veto its grade: it would send a request and exit at once."""
    async with an_index(tmp_path, silent) as (door, server):
        asked = asyncio.create_task(said(tmp_path, get(PAGE)))
        await until(lambda: server.heard)
        await door.enter(None)
        await asked
        assert door.broken(*Phase) is None
        assert door.uses[Phase.AGENT, "pip.mirror.internal:80"].failed == 0


async def test_an_index_that_cuts_its_reply_off_has_failed(tmp_path: Path) -> None:
    async with an_index(tmp_path, cut_off) as (door, _):
        assert (await said(tmp_path, get(PAGE))).endswith(("half", "[reset]"))
        assert door.broken(Phase.AGENT) == "pip.mirror.internal:80 ended its reply early"


async def test_a_client_that_hangs_up_or_reads_slowly_is_no_failure_of_the_index(tmp_path: Path) -> None:
    """A client that hangs up, or that stops reading until the server gives up, does not make the server count as
    broken."""
    gone = asyncio.Event()

    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 2_000_000)
        await gone.wait()

    async with an_index(tmp_path, impatient, ProxyWaits(client=0.2)) as (door, _):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "door", limit=1)
        writer.write(get(PAGE).encode())
        await reader.read(1)
        await asyncio.sleep(0.5)  # the buffers are full, because the client does not read
        gone.set()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(3_000_000)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
        writer.write(get(PAGE).encode())
        await reader.read(10)
        writer.transport.abort()
        await asyncio.sleep(0.3)
        assert door.broken(Phase.AGENT) is None


async def test_a_later_answer_counts_more_than_an_older_silence(tmp_path: Path) -> None:
    """A server that answers the second request is not broken, although the first request got no reply."""
    calls = 0

    async def second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await reader.read()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    async with an_index(tmp_path, second, ProxyWaits(answer=0.1)) as (door, _):
        await give_up(tmp_path, get(PAGE), 0)
        assert (await said(tmp_path, get(PAGE))).endswith("hi")
        await door.enter(None)
        assert door.uses[Phase.AGENT, "pip.mirror.internal:80"].failed == 1
        assert door.broken(Phase.AGENT) is None


async def test_a_new_grading_forgets_also_the_requests_under_way(tmp_path: Path) -> None:
    async with an_index(tmp_path, silent, ProxyWaits(answer=0.1)) as (door, _):
        await door.enter(Phase.VERIFIER)
        await give_up(tmp_path, get(PAGE), 0)
        assert door.broken(Phase.VERIFIER) is not None
        await give_up(tmp_path, get(PAGE), 0)
        door.forget_failures()
        assert door.broken(Phase.VERIFIER) is None
        await give_up(tmp_path, get(PAGE), 0)
        assert door.broken(Phase.VERIFIER) == "pip.mirror.internal:80 did not answer"


class SlowNames:
    """A name server, called in threads. It resolves `files.test` at once. Other names fail when `go` is set, or after
    20 s."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host != "files.test":
            self.go.wait(20)
            raise OSError(-2, "Name or service not known")
        return ["127.0.0.1"]


@asynccontextmanager
async def slow_names() -> AsyncIterator[tuple[SlowNames, ThreadPoolExecutor, ThreadPoolExecutor]]:
    names = SlowNames()
    with ThreadPoolExecutor(8) as named, ThreadPoolExecutor(8) as others:
        try:
            yield names, named, others
        finally:
            names.go.set()


async def a_failure(lookups: Lookups, host: str, named: bool, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            await lookups.resolve(host, 80, named)
    except TimeoutError:
        return "late"
    except OSError as error:
        return str(error.strerror)
    return ""


async def test_made_up_names_hold_up_no_name_of_the_task() -> None:
    """Look-ups of invented names whose name servers never answer do not delay a declared name. Otherwise a program
    could make its task's server unreachable, and so turn a bad grade into an error. A look-up counts until its thread
    ends, even if no request waits for it any more."""
    async with slow_names() as (names, named, others):
        mine, theirs = (Lookups(named, others, names.look_up) for _ in range(2))
        for number in range(4):
            assert await a_failure(mine, f"slow{number}.evil.test", False, 0.05) == "late"
        assert len(names.asked) == 2, "no third thread, although the first two look-ups were given up"
        assert await a_failure(mine, "files.test", True, 5) == ""
        assert await a_failure(theirs, "files.test", True, 5) == ""


async def test_requests_for_one_name_share_a_look_up() -> None:
    """Otherwise a program could delay its task's server with many simultaneous requests for its name."""
    async with slow_names() as (names, named, others):
        mine = Lookups(named, others, names.look_up)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(a_failure(mine, "slow.test", True, 10)) for _ in range(30)]
            await asyncio.sleep(0.1)
            tasks[0].cancel()
            names.go.set()
        assert names.asked == ["slow.test"]
        assert {task.result() for task in tasks[1:]} == {"Name or service not known"}
        assert await a_failure(mine, "slow.test", True, 10) == "Name or service not known"
        assert len(names.asked) == 2, "a later request asks anew"


@asynccontextmanager
async def a_door_with_slow_names(tmp_path: Path, *allow: str, **more: Any) -> AsyncIterator[tuple[Door, SlowNames]]:
    async with slow_names() as (names, named, others):
        resolve = Lookups(named, others, names.look_up).resolve
        async with a_door(tmp_path, *allow, resolve=resolve, **more) as (door, _):
            yield door, names


async def test_a_name_server_that_never_answers_is_said(tmp_path: Path) -> None:
    async with a_door_with_slow_names(tmp_path, "named.test", "*.test:80", connect_seconds=0.3) as (door, _):
        for text in (get("http://named.test/"), connect("named.test:443"), get("http://made-up.test/")):
            got = await said(tmp_path, text, seconds=5)
            assert got.startswith("HTTP/1.1 502 Bad Gateway")
            assert "within 0.3 s" in got
        assert door.broken(Phase.AGENT) == "cannot reach named.test:80 within 0.3 s"
        assert not door.uses[Phase.AGENT, "made-up.test:80"].broken


async def test_a_server_that_is_not_reached_before_the_phase_ends_has_failed(tmp_path: Path) -> None:
    """A declared server is broken if a request has waited longer than `ProxyWaits.connect` when the phase ends. This
    covers an agent whose time limit is shorter than CONNECT_SECONDS."""
    for patience, failure in ((0.1, "named.test:80 was not reached before the network of the phase ended"), (9, None)):
        waits = ProxyWaits(connect=patience)
        async with a_door_with_slow_names(tmp_path, "named.test", "*.test:80", waits=waits) as (door, _):
            await give_up(tmp_path, get("http://named.test/"), 0)
            await give_up(tmp_path, get("http://made-up.test/"), 0)
            await door.enter(None)
            assert door.broken(Phase.AGENT) == failure
            assert not door.uses[Phase.AGENT, "made-up.test:80"].broken


async def test_a_tunnel_that_is_reset_or_never_ends(tmp_path: Path) -> None:
    """A tunnel ends if its server resets the connection, and after `ProxyWaits.silence` if its client has shut down
    only the sending side. Neither counts as a failure."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        if b"reset" in head:
            writer.transport.abort()
        await reader.read()
        await asyncio.sleep(20)

    async with a_server(answer=reset) as server:
        place = f"files.test:{server.port}"
        names, waits = {"files.test": [["127.0.0.1"]]}, ProxyWaits(silence=0.3)
        async with a_door(tmp_path, place, names=names, internal=[place], waits=waits) as (door, _):
            for word in (b"reset", b"other"):
                async with asyncio.timeout(5):
                    reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
                    writer.write(connect(place).encode())
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                    writer.write(word + b"\r\n\r\n")
                    writer.write_eof()
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""
                    writer.close()
            await asyncio.sleep(0.1)
            assert not door._open, "neither tunnel is left"
            assert door.broken(Phase.AGENT) is None, "a program can end any tunnel so"


async def test_a_connection_that_is_reset_while_it_is_opened_ends_the_request(tmp_path: Path) -> None:
    """The client resets its connection during the look-up of the name. The door ends the request and serves the next
    client."""
    async with a_door_with_slow_names(tmp_path, "named.test") as (door, names):
        _reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
        writer.write(connect("named.test:443").encode())
        await until(lambda: names.asked)
        writer.transport.abort()
        names.go.set()
        await until(lambda: not door._open)
        assert (await said(tmp_path, connect("named.test:22"))).startswith("HTTP/1.1 403")


async def test_an_address_that_does_not_answer_does_not_hide_the_next_one(tmp_path: Path) -> None:
    """Such as the IPv6 address of a server, on a machine whose router drops IPv6."""
    with socket.socket() as deaf, ExitStack() as fillers:
        async with a_server() as server:
            deaf.bind(("127.0.0.2", server.port))
            deaf.listen(0)
            for _ in range(3):  # the kernel then drops further connections to this address
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.2", server.port))
            place = f"two.test:{server.port}"
            names = {"two.test": [["127.0.0.2", "127.0.0.1"]]}
            async with a_door(tmp_path, place, names=names, internal=[place], connect_seconds=2.0) as (door, _):
                assert (await said(tmp_path, get(f"http://{place}/"))).endswith("hi")
                assert door.broken(Phase.AGENT) is None
