"""The Python blocks of the pages run against a live service with a scripted model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.environment import DEFAULT_URL
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from support.service import END, call, running_service, say

from .pages import PAGES, Block, Page

RUN = "python run"
SERVED = [page for page in PAGES if any(block.info.startswith(RUN) for block in page.blocks)]
MODEL: list[dict[str, Any]] = [
    {"when": "15.999", "reply": say(r"\boxed{18.015}")},
    {"when": "mass of a molecule of water", "reply": call("O", tool="mass", argument="symbol")},
    {"when": "<tool_response>", "reply": say("done")},
    {"when": "one shell script only", "reply": f"echo hello > out.txt{END}"},
    {"when": "Write the word hello into out.txt", "reply": call("echo hello > out.txt")},
]


def as_module(block: Block, folder: Path) -> None:
    """Write a block that names a file to this file, so that later blocks can import it."""
    (folder / block.info.removeprefix(RUN).strip()).write_text(block.text)


def execute(block: Block, url: str) -> None:
    program = compile(block.text.replace(DEFAULT_URL, url), block.where, "exec")
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("page", SERVED, ids=repr)
async def test_the_pages_python_runs(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"the pages' tasks run in namespace sandboxes, and here {can.detail}")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        async with running_service(tmp_path=tmp_path, replies=MODEL) as (service, url):
            for block in (found for found in page.blocks if found.info.startswith(RUN)):
                if block.info == RUN:
                    await asyncio.to_thread(execute, block, url)
                else:
                    as_module(block, tmp_path)
            for group in (await service.results(after=0, wait=0, limit=100, samples=False)).groups:
                for session in group.sessions:
                    assert session.result is not None
                    assert session.result.error is None, session.result.error
                    assert session.result.verdict is not None
                    assert session.result.verdict.reward == 1.0
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]
