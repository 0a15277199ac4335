"""A small service for tests: a scripted engine, the memory runtime, agents that tests control, and HTTP only on
demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.api.server import serving
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.engines.base import EngineOptions
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import SessionState
from outrider.schemas import GroupView, LaneStats, SessionView
from outrider.service.admission import validate_group
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.sessions.node import LocalNode
from outrider.spec import OPERATOR_TENANT, GroupSpec
from outrider.store.rows import GroupRow
from outrider.store.store import Store
from outrider.trajectory import SessionResult

from .stage import ACTOR, GRADER, SANDBOX, Stage, a_stage

SAY = "hello<|im_end|>"
RENDERER = "qwen3"
HASTY = RetryPolicy(first=0.01, longest=0.02)


class World:
    """A running service with one scripted engine, and the calls and checks that tests make."""

    def __init__(self, service: Service, node: LocalNode, url: str, stage: Stage, engine: ScriptedEngine) -> None:
        self.service = service
        self.node = node
        self.url = url
        self.stage = stage
        self.engine = engine

    async def submit(self, *do: str, **fields: Any) -> GroupView:
        """Submit a group whose agents take the steps `do`; `fields` as in `group`."""
        return await self.service.submit(group(*do, **fields))

    async def run(self, *do: str, **fields: Any) -> SessionView:
        """Submit one session and return it when it is done."""
        submitted = await self.submit(*do, **fields)
        (session,) = (await self.done(submitted.id)).sessions
        return session

    async def done(self, group_id: str, *, samples: bool = False) -> GroupView:
        """Return the group when it is in the results."""
        after = 0
        while True:
            page = await self.service.results(after=after, wait=30, limit=100, samples=samples)
            after = page.cursor
            for view in page.groups:
                if view.id == group_id:
                    return view

    async def state(self, session_id: str, state: SessionState) -> SessionView:
        """Return the session when it is in this state."""
        while (view := await self.service.reader.session(session_id)).state is not state:
            assert view.state is not SessionState.DONE
        return view

    async def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in await self.service.store.events(after=0, limit=10_000) if event.kind == kind]

    def lanes(self) -> tuple[LaneStats, ...]:
        return self.node.stats().lanes

    def assert_quiet(self) -> None:
        """Check that no slot, engine session, call or sandbox is held."""
        assert self.stage.ledger.balanced
        assert set(self.stage.ledger.stopped.values()) <= {1}
        assert [(lane.in_use, lane.waiting) for lane in self.lanes()] == [(0, 0)] * 5
        assert self.node.stats().sessions == 0
        for engine in self.service.pool.status():
            assert (engine.in_flight, engine.sessions, engine.assigned_tokens) == (0, 0, 0)


def group(*do: str, init: Sequence[str] = (), n: int = 1, **fields: Any) -> GroupSpec:
    """Return a group whose agents take the steps `do`. `fields` has fields of the group (`priority`, `idempotency_key`,
    `callback_url`, `min_usable`) and of the task, such as `evaluator`, `runtime` and `limits`."""
    of_group: dict[str, Any] = {
        name: fields.pop(name)
        for name in ("priority", "idempotency_key", "callback_url", "min_usable")
        if name in fields
    }
    verdicts = fields.pop("verdicts", [1.0])
    task = {
        "instruction": "do it",
        "harness": {"agent": ACTOR, "options": {"do": list(do) or ["ask"], "init": list(init)}},
        "evaluator": {"kind": "callable", "path": GRADER, "options": {"verdicts": verdicts}},
    }
    runtime: dict[str, Any] = {"kind": SANDBOX} | fields.pop("runtime", {})
    return validate_group({"task": task | {"runtime": runtime} | fields, "n": n, **of_group})


async def put(
    store: Store,
    id: str,
    *session_ids: str,
    callback_url: str | None = None,
    tenant: str = OPERATOR_TENANT,
    **fields: Any,
) -> None:
    """Store a group as the service does; `fields` as in `group`."""
    made = group("ask", n=len(session_ids), **fields)
    row = GroupRow(
        id=id,
        n=made.n,
        priority=0,
        callback_url=callback_url,
        created=1.0,
        labels=made.task.labels,
        tenant=tenant,
    )
    await store.create_group(row, made.model_dump_json().encode(), session_ids)


def result_of(session: SessionView) -> SessionResult:
    assert session.result is not None
    return session.result


def config(folder: Path, tokenizer: Path, **settings: Any) -> Config:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    defaults: dict[str, Any] = {
        "port": 0,
        "plugins": PluginsConfig(allow=("*",)),
        "data": folder / "data",
        "files": folder / "files",
        "model": ModelConfig(tokenizer=str(tokenizer), renderer=RENDERER),
        "lanes": LanesConfig(init=4, run=8, eval=4),
    }
    return Config(**defaults | settings)


def engine_of(tokenizer: Path, replies: Sequence[Any], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        EngineOptions(name="scripted", tokenizer=str(tokenizer), options={"replies": list(replies), **options})
    )


@asynccontextmanager
async def a_world(
    folder: Path,
    tokenizer: Path,
    replies: Sequence[Any] = (SAY,),
    *,
    script: dict[str, Any] | None = None,
    http: bool = False,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run a service. `replies` and `script` are the engine's; `settings` are fields of `Config`. With `http` the
    service listens at `url`; otherwise `url` is empty.

    Checks at the end that every sandbox that was started has been stopped exactly once.
    """
    engine = engine_of(tokenizer, replies, **(script or {}))
    with a_stage() as stage:
        async with open_service(config(folder, tokenizer, **settings), pauses=HASTY) as opened:
            service = opened.service
            await service.pool.add_engine(engine)
            async with serving(*opened) if http else unserved(service) as url:
                yield World(service, opened.own_node, url, stage, engine)
        assert stage.ledger.balanced
        assert set(stage.ledger.stopped.values()) <= {1}


@asynccontextmanager
async def unserved(service: Service) -> AsyncIterator[str]:
    async with service.running():
        yield ""
