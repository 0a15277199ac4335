"""`outrider demo --open` opens the page, and serves the page until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from cli.world import PROGRAM


@pytest.mark.deep
async def test_the_page_of_the_demo_is_opened_and_stays(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "demo", "--open", "--json", "--out", str(tmp_path / "out")),
        env=os.environ | {"BROWSER": f"{browser} %s"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        assert b'"sessions":32' in line.replace(b" ", b"")
        url = opened.read_text().strip()
        async with aiohttp.ClientSession() as http:
            async with http.get(url) as page:
                assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            async with http.get(f"{url}v1/sessions?limit=100") as listed:
                assert {each["state"] for each in (await listed.json())["sessions"]} == {"done"}
    finally:
        process.send_signal(signal.SIGINT)
        _, notes = await process.communicate()
    assert process.returncode == 0, notes
    assert f"the page stays at {url} until Ctrl-C" in notes.decode()
