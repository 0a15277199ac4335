"""Archives that are written to the host's disk: slowly, to a full disk, and with an early end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.tool_server.archive_download import BACKLOG, ArchiveDownload, download_archive
from outrider.sandbox.runtimes.tool_server.client import Done, ToolClient

from .test_toolclient import Peer, frame, pair

__all__ = ["pair"]

pytestmark = pytest.mark.timeout(60)
PIECE = bytes(range(256)) * 1024


async def flood(peer: Peer, pieces: int) -> None:
    """Send parts, and then the reply."""
    call, _, _ = await peer.request()
    with contextlib.suppress(OSError):  # the client may have closed the connection
        for _ in range(pieces):
            await peer.send(frame(call, "part", {"data": PIECE}))
        await peer.send(frame(call, "ok", {}))


async def usable(client: ToolClient, peer: Peer) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(client.call("next", {}, Done))
        while (request := await peer.request())[1] != "next":
            pass
        await peer.send(frame(request[0], "ok", {}))


async def test_all_that_came_is_in_the_file(pair: tuple[ToolClient, Peer], tmp_path: Path) -> None:
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        group.create_task(flood(peer, 100))
        await download_archive(client, "snapshot", {"paths": []}, tmp_path / "a", limit=100 * len(PIECE))
    assert (tmp_path / "a").read_bytes() == PIECE * 100
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        await download_archive(client, "snapshot", {}, tmp_path / "a", limit=1)


class Paused(ToolClient):
    """A client that reports when it is paused."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, lambda: "")
        self.paused = asyncio.Event()

    def pause(self) -> None:
        super().pause()
        self.paused.set()


@pytest.mark.deep
async def test_a_slow_disk_makes_the_server_wait() -> None:
    ours, theirs = socket.socketpair()
    client, peer = Paused(ours), Peer(theirs)
    await client.open()
    reader, writer = os.pipe()
    saving = ArchiveDownload(client, writer)
    got = 0
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(flood(peer, 400))
        call = group.create_task(saving.call("snapshot", {}, 400 * len(PIECE)))
        group.create_task(saving.write(call))
        await client.paused.wait()
        assert BACKLOG < saving._size < 2 * BACKLOG
        assert not sending.done()
        while got < 400 * len(PIECE):
            got += len(await asyncio.to_thread(os.read, reader, 1 << 20))
    assert saving.fault is None
    for fd in (reader, writer):
        os.close(fd)
    await usable(client, peer)
    await client.close()
    theirs.close()


async def test_a_full_disk_is_told_and_leaves_nothing(pair: tuple[ToolClient, Peer], tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk. It cuts one write short and then refuses."""
    client, peer = pair
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(PIECE) + 1000, before[1]))
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(flood(peer, 5))
            with pytest.raises(RuntimeFailure, match=r"the node cannot write .*File too large") as told:
                await asyncio.wait_for(
                    download_archive(client, "snapshot", {}, tmp_path / "a", limit=10 * len(PIECE)), 30
                )
            sending.cancel()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not told.value.inside
    assert not (tmp_path / "a").exists()


async def test_more_than_may_be_is_a_failure_and_no_file(pair: tuple[ToolClient, Peer], tmp_path: Path) -> None:
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(flood(peer, 3))
        with pytest.raises(RuntimeFailure, match="more than it was asked for"):
            await download_archive(client, "snapshot", {}, tmp_path / "a", limit=len(PIECE))
        sending.cancel()
    assert not (tmp_path / "a").exists()


async def test_a_cancelled_one_leaves_no_file(pair: tuple[ToolClient, Peer], tmp_path: Path) -> None:
    client, peer = pair
    async with asyncio.TaskGroup() as group:
        task = group.create_task(download_archive(client, "snapshot", {}, tmp_path / "a", limit=1 << 30))
        call, _, _ = await peer.request()
        await peer.send(frame(call, "part", {"data": PIECE}))
        task.cancel()
        assert (await peer.request())[1:] == ("cancel", {"call": call})
        await peer.send(frame(call, "error", {"code": "failed", "text": "killed"}))
    assert task.cancelled()
    assert not (tmp_path / "a").exists()
    await usable(client, peer)
