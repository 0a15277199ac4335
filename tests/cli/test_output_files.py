"""A command that cannot write its whole output file leaves the old file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.world import REPLIES, Cli, write_task
from outrider.cli import trace
from outrider.client.trace_events import trace_events
from outrider.errors import ServiceError
from support.service import running_service


async def test_a_full_disk_and_a_lost_service_leave_the_old_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, folder = write_task(tmp_path), tmp_path / "written"
    task.write_text('artifacts = ["*.txt"]\n' + task.read_text())
    folder.mkdir()
    file = folder / "file"
    file.write_text("old")

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(timelines: Iterable[Any]) -> Iterator[Any]:
        yield next(iter(trace_events(timelines)))
        raise ServiceError("the service is away")

    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", str(task), "--url", url, "--json")
        session = ran.document["sessions"][0]["id"]
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", no_space)
            tried = [
                await cli(*words, file, "--url", url)
                for words in (
                    ("artifacts", session, "/work/out.txt", "-o"),
                    ("show", session, "--html"),
                    ("trace", session, "-o"),
                )
            ]
        monkeypatch.setattr(trace, "trace_events", half)
        away = await cli("trace", session, "-o", file, "--url", url)
    for one in tried:
        assert one.code == 1
        assert one.err.startswith(f"error: cannot write {file}: No space left on device\n")
    assert (away.code, away.err) == (1, "error: the service is away\n")
    assert file.read_text() == "old"
    assert list(folder.iterdir()) == [file]
