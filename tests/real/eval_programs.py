"""Helpers that run `outrider serve` and `outrider eval` as processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cli.world import program


@asynccontextmanager
async def serving(words: Sequence[str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await program("serve", *words)
    assert process.stdout is not None
    assert process.stderr is not None
    logs = asyncio.ensure_future(process.stderr.read())  # otherwise the program blocks when the pipe is full
    try:
        ready = (await process.stdout.readline()).decode()
        assert ready, (await logs).decode()
        yield process, ready.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await logs


async def evaluated(*words: str) -> str:
    """Run `outrider eval`, and return its output."""
    process = await program("eval", *words)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()
