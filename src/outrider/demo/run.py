"""The demo: a whole service in this process on the shipped policy, and groups of real sessions against it.

It knows no terminal. Sessions are submitted, followed and read back through the client, as a trainer does it.
Invariant: nothing of it is left when `run_demo` returns, but what it returns and the data folder it was given.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from outrider.api.server import serving
from outrider.client import AsyncClient, Watch
from outrider.config import Config, LanesConfig, ModelConfig
from outrider.demo.dialogue import POLICY
from outrider.demo.task import Episode, group_spec, make_task
from outrider.plugins import resolve
from outrider.runtimes.base import Availability, RuntimeKind
from outrider.schemas import GroupView, TurnView
from outrider.service.service import Service
from outrider.spec import EngineSpec

GROUPS = 4
SAMPLES = 8
RENDERER = "template:qwen3"
LANES = LanesConfig(init=8, run=32, eval=8)


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo made: its groups, done and with their samples, and every session's turns by its id."""

    groups: tuple[GroupView, ...]
    turns: dict[str, tuple[TurnView, ...]]
    seconds: float


def choose_runtime() -> tuple[str, Availability]:
    """The namespace runtime where it works, else `process`; and what the machine says of the first."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    can = runtime.available()
    return ("namespace" if can.ok else "process"), can


async def run_demo(runtime: str, watch: Watch, *, data: Path | None = None) -> Rollouts:
    """Run all groups to their end. `data` keeps the service's database; without, it is thrown away.

    Raises EngineUnavailable when torch is missing, and what the service raises.
    """
    started = time.monotonic()
    with _data_folder(data) as folder:
        async with Service(_config(folder)) as service, serving(service) as url, AsyncClient(url) as client:
            specs = [group_spec(episode, SAMPLES, runtime=runtime) for episode in _episodes(GROUPS)]
            submitted = [await client.submit(spec) for spec in specs]
            await client.wait([group.id for group in submitted], watch)
            seconds = time.monotonic() - started
            groups = [await client.group(group.id, samples=True) for group in submitted]
            turns = {session.id: await client.turns(session.id) for group in groups for session in group.sessions}
    return Rollouts(groups=tuple(groups), turns=turns, seconds=seconds)


@contextmanager
def _data_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        yield Path(folder)


def _config(data: Path) -> Config:
    policy = str(POLICY)
    return Config(
        port=0,
        data=data,
        model=ModelConfig(tokenizer=policy, renderer=RENDERER, name="demo-policy"),
        lanes=LANES,
        engines=(EngineSpec(kind="embedded", model=policy),),
    )


def _episodes(count: int) -> list[Episode]:
    """The first so many drawings that ask for different items."""
    found: dict[str, Episode] = {}
    seed = 0
    while len(found) < count:
        episode = make_task(seed)
        found.setdefault(episode.item, episode)
        seed += 1
    return list(found.values())
