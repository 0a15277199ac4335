"""Attacks on network records and replays: the size of a record, secrets in a record, and the files that a replay may
read."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from network.world import HELLO, a_door, a_server, connect, get, said
from outrider.destinations import Phase
from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.network.record import MAX_BYTES, NetworkRecord, record_file
from outrider.sandbox.network.requests import read_request
from outrider.spec import NetworkSpec

NAMES = {"files.test": [["127.0.0.1"]]}
SECRET = "zqsecretqz"


def lines(data: bytes) -> list[dict[str, str]]:
    return [json.loads(line) for line in data.splitlines()]


def test_long_addresses_count() -> None:
    """The URLs count towards the size of a record: 400 URLs of 60,000 bytes, each with a small reply, exceed
    MAX_BYTES."""
    record = NetworkRecord(lambda: Phase.AGENT)
    for number in range(400):
        request = read_request(get(f"http://files.test/{number:03}?{'x' * 60_000}").encode())
        if record.reserve(len(HELLO)):
            record.keep(request, HELLO)
    data = record_file([record, record])
    kept = [line for line in lines(data) if "reply" in line]
    assert len(kept) == MAX_BYTES // record.replies[0].size
    assert len(data) < MAX_BYTES + 1000
    assert lines(data)[-1] == {"phase": "agent"}, "the record says that replies are missing"


async def test_replies_that_never_end_share_the_room_of_the_record(tmp_path: Path) -> None:
    """20 simultaneous replies of 3 MiB each, none of which ends, hold at most MAX_BYTES together instead of 60 MiB."""
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (3 << 20))
        await writer.drain()
        await done.wait()

    async with a_server(answer=answer) as server:
        place = f"files.test:{server.port}"
        spec = {"allow": [place], "record": True}
        async with a_door(tmp_path, spec=spec, names=NAMES, internal=[place]) as (door, _):
            record = door.record
            assert record is not None
            clients = [await asyncio.open_unix_connection(tmp_path / "door") for _ in range(20)]
            for number, (reader, writer) in enumerate(clients):
                writer.write(get(f"http://{place}/{number}").encode())
                async with asyncio.timeout(20):
                    await reader.readexactly(3 << 20)
            assert 0 <= record._left < MAX_BYTES
            assert [reply.reply for reply in record.replies] == [None], "full, and nothing is complete"
            for _, writer in clients:
                writer.close()
            done.set()
            await door.enter(None)
            assert record._left == MAX_BYTES, "what is cut off gives its room back"


async def test_a_record_holds_no_cookies_and_no_replies_to_credentials(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        cookies = f"Set-Cookie: session={SECRET}\r\nset-cookie2: {SECRET}\r\n".encode()
        writer.write(HELLO.replace(b"Content-Length", cookies + b"X-Kept: 1\r\nContent-Length"))

    async with a_server(answer=answer) as server:
        place = f"files.test:{server.port}"
        spec = {"allow": [place], "record": True}
        async with a_door(tmp_path, spec=spec, names=NAMES, internal=[place]) as (door, _):
            assert SECRET in await said(tmp_path, get(f"http://{place}/a")), "the client has its cookie"
            for field in (f"Authorization: Bearer {SECRET}", f"cookie: session={SECRET}"):
                assert (await said(tmp_path, get(f"http://{place}/{SECRET}", field))).endswith("hi")
            assert door.record is not None
            [line] = lines(record_file([door.record]))
    reply = base64.b64decode(line["reply"])
    assert line["url"] == f"http://{place}/a"
    assert reply.startswith(b"HTTP/1.1 200 OK\r\nX-Kept: 1\r\nContent-Length: 2\r\n")
    assert SECRET.encode() not in reply


async def test_a_query_is_not_shown_in_the_timeline(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"")
    async with a_door(tmp_path, spec={"allow": ["files.test"], "replay": "record"}) as (door, _):
        got = await said(tmp_path, get(f"http://files.test/x?token={SECRET}"))
        assert got.startswith("HTTP/1.1 504 Gateway Timeout")
        [use] = door.uses.values()
        assert use.refusal == "the record has no reply to GET http://files.test/x with this query"


async def test_a_replay_says_that_it_has_no_https(tmp_path: Path) -> None:
    """A task with a replay is refused if one of its destinations can only be HTTPS. Otherwise each tunnel is
    refused."""
    (tmp_path / "record").write_bytes(b"")
    async with a_door(tmp_path, spec={"allow": ["files.test"], "replay": "record"}) as (door, _):
        got = await said(tmp_path, connect("files.test:443"))
        assert got.startswith("HTTP/1.1 504 ")
        text = "a replay has no tunnels (HTTPS): use http:// addresses, or a mirror such as mirror:pip"
        assert got.endswith(f"outrider: {text}\n")
        assert [use.refusal for use in door.uses.values()] == [text]
    with pytest.raises(ValueError, match=r"a replay cannot answer 'files\.test:443': HTTPS is not recorded"):
        NetworkSpec.model_validate({"verifier": ["mirror:pip", "files.test:443"], "replay": "record"})


async def test_a_replay_reads_only_files_that_tasks_may_read(tmp_path: Path) -> None:
    """A replay cannot read another tenant's artifacts. The errors are the same as for uploads, and do not show whether
    a file exists."""
    theirs, files = tmp_path / "data" / "artifacts" / "theirs", tmp_path / "files"
    for folder in (theirs.parent, files / "folder"):
        folder.mkdir(parents=True)
    theirs.write_bytes(b'{"phase":"agent"}\n')
    os.mkfifo(files / "pipe")
    (files / "link").symlink_to(theirs)
    (files / "zero").symlink_to("/dev/zero")
    paths = HostPaths(files=files)
    refusals = []
    for name in ("../data/artifacts/theirs", "../data/artifacts/nobodys", "link", "pipe", "zero"):
        with pytest.raises(InvalidField) as refused:
            paths.upload(name, field="task.runtime.network.replay")
        refusals.append(refused.value.message.replace(name, "NAME"))
    assert refusals[0] == refusals[1] == "'NAME' is outside the files folder"
    for name in ("../../etc/passwd", "/etc/passwd", "a/../b", ""):
        with pytest.raises(ValidationError):
            NetworkSpec.model_validate({"replay": name})
    with pytest.raises(RuntimeUnavailable, match="folder is no record of a network: Is a directory") as broken:
        async with a_door(files, spec={"replay": "folder"}):
            raise AssertionError
    assert str(files) not in str(broken.value), "the error has no path of the service's machine"
