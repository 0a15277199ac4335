"""Runs the demo: starts a whole service with the shipped policy in this process, and runs groups of real sessions.

The module uses the client, as a trainer does. Invariant: when `run_demo` returns, the service has ended. Its data have
been removed, unless the caller named the data folder.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

from outrider.api.server import serving
from outrider.client.client import AsyncClient, Watch
from outrider.config import Config, LanesConfig, ModelConfig
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.lab.demo.summary import RolloutSummary
from outrider.lab.demo.task import Episode, group_spec, make_task
from outrider.service.assembly import open_service
from outrider.spec import EngineSpec

GROUPS = 4
SAMPLES = 8
"""Number of sessions of one group."""

LANES = LanesConfig(init=8, run=32, eval=8)
"""The lane `run` has room for all sessions at once. The embedded engine then batches 32 requests, and its throughput is
about 7 times as high."""


async def run_demo(
    runtime: str,
    watch: Watch,
    *,
    data: Path | None = None,
    policy: Path = POLICY,
    begin: Callable[[str], Awaitable[None]] | None = None,
    end: Callable[[RolloutSummary], Awaitable[None]] | None = None,
) -> RolloutSummary:
    """Run GROUPS x SAMPLES sessions in sandboxes of the kind `runtime`.

    - `watch`: called with the groups as they progress.
    - `data`: the folder of the service's database. With None, the database is deleted afterwards.
    - `policy`: the model's folder.
    - `begin`: called with the service's URL before the first session.
    - `end`: called with the results before the service ends.

    Raises EngineUnavailable if torch is missing, and the service's errors.
    """
    started = time.monotonic()
    episodes: dict[str, Episode] = {}
    for seed in itertools.count():  # use the first seeds whose items differ
        episode = make_task(seed)
        episodes.setdefault(episode.item, episode)
        if len(episodes) == GROUPS:
            break
    with nullcontext(data) if data else tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        config = Config(
            port=0,
            data=Path(folder),
            model=ModelConfig(tokenizer=str(policy), renderer=RENDERER, name="demo-policy"),
            lanes=LANES,
            engines=(EngineSpec(kind="embedded", model=str(policy)),),
        )
        async with open_service(config) as opened, serving(*opened) as url, AsyncClient(url) as client:
            if begin is not None:
                await begin(url)
            specs = [group_spec(episode, SAMPLES, runtime=runtime) for episode in episodes.values()]
            submitted = [await client.submit(spec) for spec in specs]
            await client.wait([group.id for group in submitted], watch)
            seconds = time.monotonic() - started
            groups = [await client.group(group.id, samples=True) for group in submitted]
            turns = {session.id: await client.turns(session.id) for group in groups for session in group.sessions}
            found = RolloutSummary(groups=tuple(groups), turns=turns, seconds=seconds)
            if end is not None:
                await end(found)
    return found
